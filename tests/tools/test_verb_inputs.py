"""Every layout is an input of every verb, and a dry run says what a run makes, out of headers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

import milepost as mp
from milepost.engine.write import Durability, WriteOptions
from milepost.errors import InvalidInputError
from milepost.hf.training_sidecars import NEUTRAL_SINK
from milepost.tools.average import average
from milepost.tools.cast import cast
from milepost.tools.convert_to_bf16 import convert_to_bf16
from milepost.tools.export import ExportTarget, export_checkpoint
from milepost.tools.extract_lora import extract_lora
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format
from milepost.tools.merge_models import Tokenizers, merge_models
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from milepost.tools.rename import rename
from milepost.tools.reset_sinks import reset_sinks
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.source import SourceTensor
from tests.tools.merge_models.merging import command
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits
from tests.tools.test_every_verb import CARRIES, run

FAST = WriteOptions(durability=Durability.PAGE_CACHE, threads=1)


class Net(torch.nn.Module):
    """Two matrices that blocks divide, a norm, and sinks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = torch.nn.Linear(64, 32, bias=False)
        self.down = torch.nn.Linear(32, 64)
        self.norm = torch.nn.LayerNorm(64)
        self.sinks = torch.nn.Parameter(torch.randn(4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.norm(self.down(self.up(values)))
        return made + self.sinks.sum()


def trained(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def as_run(place: Path, seed: int) -> Path:
    """A training checkpoint as it lies, optimizer state and all."""
    model, optimizer = trained(seed)
    path = place / "run/checkpoint-7"
    mp.save(path, {"model": model, "optimizer": optimizer}, step=7, options=FAST)
    return path


def as_hub(place: Path, seed: int) -> Path:
    path = place / "hub"
    path.mkdir(parents=True)
    state = trained(seed)[0].state_dict()
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    return path


def as_file(place: Path, seed: int) -> Path:
    return as_hub(place, seed) / "model.safetensors"


def as_dcp(place: Path, seed: int) -> Path:
    path = place / "dcp"
    save_dcp({"model": trained(seed)[0].state_dict()}, checkpoint_id=str(path), no_dist=True)
    return path


def exported(to: ExportTarget) -> Callable[[Path, int], Path]:
    def write(place: Path, seed: int) -> Path:
        path = place / ("old.pt" if to is ExportTarget.SINGLE_FILE else "old")
        export_checkpoint(as_run(place, seed), path, to=to)
        return path

    return write


LAYOUTS: dict[str, Callable[[Path, int], Path]] = {
    "training checkpoint": as_run,
    "trio": exported(ExportTarget.TRIO),
    "single file": exported(ExportTarget.SINGLE_FILE),
    "safetensors file": as_file,
    "dcp": as_dcp,
}
Verb = Callable[[list[Path], Path], Any]
VERBS: dict[str, Verb] = {
    "average": lambda given, out: average(given, out, options=QUICK),
    "cast": lambda given, out: cast(given[0], out, dtype="float16", options=QUICK),
    "convert-to-bf16": lambda given, out: convert_to_bf16(given[0], out, options=QUICK),
    "extract-lora": lambda given, out: extract_lora(
        given[1], given[0], out, rank=2, target_modules=["up"], options=QUICK
    ),
    "merge-models": lambda given, out: merge_models(
        command(given), out, tokenizers=Tokenizers.ALLOW_MISSING, options=QUICK
    ),
    "quantize-to-lowp": lambda given, out: quantize_to_lowp(
        given[0], out, format=Format.NVFP4, scope=Scope(include=["*up.weight"]), options=QUICK
    ),
    "rename": lambda given, out: rename(given[0], out, rules=[("up", "first")], options=QUICK),
    "reshard": lambda given, out: reshard(given[0], out, options=QUICK),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_makes_the_same_of_every_layout(tmp_path: Path, verb: str, layout: str) -> None:
    pair = [as_hub(tmp_path / "plain" / str(seed), seed) for seed in (1, 2)]
    other = [LAYOUTS[layout](tmp_path / "other" / str(seed), seed) for seed in (1, 2)]
    VERBS[verb](pair, tmp_path / "wanted")
    VERBS[verb](other, tmp_path / "out")
    wanted, found = read_hub(tmp_path / "wanted"), read_hub(tmp_path / "out")
    assert wanted and same_bits(found, wanted)
    assert not any(path.name.startswith("optimizer") for path in (tmp_path / "out").rglob("*"))


@pytest.mark.parametrize("verb", CARRIES)
def test_a_dry_run_says_the_sizes_and_the_memory_of_the_run_without_reading_a_tensor(
    tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*CARRIES[verb](tmp_path), "--output-dir", tmp_path / "out", "--quiet", "--json"]

    def refuse(tensor: SourceTensor, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"a dry run reads {tensor.name}")

    with monkeypatch.context() as patched:
        patched.setattr(SourceTensor, "read", refuse)
        patched.setattr(SourceTensor, "stream", refuse)
        planned = json.loads(run(verb, *arguments, "--dry-run"))
    assert planned["problems"] == [] and planned["free_nbytes"] > 0
    made = json.loads(run(verb, *arguments))
    later = {"milepost.json", "training/digests.bin"}
    assert planned["files"] == {n: s for n, s in made["files"].items() if n not in later}
    sizes = {
        path.relative_to(tmp_path / "out").as_posix(): path.stat().st_size
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert sizes == made["files"]
    assert planned["memory_nbytes"] == made["memory_nbytes"]
    assert (planned["tensors"], planned["parameters"]) == (made["tensors"], made["parameters"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sinks_are_reset_in_parts_that_keep_their_names_and_other_layouts_are_exported_first(
    tmp_path: Path, layout: str
) -> None:
    given = LAYOUTS[layout](tmp_path / "in", 1)
    if layout in ("training checkpoint", "safetensors file"):
        reset_sinks(given, tmp_path / "out", options=QUICK)
        made = read_hub(tmp_path / "out")
        assert bool((made.pop("sinks") == NEUTRAL_SINK).all())
        before = read_hub(as_hub(tmp_path / "plain", 1))
        assert same_bits(made, {n: t for n, t in before.items() if n != "sinks"})
        return
    with pytest.raises(InvalidInputError, match="milepost export"):
        reset_sinks(given, tmp_path / "out", options=QUICK)
    assert not (tmp_path / "out").exists()
