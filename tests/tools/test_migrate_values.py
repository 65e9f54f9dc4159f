"""What a migration carries over, value by value, and how it proves that."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import (
    CheckpointMigrationError,
    FormatError,
    UnencodableError,
    UnsafePickleError,
)
from milepost.format.lazy import ITEM_NBYTES
from milepost.layouts.trio import TrioCheckpoint
from milepost.state.tensors import same_bits
from milepost.tools.migrate import (
    MigrateTarget,
    Migration,
    Original,
    Outcome,
    Proof,
    migrate,
)
from tests.tools.legacy_files import legacy, trio_files, weights, write


def migrated(path: Path, **request: Any) -> Migration:
    (one,) = migrate([path], proof=Proof.ALWAYS, **request).migrations
    assert one.outcome is Outcome.MIGRATED, (one.error, one.differences)
    assert one.proven
    return one


def failed(path: Path, **request: Any) -> Exception:
    (one,) = migrate([path], **request).migrations
    assert one.outcome is Outcome.FAILED and one.error is not None
    assert not any(file.exists() for file in trio_files(path.with_suffix("")))
    return one.error


def bits(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).view(torch.float32)


NONFINITE = {
    "nan": torch.tensor([math.nan, 1.0]),
    "nan with a payload": bits([0x7FC00001, -4194303]),
    "infinite": torch.tensor([math.inf, -math.inf]),
    "minus zero": torch.tensor([-0.0, 0.0]),
    "empty": torch.empty(0, 3),
    "no dims": torch.tensor(2.5),
    **{
        name: torch.arange(16, dtype=torch.uint8).view(getattr(torch, name))
        for name in ITEM_NBYTES
        if hasattr(torch, name) and name not in ("complex32", "complex128", "bool")
    },
    "bool": torch.tensor([True, False]),
}


@pytest.mark.case("C5.24")
@pytest.mark.parametrize("name", NONFINITE)
def test_weights_of_every_kind_are_proven_the_same(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.pt", model_state={"w": NONFINITE[name], "other": torch.ones(1)})
    migrated(path)
    assert same_bits(mp.load_checkpoint(tmp_path / "x")["model_state"]["w"], NONFINITE[name])


@pytest.mark.case("C5.24")
def test_metadata_that_json_does_not_know_is_proven_the_same(tmp_path: Path) -> None:
    config = {"sizes": (1, 2), "rate": math.inf, 5: "five", "dir": PurePosixPath("/a")}
    payload = legacy(model_config=config, loss=math.nan, note={1, 2}, when=deque([1], maxlen=3))
    del payload["best_loss"], payload["epoch"]
    migrated(write(tmp_path / "x.pt", payload))
    loaded = mp.load_checkpoint(tmp_path / "x")
    assert loaded["model_config"] == config
    assert math.isnan(loaded["loss"]) and loaded["best_loss"] == math.inf
    assert (loaded["epoch"], loaded["note"]) == (0, {1, 2})
    assert loaded["when"] == deque([1], maxlen=3) and loaded["when"].maxlen == 3


@pytest.mark.case("C5.24")
def test_losses_that_are_tensors_become_numbers_and_are_kept_as_they_were(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", loss=torch.tensor(0.5), best_loss=torch.tensor([0.25]))
    migrated(path)
    checkpoint = TrioCheckpoint(tmp_path / "x")
    assert (checkpoint.info.loss, checkpoint.info.best_loss) == (0.5, 0.25)


@pytest.mark.case("C5.24")
def test_entries_of_a_state_dict_that_are_no_tensors_come_along(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 3}

        def set_extra_state(self, state: Any) -> None:
            self.scale = state["scale"]

    module = nn.Sequential(Scaled(2, 2), nn.BatchNorm1d(2))
    migrated(write(tmp_path / "x.pt", model_state=module.state_dict()))
    state = mp.load_checkpoint(tmp_path / "x")["model_state"]
    assert state["0._extra_state"] == {"scale": 3}
    assert state._metadata["1"] == {"version": 2}
    again = nn.Sequential(Scaled(2, 2), nn.BatchNorm1d(2))
    again.load_state_dict(state)


def test_ties_are_stored_once_and_come_back(tmp_path: Path) -> None:
    shared = torch.randn(64, 64)
    state = {"embed": shared, "head": shared, "view": shared[:, :2], "alone": torch.ones(2)}
    done = migrated(write(tmp_path / "x.pt", {"model_state": state}))
    assert done.nbytes < 2 * 64 * 64 * 4
    loaded = mp.load_checkpoint(tmp_path / "x")["model_state"]
    assert loaded["embed"] is loaded["head"]
    assert torch.equal(loaded["view"], shared[:, :2])


STATES: dict[str, Any] = {
    "a numpy random state": {"numpy": np.random.RandomState(3).get_state(), "step": 4},
    "a path": {"dir": Path("/data/x"), "deep": [{"at": Path("y")}]},
    "only what torch refuses": deque([1, 2]),
    "a tensor beside a path": {"mixed": (torch.arange(3), Path("z")), "plain": torch.ones(2)},
    "tuples and number keys": {1: (2, [3]), (4, 5): {6}},
    "a tensor with history": {"w": nn.Parameter(torch.ones(2), requires_grad=False)},
}


@pytest.mark.spec("v1#trio-8")
@pytest.mark.case("C1.5")
@pytest.mark.case("C5.24")
@pytest.mark.parametrize("to", [MigrateTarget.TRIO, MigrateTarget.DIRECTORY])
@pytest.mark.parametrize("name", STATES)
def test_training_state_that_torch_would_refuse_to_load_comes_along(
    tmp_path: Path, name: str, to: MigrateTarget
) -> None:
    path = write(tmp_path / "x.pt", extra_state=STATES[name])
    migrated(path, to=to, out=tmp_path / "out")
    if to is MigrateTarget.TRIO:
        raw = tmp_path / "out" / "x.extra_state.pt"
        torch.load(raw, weights_only=True)
        found = mp.load_checkpoint(tmp_path / "out" / "x")["extra_state"]
        assert type(found) is type(STATES[name])
        if name == "a path":
            assert found == {"dir": PurePosixPath("/data/x"), "deep": [{"at": PurePosixPath("y")}]}
            assert torch.load(raw, weights_only=True)["extra_state"] == {}
        assert mp.Checkpoint.open(tmp_path / "out" / "x").verify().ok


def test_a_numpy_random_state_goes_on_where_it_was(tmp_path: Path) -> None:
    random = np.random.RandomState(3)
    path = write(tmp_path / "x.pt", extra_state={"numpy": random.get_state()})
    migrated(path, original=Original.REMOVE)
    again = np.random.RandomState(0)
    again.set_state(mp.load_checkpoint(tmp_path / "x")["extra_state"]["numpy"])
    assert again.randint(1000) == random.randint(1000)


def test_what_nothing_can_hold_is_refused_by_its_key(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", model_state={"w": torch.ones(2, dtype=torch.complex128)})
    error = failed(path)
    assert isinstance(error, UnencodableError)
    assert "model_state.w: safetensors has no type" in str(error)
    marked = nn.Parameter(torch.ones(2))
    marked.partition = 0  # type: ignore[attr-defined]
    error = failed(write(tmp_path / "x.pt", model_state={"w": marked}))
    assert "w: a weight with Python attributes (partition)" in str(error)


def test_metadata_beside_metadata_that_contradicts_it_is_kept_and_said(tmp_path: Path) -> None:
    payload = {"model_state": weights(), "metadata": {"step": 1, "t": torch.ones(2)}, "step": 2,
               "t": torch.zeros(2)}  # fmt: skip
    done = migrated(write(tmp_path / "x.pt", payload))
    assert any("step, t: other values at the top" in note for note in done.notes)
    loaded = mp.load_checkpoint(tmp_path / "x")
    assert loaded["step"] == 1
    assert loaded["values_at_the_top"]["step"] == 2
    assert torch.equal(loaded["values_at_the_top"]["t"], torch.zeros(2))
    origin = mp.Checkpoint.open(tmp_path / "x").info.extra["origin"]
    assert origin["dialect"] == "modern-llm" and origin["file"] == "x.pt"


# ---- names of weights


@pytest.mark.case("C5.25")
def test_compile_prefixes_are_taken_off_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", model_state=weights("_orig_mod."))
    assert "_orig_mod taken off 3 names" in migrated(path).notes
    assert set(mp.load_checkpoint(tmp_path / "x")["model_state"]) == set(weights())
    twice = {**weights("_orig_mod."), **weights()}
    assert isinstance(failed(write(tmp_path / "y.pt", model_state=twice)), FormatError)


def test_a_prefix_is_taken_off_at_whole_segments_where_asked(tmp_path: Path) -> None:
    wrapped = nn.DataParallel(nn.Sequential(nn.BatchNorm1d(2))).state_dict()
    state = OrderedDict(wrapped, modulex=torch.ones(1))
    state._metadata = wrapped._metadata  # type: ignore[attr-defined]
    path = write(tmp_path / "x.pt", model_state=state)
    done = migrated(path, strip_prefixes=["module"], original=Original.REMOVE)
    assert "module. taken off 5 of 6 names" in done.notes
    loaded = mp.load_checkpoint(tmp_path / "x")["model_state"]
    assert "modulex" in loaded and "0.weight" in loaded
    assert loaded._metadata["0"] == {"version": 2}
    clash = {"module.w": torch.ones(1), "w": torch.zeros(1)}
    error = failed(write(tmp_path / "y.pt", model_state=clash), strip_prefixes=["module."])
    assert isinstance(error, CheckpointMigrationError)
    assert "module.w and w both become w" in str(error)


def test_another_prefix_is_another_migration(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", model_state=weights("module."))
    migrated(path)
    (one,) = migrate([path], strip_prefixes=["module"]).migrations
    assert one.outcome is Outcome.MISMATCH


# ---- classes that were allowed by name


@dataclass
class TrainConfig:
    lr: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)


@dataclass
class RunConfig:
    train: TrainConfig = field(default_factory=TrainConfig)
    names: list[str] = field(default_factory=lambda: ["a"])


class Bag(list[int]):
    pass


HERE = __name__
ALLOW = [f"{HERE}.{name}" for name in ("TrainConfig", "RunConfig", "Bag")]


@pytest.mark.case("C5.25")
def test_instances_of_allowed_classes_become_their_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", model_config=RunConfig(), extra_state={"c": [TrainConfig()]})
    error = failed(path)
    assert isinstance(error, UnsafePickleError)
    assert error.global_name == ALLOW[1]
    done = migrated(path, allow=ALLOW, original=Original.REMOVE)
    assert f"{ALLOW[0]}: 2 stored as plain fields" in done.notes
    loaded = mp.load_checkpoint(tmp_path / "x")
    train = {"lr": 0.1, "betas": (0.9, 0.95)}
    assert loaded["model_config"] == {"train": train, "names": ["a"]}
    assert loaded["extra_state"] == {"c": [train]}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: Bag([1]), "is a container of its own"),
        (lambda: {TrainConfig: 1}, "a class stands where a value is expected"),
    ],
)
def test_an_allowed_instance_that_fields_cannot_show_is_refused_by_name(
    tmp_path: Path, value: Callable[[], Any], why: str
) -> None:
    path = write(tmp_path / "x.pt", extra_state={"bag": value()})
    error = failed(path, allow=ALLOW)
    assert "extra_state.bag" in str(error) or "extra_state" in str(error)
    assert why in str(error)


# ---- the proof finds what the original missed


def tampered(path: Path, change: Callable[[dict[str, Any]], object]) -> tuple[str, ...]:
    """What a proof says of a trio that was made of another file."""
    write(path)
    payload = torch.load(path, weights_only=True)
    change(payload)
    other = write(path.with_name("other.pt"), payload)
    migrated(other)
    for source, target in zip(
        trio_files(other.with_suffix("")), trio_files(path.with_suffix("")), strict=True
    ):
        source.rename(target)
    (one,) = migrate([path], proof=Proof.ALWAYS).migrations
    assert one.outcome is Outcome.MISMATCH
    assert path.exists()
    return one.differences


def _tiny(payload: dict[str, Any]) -> None:
    payload["model_state"]["1.bias"] = payload["model_state"]["1.bias"] + 1e-7


def _cast(payload: dict[str, Any]) -> None:
    state = payload["model_state"]
    state["1.bias"] = state["1.bias"].double()


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "dtype": (_cast, "model_state.1.bias: dtype torch.float32 became torch.float64"),
    "tiny": (_tiny, "model_state.1.bias: "),
    "extra tensor": (
        lambda p: p["model_state"].update(more=torch.ones(1)),
        "model_state.more: was not there",
    ),
    "missing tensor": (lambda p: p["model_state"].pop("1.bias"), "model_state.1.bias: is missing"),
    "no optimizer": (lambda p: p.update(optimizer_state=None), "optimizer_state: is missing"),
    "moment": (
        lambda p: p["optimizer_state"]["state"][0]["exp_avg"].view(-1)[0].add_(1e-8),
        "optimizer_state.state.0.exp_avg: ",
    ),
    "lr": (
        lambda p: p["optimizer_state"]["param_groups"][0].update(lr=0.1250001),
        "optimizer_state.param_groups.0.lr: 0.125 became 0.1250001",
    ),
    "extra state": (
        lambda p: p["extra_state"].update(global_step=401),
        "extra_state.global_step: 400 became 401",
    ),
    "type": (
        lambda p: p["extra_state"].update(global_step=400.0),
        "extra_state.global_step: int became float",
    ),
    "scheduler": (
        lambda p: p["scheduler_state"].update(last_epoch=4),
        "scheduler_state.last_epoch: 3 became 4",
    ),
    "tie": (
        lambda p: p["model_state"].update(
            {"0.weight": p["model_state"]["1.weight"], "1.weight": p["model_state"]["1.weight"]}
        ),
        "model_state: 0.weight, 1.weight were not tied",
    ),
    "config": (
        lambda p: p["model_config"].update(num_layers=2),
        "model_config.num_layers: 1 became 2",
    ),
    "loss": (lambda p: p.update(loss=0.5000001), "loss: 0.5 became 0.5000001"),
    "epoch": (lambda p: p.update(epoch=2), "epoch: 3 became 2"),
}


@pytest.mark.case("C5.24")
@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_of_any_kind_is_found_and_named(tmp_path: Path, name: str) -> None:
    change, text = CHANGES[name]
    found = tampered(tmp_path / "x.pt", change)
    assert any(difference.startswith(text) for difference in found), found


@pytest.mark.case("C5.24")
def test_a_flipped_byte_of_the_trio_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt")
    migrated(path)
    trio = trio_files(tmp_path / "x")[0]
    raw = bytearray(trio.read_bytes())
    raw[-1] ^= 1
    trio.write_bytes(raw)
    (one,) = migrate([path], proof=Proof.ALWAYS, original=Original.REMOVE).migrations
    assert one.outcome is Outcome.MISMATCH
    assert "not those that were saved" in one.differences[0]
    assert path.exists()


def test_files_of_the_older_converter_are_told_from_others_by_their_content(
    tmp_path: Path,
) -> None:
    """A trio without a record of its source is compared."""
    path = write(tmp_path / "x.pt")
    migrated(path)
    meta = trio_files(tmp_path / "x")[1]
    document = json.loads(meta.read_text())
    del document["milepost"], document["self_digest"]
    document["best_loss"] = 0.25
    meta.write_text(json.dumps(document))
    (one,) = migrate([path]).migrations
    assert (one.outcome, one.proven) == (Outcome.SKIPPED, True)
