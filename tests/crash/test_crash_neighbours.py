"""Others in the same run directory: a second job, a reader of what is removed, an odd clock."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.errors import CheckpointError, LoadTornError, RunInUseError
from milepost.layouts.run import list_run
from milepost.manager.prune import prune_run
from milepost.manager.retention import KeepLast, KeepNewerThan
from milepost.testing.forked import standing_still
from milepost.testing.ranks import record_ranks
from milepost.testing.world_matrix import RankAction
from tests.crash.sharded import EVERY_RANK_WRITES, committed, save, save_behind, state, values
from tests.directories import reseal


def first(rank: int, world_size: int, root: Path) -> None:
    save(root, 1, 1.0)


# ---- two jobs


@pytest.mark.case("V24")
def test_a_job_of_two_ranks_that_finds_another_at_work_is_refused_on_both(scratch: Path) -> None:
    """While another process stands in the middle of a save; afterwards it may write."""

    def refused(rank: int, world_size: int, root: Path) -> None:
        with pytest.raises(RunInUseError, match=r"rank 0: .* is writing checkpoints here"):
            save(root, 3, 3.0)
        with pytest.raises(RunInUseError, match=r"rank 0: .* is writing checkpoints here"):
            save_behind(root, 4, 4.0)

    def together(action: RankAction) -> None:
        record_ranks(lambda r, n: action(r, n, run), 2, environment=EVERY_RANK_WRITES)

    run = scratch / "run"
    together(first)
    with standing_still(lambda: save(run, 2, 2.0), nth=25):
        together(refused)
        assert committed(run) == {1: 1.0}
    save(run, 3, 3.0)
    assert committed(run) == {1: 1.0, 3: 3.0}
    assert not [name.name for name in run.iterdir() if "staging" in name.name]


# ---- removed under a reader


def test_a_checkpoint_that_is_removed_while_it_is_read_is_whole_or_an_error(scratch: Path) -> None:
    """The removal stands still before each of its operations in turn while this process loads."""
    run = scratch / "run"
    seen = set()
    for nth in range(40):
        shutil.rmtree(run, ignore_errors=True)
        save(run, 1, 1.0)
        save(run, 2, 2.0)
        checkpoint = mp.Checkpoint.open(run / "checkpoint-1")
        try:
            with standing_still(lambda: prune_run(run, [KeepLast(1)]), nth=nth):
                seen.add(read_or_refuse(run, checkpoint))
        except ChildProcessError:
            break
        assert committed(run).get(2) == 2.0
    assert nth > 5, "the removal has that many operations"
    assert seen == {"whole", "refused"}


def read_or_refuse(run: Path, checkpoint: mp.Checkpoint) -> str:
    """Load by path and through the open handle; never other values than those saved."""
    live = state(0.5)
    untouched = {name: tensor.clone() for name, tensor in live["model"].state_dict().items()}
    found = "whole"
    try:
        mp.load(run / "checkpoint-1", live)
    except CheckpointError as error:
        found = "refused"
        assert "checkpoint-1" in str(error)
        if not isinstance(error, LoadTornError):
            assert same(live["model"].state_dict(), untouched)
    else:
        assert same(live["model"].state_dict(), values(1.0))
    try:
        assert same(checkpoint.read_weights(), values(1.0))
    except CheckpointError as error:
        assert "checkpoint-1" in str(error)
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


# ---- a clock that goes backwards


def test_newest_and_retention_by_number_do_not_ask_the_clock(scratch: Path) -> None:
    """The clock of the host was set back between saves: the last one says it is the oldest."""
    for step in (1, 2, 3):
        save(scratch, step, float(step))

        def set_back(document: dict[str, Any], day: int = 30 - step) -> None:
            document["created"] = f"2031-01-{day:02}T00:00:00.000Z"

        reseal(scratch / f"checkpoint-{step}", set_back)
    newest = list_run(scratch).newest
    assert newest is not None and newest.step == 3
    prune_run(scratch, [KeepLast(2)])
    assert committed(scratch) == {2: 2.0, 3: 3.0}
    save(scratch, 4, 4.0)
    assert committed(scratch) == {2: 2.0, 3: 3.0, 4: 4.0}
    newest = list_run(scratch).newest
    assert newest is not None and newest.step == 4
    assert newest.manifest.created < "2031"
    assert newest.manifest.parent_id == list_run(scratch).committed[1].manifest.checkpoint_id


def test_a_checkpoint_from_the_future_is_no_reason_to_lose_one(scratch: Path) -> None:
    """Its age is below zero, so a policy by age keeps it, and the newest stays anyhow."""
    for step in (1, 2):
        save(scratch, step, float(step))
    future = {"created": "2999-01-01T00:00:00.000Z"}
    reseal(scratch / "checkpoint-1", lambda document: document.update(future))
    prune_run(scratch, [KeepNewerThan(timedelta(hours=1))])
    assert committed(scratch) == {1: 1.0, 2: 2.0}
