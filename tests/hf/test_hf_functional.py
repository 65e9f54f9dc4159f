"""The functional check: a sound directory runs, an unsound one is told why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.errors import NotFoundError
from milepost.hf.aux_files import collect_model_files
from milepost.hf.functional import RemoteCode, run_model
from tests.hf.conftest import dtypes_of, make_model, ties_of, write_directory


def checkpoint(directory: Path, family: str, tokenizer: Any = None, **overrides: Any) -> Path:
    model = make_model(family, **overrides)
    aux = collect_model_files(
        model, processing_class=tokenizer, ties=ties_of(model), dtype_names=dtypes_of(model)
    )
    write_directory(directory, model, aux.files)
    return directory


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_a_sound_directory_loads_runs_and_generates(
    family: str, tmp_path: Path, tokenizer: Any
) -> None:
    report = run_model(checkpoint(tmp_path, family, tokenizer))
    assert report.ok, report.problems
    assert report.output_shape == (1, 8, 32)
    assert report.parameters == sum(p.numel() for p in make_model(family).parameters())
    assert report.generated is not None
    assert report.skipped == ()


def test_a_directory_without_a_tokenizer_skips_the_generation(tmp_path: Path) -> None:
    report = run_model(checkpoint(tmp_path, "llama"))
    assert report.ok
    assert report.generated is None
    assert report.skipped == ("generation: the directory has no tokenizer",)


def test_missing_unexpected_and_not_finite_weights_are_problems(tmp_path: Path) -> None:
    file = checkpoint(tmp_path, "llama") / "model.safetensors"
    tensors = load_file(file)
    tensors["extra.weight"] = torch.zeros(2)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["lm_head.weight"] = torch.full_like(tensors["lm_head.weight"], float("nan"))
    save_file(tensors, file, metadata={"format": "pt"})
    report = run_model(tmp_path)
    assert report.missing == ("model.layers.1.mlp.up_proj.weight",)
    assert report.unexpected == ("extra.weight",)
    assert report.problems == (
        "1 missing keys: model.layers.1.mlp.up_proj.weight",
        "1 unexpected keys: extra.weight",
        "forward pass: 256 of 256 outputs are not finite",
    )


def test_a_weight_of_another_shape_is_a_problem(tmp_path: Path) -> None:
    config = checkpoint(tmp_path, "llama") / "config.json"
    document = json.loads(config.read_text())
    config.write_text(json.dumps({**document, "vocab_size": 40}))
    report = run_model(tmp_path)
    assert not report.ok
    assert "lm_head.weight" in " ".join(report.problems)


def test_a_damaged_file_is_a_problem_and_not_an_exception(tmp_path: Path) -> None:
    file = checkpoint(tmp_path, "llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    report = run_model(tmp_path)
    assert len(report.problems) == 1
    assert report.problems[0].startswith("the model cannot be built: ")


def test_a_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        run_model(tmp_path)


def test_remote_code_runs_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    directory = checkpoint(tmp_path / "model", "llama")
    document = json.loads((directory / "config.json").read_text())
    document |= {
        "model_type": "functional-x",
        "architectures": ["XForCausalLM"],
        "auto_map": {"AutoConfig": "code_x.XConfig", "AutoModelForCausalLM": "code_x.XForCausalLM"},
    }
    (directory / "config.json").write_text(json.dumps(document))
    (directory / "code_x.py").write_text(
        "import os\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "open(os.environ['RAN'], 'w').close()\n"
        "class XConfig(LlamaConfig):\n    model_type = 'functional-x'\n"
        "class XForCausalLM(LlamaForCausalLM):\n    config_class = XConfig\n"
    )
    refused = run_model(directory)
    assert refused.problems[0].endswith("which run only with RemoteCode.RUN")
    assert not (tmp_path / "ran").exists()
    report = run_model(directory, remote_code=RemoteCode.RUN)
    assert report.ok, report.problems
    assert report.architecture == "XForCausalLM"
    assert (tmp_path / "ran").exists()
