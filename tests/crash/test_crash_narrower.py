"""A step that several ranks wrote, saved again by fewer: all of the old one or all of the new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import milepost as mp
from milepost.layouts.run import list_run
from milepost.testing.faults import Ending, lacking
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.testing.ranks import record_ranks
from tests.crash.sharded import EVERY_RANK_WRITES, Sharded, mesh_of_world, values

Explore: TypeAlias = Callable[[CrashMatrix, Callable[[Attempt], None]], None]

WIDE, NARROW = 1.0, 2.0
ONE_PART = "5GB"


def save(root: Path, value: float, size: int | str, **options: Any) -> None:
    """Step 5, with a side file that says which of the two saves it is from."""
    mp.save(
        root / "checkpoint-5",
        {"model": Sharded(value, mesh_of_world()), "progress": {"value": value}},
        step=5,
        metrics={"value": value},
        sidecars={"note.txt": str(value).encode()},
        rng=mp.Rng.LEAVE_OUT,
        max_shard_size=size,
        **options,
    )


def by_two_ranks(root: Path) -> None:
    """In a part for each tensor."""
    record_ranks(lambda r, n: save(root, WIDE, 100), 2, environment=EVERY_RANK_WRITES)


def by_one(root: Path) -> None:
    """In one part."""
    options = mp.WriteOptions(threads=1)
    save(root, NARROW, ONE_PART, on_existing=mp.OnExisting.REPLACE, options=options)


def by_one_without_exchange(root: Path) -> None:
    with lacking("exchange"):
        by_one(root)


def found_at(root: Path) -> float:
    """The value that everything at step 5 was made from: weights, side file and metrics."""
    (entry,) = list_run(root).committed
    checkpoint = mp.Checkpoint.open(root / entry.name)
    assert checkpoint.verify().problems == ()
    value = entry.manifest.metrics["value"]
    assert isinstance(value, float)
    weights = checkpoint.read_weights()
    assert all(torch.equal(weights[name], whole) for name, whole in values(value).items())
    assert checkpoint.training_state()["progress"] == {"value": value}
    place = entry.path  # through the record of a change that is under way
    assert (place / "note.txt").read_bytes() == str(value).encode()
    parts = sorted(part.name for part in place.glob("*.safetensors"))
    wide = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert parts == (wide if value == WIDE else ["model.safetensors"]), "no part is left over"
    return value


@pytest.mark.case("V20")
@pytest.mark.parametrize(
    "action",
    [
        pytest.param(by_one, id="exchange"),
        pytest.param(by_one_without_exchange, id="record", marks=pytest.mark.slow),
    ],
)
def test_a_narrower_save_over_a_wider_one_is_never_mixed_with_it(
    action: Callable[[Path], None], scratch: Path, explore: Explore
) -> None:
    def check(attempt: Attempt) -> None:
        found = found_at(attempt.root)
        assert attempt.outcome.struck
        if attempt.plan.fault.kills:
            assert attempt.outcome.ending is Ending.KILLED
        if attempt.outcome.ending is Ending.FINISHED:
            assert found == NARROW
        by_one(attempt.root)
        assert found_at(attempt.root) == NARROW

    matrix = CrashMatrix(by_two_ranks, action, scratch=scratch)
    explore(matrix, check)
