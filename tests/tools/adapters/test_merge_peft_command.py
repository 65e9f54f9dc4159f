"""The command `merge-peft-adapters`: options in both spellings, classifiers, `--verify`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from milepost.cli.app import make_app
from milepost.errors import InvalidInputError
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.rewrite.options import Check, RewriteOptions
from tests.tools.adapters.peft_oracle import (
    PLAIN,
    QUICK,
    load,
    merged_by_peft,
    outputs,
    tensors_of,
    write_adapter,
)
from tests.trainer import lora_runs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice


def test_a_classifier_has_the_head_that_was_trained(bases: dict[str, Path], tmp_path: Path) -> None:
    kind = AutoModelForSequenceClassification
    settings = {**PLAIN, "task_type": "SEQ_CLS"}
    adapter = write_adapter(tmp_path / "a", bases["llama"], kind=kind, **settings)
    options = RewriteOptions(is_durable=False, check=Check.LOAD)
    report = merge_peft_adapters([adapter], tmp_path / "out", num_labels=2, options=options)
    wanted = merged_by_peft(bases["llama"], adapter, kind=kind)
    found = load(tmp_path / "out", kind=kind)
    assert torch.allclose(outputs(found), outputs(wanted), atol=1e-5)
    assert found.config.architectures == ["LlamaForSequenceClassification"]
    assert report.dropped == {"lm_head.weight": "a classifier has no language head"}
    with pytest.raises(InvalidInputError, match="--task classification"):
        merge_peft_adapters([adapter], tmp_path / "x", task="causal_lm", options=QUICK)
    with pytest.raises(InvalidInputError, match="has 2 labels"):
        merge_peft_adapters([adapter], tmp_path / "x", num_labels=3, options=QUICK)


def command(*words: object) -> Any:
    """What the command line says to these words."""
    return CliRunner().invoke(make_app(), ["merge-peft-adapters", *map(str, words), "--quiet"])


@pytest.mark.parametrize("spelling", ["-", "_"])
def test_options_in_both_spellings_make_what_the_function_makes(
    spelling: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    one = write_adapter(tmp_path / "a", bases["llama"], **PLAIN)
    two = write_adapter(tmp_path / "b", bases["llama"], seed=3, **PLAIN)
    weighted = [f"{one}:0.5", f"{two}:0.25"]
    merge_peft_adapters(weighted, tmp_path / "wanted", dtype="bfloat16", options=QUICK)
    given = {
        "adapter-dir": weighted[0],
        "base-model": bases["llama"],
        "output-dir": tmp_path / "out",
    }
    words = [w for key, value in given.items() for w in (f"--{key.replace('-', spelling)}", value)]
    more = [f"--adapter{spelling}dir", weighted[1], f"--max{spelling}shard{spelling}size", "5KB"]
    done = command(*words, *more, "--dtype", "bf16", "--json", "--check")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["verb"] == "merge-peft-adapters" and report["counts"] == {"changed": 4}
    parts = list((tmp_path / "out").glob("model-*.safetensors"))
    found = {name: value for part in parts for name, value in load_file(part).items()}
    wanted = tensors_of(tmp_path / "wanted")
    assert len(parts) > 1 and found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_the_command_makes_a_classifier_and_compares_its_outputs(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    kind = AutoModelForSequenceClassification
    settings = {**PLAIN, "task_type": "SEQ_CLS"}
    adapter = write_adapter(tmp_path / "a", bases["llama"], kind=kind, **settings)
    words = ["--adapter-dir", adapter, "--output-dir", tmp_path / "out", "--num_labels", 2]
    done = command(*words, "--task", "classification", "--verify")
    assert done.exit_code == 0 and "verified on" in done.output, done.output
    wanted = outputs(merged_by_peft(bases["llama"], adapter, kind=kind))
    assert torch.allclose(outputs(load(tmp_path / "out", kind=kind)), wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--task", "translation"], "expected causal_lm or classification"),
        (["--tied", "loosely"], "expected fold or separate"),
        (["--task", "causal-lm", "--dtype", "int8"], "expected bfloat16"),
        (["--base-model", "nowhere"], "nowhere"),
    ],
)
def test_the_command_refuses_what_it_does_not_know_and_leaves_nothing(
    words: list[str], told: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", bases["llama"], **PLAIN)
    done = command("--adapter-dir", adapter, "--output-dir", tmp_path / "out", *words)
    assert done.exit_code not in (0, None) and told in done.output + done.stderr
    assert not (tmp_path / "out").exists()


def test_outputs_are_compared_on_text_where_a_tokenizer_comes_along(tmp_path: Path) -> None:
    base = lora_runs.write_base(tmp_path / "base", "llama-plain")
    adapter = write_adapter(tmp_path / "a", base, **PLAIN)
    done = command("--adapter-dir", adapter, "--output-dir", tmp_path / "out", "--verify")
    told = " ".join(done.output.split())
    assert done.exit_code == 0, told
    found = re.search(
        r"verified on 24 tokens from all over the vocabulary and (\d+) tokens of", told
    )
    assert found is not None and int(found[1]) > 150, told
