"""Attention sinks are made ineffective; everything else stays where and what it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import milepost as mp
from milepost.engine.write import Durability, WriteOptions
from milepost.errors import InvalidInputError, StorageError
from milepost.hf.training_sidecars import NEUTRAL_SINK
from milepost.layouts.checkpoint import Checkpoint
from milepost.storage import fileops
from milepost.tools.reset_sinks import Place, reset_sinks
from milepost.tools.rewrite.options import Mode, RewriteOptions, Untouched
from tests.tools.rewrite.hub import QUICK, content, read_hub, same_bits, write_hub

NAME = "model.layers.0.self_attn.sinks"


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(9), NAME: torch.randn(4).bfloat16(), "b": torch.randn(5)}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    source = write_hub(tmp_path / "in", tensors(), config={"model_type": "gpt_oss"}, parts=3)
    (source / "training_provenance.json").write_text(
        '{"gpt_oss_attention_sinks": "live", "steps": 4}'
    )
    return source


def expected() -> dict[str, torch.Tensor]:
    return {**tensors(), NAME: torch.full((4,), NEUTRAL_SINK, dtype=torch.bfloat16)}


@pytest.mark.parametrize("untouched", Untouched)
def test_only_sinks_change_and_the_provenance_says_so(
    hub: Path, tmp_path: Path, untouched: Untouched
) -> None:
    before = content(hub)
    report = reset_sinks(hub, tmp_path / "out", untouched=untouched, options=QUICK)
    assert same_bits(read_hub(tmp_path / "out"), expected())
    assert report.counts == {"sinks": 1} and report.unchanged == 2
    provenance = json.loads((tmp_path / "out/training_provenance.json").read_bytes())
    assert provenance == {"gpt_oss_attention_sinks": "neutralized", "steps": 4}
    links = {n: (tmp_path / "out" / n).stat().st_nlink for n in before if "-of-" in n}
    changed = "model-00002-of-00003.safetensors"
    linked = 2 if untouched is Untouched.LINK else 1
    assert links == {name: 1 if name == changed else linked for name in links}
    assert content(hub) == before
    assert Checkpoint.open(tmp_path / "out").verify().ok
    for name in links:
        same = (tmp_path / "out" / name).read_bytes() == before[name]
        assert same is (name != changed)


def test_in_place_the_directory_is_exchanged_with_everything_in_it(
    hub: Path, tmp_path: Path
) -> None:
    (hub / "optimizer.pt").write_bytes(b"moments")
    (hub / "sub").mkdir()
    (hub / "sub/notes.txt").write_text("mine")
    before = content(hub)
    reset_sinks(hub, place=Place.IN_PLACE, options=QUICK)
    after = content(hub)
    assert same_bits(read_hub(hub), expected())
    changed = {name for name, raw in before.items() if after[name] != raw}
    assert changed == {"model-00002-of-00003.safetensors", "training_provenance.json"}
    assert after.keys() - before.keys() == {"milepost.json", "training/digests.bin", "README.md"}
    assert set(os.listdir(tmp_path)) <= {"in", ".milepost.lock"}


def test_in_place_a_training_checkpoint_still_resumes(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_parameter("sinks", torch.nn.Parameter(torch.ones(4)))
    model.register_parameter("w", torch.nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    (model.sinks.sum() + model.w.sum()).backward()  # type: ignore[operator]
    optimizer.step()
    path = tmp_path / "run/checkpoint-3"
    state = {"model": model, "optimizer": optimizer}
    mp.save(path, state, step=3, options=WriteOptions(durability=Durability.PAGE_CACHE))
    moments = optimizer.state_dict()["state"]
    reset_sinks(path, place=Place.IN_PLACE, options=QUICK)
    assert Checkpoint.open(path).verify().problems == ()
    fresh = torch.optim.AdamW(model.parameters())
    report = mp.load(path, {"model": model, "optimizer": fresh})
    assert report.step == 3
    assert torch.equal(model.get_parameter("sinks"), torch.full((4,), NEUTRAL_SINK))
    found = fresh.state_dict()["state"]
    assert all(torch.equal(found[n]["exp_avg"], moments[n]["exp_avg"]) for n in moments)


@pytest.mark.parametrize("operation", ["write", "link", "exchange", "fsync"])
def test_in_place_a_disk_that_fails_leaves_the_old_content(
    hub: Path, tmp_path: Path, operation: str
) -> None:
    before = content(hub)

    def fail(name: str, target: str, function: object, arguments: tuple[object, ...]) -> object:
        if name == operation and ".milepost.lock" not in target and "clock" not in target:
            raise OSError(5, "Input/output error", target)
        return function(*arguments)  # type: ignore[operator]

    with fileops.hooked(fail):
        if operation == "link":  # then files are copied
            reset_sinks(hub, place=Place.IN_PLACE)
            assert same_bits(read_hub(hub), expected())
            return
        with pytest.raises(StorageError):
            reset_sinks(hub, place=Place.IN_PLACE)
    assert content(hub) == before


def test_a_dry_run_and_a_wrong_call_change_nothing(hub: Path, tmp_path: Path) -> None:
    before = content(hub)
    dry = RewriteOptions(mode=Mode.DRY_RUN)
    assert reset_sinks(hub, place=Place.IN_PLACE, options=dry).counts == {"sinks": 1}
    with pytest.raises(InvalidInputError, match="one of them"):
        reset_sinks(hub)
    with pytest.raises(InvalidInputError, match="one of them"):
        reset_sinks(hub, tmp_path / "out", place=Place.IN_PLACE)
    with pytest.raises(InvalidInputError, match="reshard"):
        options = RewriteOptions(max_shard_size="1KB")
        reset_sinks(hub, tmp_path / "out", options=options)
    assert content(hub) == before and not (tmp_path / "out").exists()


def test_a_model_without_sinks_is_copied(tmp_path: Path) -> None:
    source = write_hub(tmp_path / "in", {"a": torch.ones(2)})
    report = reset_sinks(source, tmp_path / "out", options=QUICK)
    assert same_bits(read_hub(tmp_path / "out"), {"a": torch.ones(2)})
    assert report.notes and "no attention sinks" in report.notes[0]
    assert not (tmp_path / "out/training_provenance.json").exists()
