"""Custom modelling code travels with the checkpoint and is not run on the way."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from milepost.hf.aux_files import collect_model_files
from milepost.hf.remote_code import (
    collect_modules,
    local_auto_map,
    module_names,
    relative_imports,
)
from tests.hf.conftest import dtypes_of, write_directory

TRACE = """
import os
with open(os.environ["TRACE_FILE"], "a") as f:
    f.write(__name__.rpartition(".")[2] + "\\n")
"""
MODULES = {
    "configuration_x.py": """
from transformers import LlamaConfig
class XConfig(LlamaConfig):
    model_type = "x-custom"
""",
    "modeling_x.py": """
from transformers import LlamaForCausalLM
from .configuration_x import XConfig
from .helper_y import scale
class XForCausalLM(LlamaForCausalLM):
    config_class = XConfig
    scale = scale()
""",
    "helper_y.py": """
def scale():
    from .helper_z import SCALE
    return SCALE
""",
    "helper_z.py": "SCALE = 3\n",
    "unrelated.py": "raise RuntimeError('never copied, never run')\n",
}
AUTO_MAP = {
    "AutoConfig": "configuration_x.XConfig",
    "AutoModelForCausalLM": "modeling_x.XForCausalLM",
}
LOAD = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__name__ == "XForCausalLM" and model.scale == 3
print(float(model(torch.tensor([[1, 2]])).logits.detach().sum()))
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A remote-code model directory; every import of its modules is written to a trace."""
    monkeypatch.setenv("TRACE_FILE", str(tmp_path / "trace"))
    directory = tmp_path / "source"
    directory.mkdir()
    for name, text in MODULES.items():
        (directory / name).write_text(TRACE + text)
    config = {
        "model_type": "x-custom",
        "auto_map": AUTO_MAP,
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def load(directory: Path) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=True)
    return transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)


@pytest.mark.case("V13")
def test_every_module_travels_and_loads_on_a_clean_machine(source: Path, tmp_path: Path) -> None:
    import torch

    model = load(source)
    ran_at_load = (tmp_path / "trace").read_text()
    aux = collect_model_files(model, ties={}, dtype_names=dtypes_of(model))
    assert (tmp_path / "trace").read_text() == ran_at_load
    copied = {name for name in aux.files if name.endswith(".py")}
    assert copied == {"configuration_x.py", "modeling_x.py", "helper_y.py", "helper_z.py"}
    assert aux.notes == []
    document = json.loads(aux.files["config.json"])
    assert document["auto_map"] == AUTO_MAP
    assert document["architectures"] == ["XForCausalLM"]
    write_directory(tmp_path / "out", model, aux.files)
    expected = float(model.eval()(torch.tensor([[1, 2]])).logits.detach().sum())
    shutil.rmtree(source)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "out")],
        env={**os.environ, "HF_HOME": str(tmp_path / "clean"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.case("V13")
def test_a_module_that_is_gone_is_named(source: Path, tmp_path: Path) -> None:
    model = load(source)
    model.config.auto_map = {**AUTO_MAP, "AutoModel": "modeling_gone.XModel"}
    aux = collect_model_files(model, ties={}, dtype_names=[])
    assert len(aux.notes) == 1
    assert aux.notes[0].startswith("auto_map: modeling_gone.py was not found (looked in ")
    assert "modeling_x.py" in aux.files


@pytest.mark.case("V13")
def test_a_class_registered_for_an_auto_class_gets_its_auto_map_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_modeling.py").write_text(
        "from transformers import LlamaForCausalLM\nclass Mine(LlamaForCausalLM): ...\n"
    )
    import my_modeling  # type: ignore[import-not-found]
    import transformers

    monkeypatch.setattr(my_modeling.Mine, "_auto_class", "AutoModelForCausalLM")
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1
    )
    aux = collect_model_files(my_modeling.Mine(config), ties={}, dtype_names=[])
    document = json.loads(aux.files["config.json"])
    assert document["auto_map"] == {"AutoModelForCausalLM": "my_modeling.Mine"}
    assert b"class Mine" in aux.files["my_modeling.py"]


@pytest.mark.case("V13")
def test_a_hub_prefix_falls_only_where_the_file_is_present() -> None:
    auto_map = {
        "AutoConfig": "who/x--configuration_x.XConfig",
        "AutoTokenizer": ["who/x--tokenization_x.XTokenizer", None],
    }
    assert module_names(auto_map) == {"configuration_x", "tokenization_x"}
    assert local_auto_map(auto_map, {"tokenization_x"}) == {
        "AutoConfig": "who/x--configuration_x.XConfig",
        "AutoTokenizer": ["tokenization_x.XTokenizer", None],
    }


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b", "..", "a..b"])
def test_an_auto_map_cannot_name_files_outside_the_model_directory(name: str) -> None:
    modules = collect_modules([name], [])
    assert modules.files == {}
    assert modules.notes == [f"auto_map: {name!r} is not the name of a module; not copied"]


def test_relative_imports_of_packages_are_seen_and_those_that_climb_out_are_not() -> None:
    tree = ast.parse(
        "from . import a, b\nfrom .c import d\nfrom ..e import f\nfrom ...g import h\n"
        "import os\nfrom json import dumps\nfrom .star import *\n"
    )
    assert relative_imports(tree, "sub/module.py") == {
        "sub", "sub.a", "sub.b", "sub.c", "sub.c.d", "e", "e.f", "sub.star",
    }  # fmt: skip


@pytest.mark.case("V13")
def test_the_code_of_a_custom_tokenizer_travels_too(tmp_path: Path) -> None:
    (tmp_path / "tokenization_x.py").write_text("from .words import WORDS\n")
    (tmp_path / "words.py").write_text("WORDS = ()\n")

    class Custom:
        name_or_path = str(tmp_path)

        def save_pretrained(self, directory: str) -> None:
            auto_map = {"AutoTokenizer": ["who/x--tokenization_x.XTokenizer", None]}
            document = {"auto_map": auto_map, "tokenizer_class": "XTokenizer"}
            (Path(directory) / "tokenizer_config.json").write_text(json.dumps(document))

    aux = collect_model_files(object(), processing_class=Custom(), ties={}, dtype_names=[])
    assert set(aux.files) == {"tokenizer_config.json", "tokenization_x.py", "words.py"}
    document = json.loads(aux.files["tokenizer_config.json"])
    assert document["auto_map"] == {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}
    assert aux.notes == ["not a Hugging Face model: object has no config.json"]
