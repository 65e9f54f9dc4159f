"""What every after-training verb must do, verb by verb: dry runs, checks, tensors of no module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import typer.main
from safetensors.torch import save_file
from typer.testing import CliRunner

from milepost.cli import tools
from milepost.cli.app import make_app
from tests.tools.gguf.gguf_models import tiny
from tests.tools.lowp.models import save_model
from tests.tools.reattach.wholes import save_trained_text, save_whole
from tests.tools.rewrite.hub import content, read_hub

EXTRA = {
    "mtp.fc.weight": torch.arange(128).reshape(8, 16).bfloat16(),
    "mtp.norm.weight": torch.linspace(0, 1, 16).bfloat16(),
}
"""Layers of multi-token prediction, which no module of the models here has."""


def run(*words: object) -> str:
    """What `milepost` says; it must succeed."""
    result = CliRunner().invoke(make_app(), [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


def with_extra(place: Path, factor: float = 1) -> Path:
    """The directory, with the layers of prediction among its weights."""
    path = place / "model.safetensors"
    extra = {name: tensor * factor for name, tensor in EXTRA.items()}
    save_file({**read_hub(place), **extra}, path, metadata={"format": "pt"})
    return place


def model(family: str, place: Path, factor: float = 1) -> Path:
    return with_extra(save_model(family, place), factor)


def adapter(base: Path, place: Path) -> Path:
    import peft
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    peft.get_peft_model(loaded, config).save_pretrained(place)
    return place


# ------------------------------------------------------------------------------------ one each


def plain(family: str, *options: str) -> Callable[[Path], Sequence[object]]:
    """A verb that reads one model of the family."""
    return lambda place: ["--input-dir", model(family, place / "in"), *options]


def made_by(verb: str, family: str, *options: str) -> Callable[[Path], Sequence[object]]:
    """A verb that reads what another one made of a model of the family."""

    def prepare(place: Path) -> Sequence[object]:
        source = model(family, place / "first")
        run(verb, "--input-dir", source, "--output-dir", place / "in", *options)
        return ["--input-dir", place / "in"]

    return prepare


def merge_adapter(place: Path) -> Sequence[object]:
    base = model("llama", place / "in")
    return ["--adapter-dir", adapter(base, place / "adapter"), "--base-model", base]


def merge_models(place: Path) -> Sequence[object]:
    both = [model("llama", place / name) for name in ("one", "two")]
    options = ["--method", "linear", "--allow-missing-tokenizer"]
    return ["--models", f"{both[0]}:0.5", "--models", f"{both[1]}:0.5", *options]


def average(place: Path) -> Sequence[object]:
    both = [model("llama", place / name) for name in ("one", "two")]
    return ["--input-dir", both[0], "--input-dir", both[1]]


def reattach(place: Path) -> Sequence[object]:
    whole = save_whole(place / "base", "qwen3_5")
    save_trained_text(place / "text", whole, "qwen3_5")
    return ["--input-dir", place / "text", "--model-id", with_extra(place / "base")]


CARRIES: dict[str, Callable[[Path], Sequence[object]]] = {
    "average": average,
    "cast": plain("llama", "--dtype", "float32"),
    "convert-to-bf16": plain("llama"),
    "dequantize": made_by("quantize-to-lowp", "llama", "--format", "nvfp4"),
    "fuse-moe-experts": plain("qwen3_moe"),
    "merge-ep-shards": made_by("reshard", "qwen3_moe", "--ep-size", "3"),
    "merge-models": merge_models,
    "merge-peft-adapters": merge_adapter,
    "quantize-to-lowp": plain("llama", "--format", "mxfp8"),
    "reattach-vision-tower": reattach,
    "rename": plain("llama", "--rule", "^model[.]=>model."),
    "reset-sinks": plain("gpt_oss"),
    "reshard": plain("llama", "--max-shard-size", "10KB"),
    "unfuse-moe-experts": made_by("fuse-moe-experts", "qwen3_moe"),
}
REFUSES_OR_LISTS = ("extract-lora", "to-gguf")


def verbs() -> dict[str, Any]:
    app = typer.Typer()
    tools.register(app)
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def test_no_verb_is_left_out_here_and_each_has_a_dry_run_and_a_check() -> None:
    assert sorted(verbs()) == sorted((*CARRIES, *REFUSES_OR_LISTS))
    for name, command in verbs().items():
        flags = {flag for option in command.params for flag in option.opts}
        assert {"--dry-run", "--check", "--json", "--quiet"} <= flags, name


@pytest.mark.parametrize("verb", CARRIES)
def test_tensors_outside_the_module_graph_are_carried_and_a_dry_run_writes_nothing(
    tmp_path: Path, verb: str
) -> None:
    arguments = CARRIES[verb](tmp_path)
    before = content(tmp_path)
    out = tmp_path / "out"
    run(verb, *arguments, "--output-dir", out, "--quiet", "--dry-run")
    assert content(tmp_path) == before
    said = run(verb, *arguments, "--output-dir", out, "--quiet", "--check")
    assert "parameters" in said
    made = read_hub(out)
    for name, tensor in EXTRA.items():
        assert torch.equal(made[name].float(), tensor.float()), name


def test_an_adapter_that_cannot_hold_them_says_so(tmp_path: Path) -> None:
    base, tuned = model("llama", tmp_path / "base"), model("llama", tmp_path / "tuned", 2)
    arguments = ["--input-dir", tuned, "--base-model", base, "--rank", "2"]
    said = run("extract-lora", *arguments, "--output-dir", tmp_path / "out", "--dry-run")
    assert not (tmp_path / "out").exists()
    said = run("extract-lora", *arguments, "--output-dir", tmp_path / "out", "--check")
    assert "mtp.fc" in said and "mtp.norm" in said


@pytest.mark.parametrize("mode", ["--dry-run", "--check"])
def test_a_gguf_file_that_has_no_place_for_them_is_not_written(tmp_path: Path, mode: str) -> None:
    tiny("llama", tmp_path / "in")
    with_extra(tmp_path / "in")
    arguments = ["--input-dir", tmp_path / "in", "--output-file", tmp_path / "m.gguf", mode]
    words = [str(word) for word in ("to-gguf", *arguments, "--dtype", "f16")]
    result = CliRunner().invoke(make_app(), words)
    assert result.exit_code != 0 and "mtp.fc.weight" in result.output
    assert not (tmp_path / "m.gguf").exists()
