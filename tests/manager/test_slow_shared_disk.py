"""Ranks on two nodes that share a slow file system: one publishes and prunes, nobody trips."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.errors import CheckpointError
from milepost.storage import fileops
from tests.manager.test_manager_steps_ranks import slow_and_counted
from tests.worlds import run_world

LONGEST_S = 0.3
ROUNDS = 12


def save_on_two_nodes(rank: int, world_size: int, run: Path) -> Any:
    """Up to 0.3 s before each change of a name; in one round a rank of the other node fails."""
    os.environ["MILEPOST_HOST_ID"] = f"node {rank // 2}"
    os.environ["MILEPOST_AGGREGATE_BELOW"] = "1"
    state = {"model": torch.nn.Linear(64, 64), "data": {"rank": rank}}
    told = ""

    def fail(name: str, target: str, function: Any, arguments: Any) -> Any:
        if name == "write" and rank == 3:
            raise OSError(5, "Input/output error", target)
        return function(*arguments)

    with (
        slow_and_counted(rank, LONGEST_S) as counts,
        mp.CheckpointManager(run, keep=mp.KeepLast(2)) as manager,
    ):
        manager.resume(state)
        for step in range(1, ROUNDS + 1):
            if step == 2:
                with fileops.hooked(fail):
                    try:
                        manager.save(step, state)
                    except CheckpointError as error:
                        told = str(error)
                    continue
            report = manager.save(step, state)
            assert not any("still there" in note for note in report.notes), report.notes
        seen = [entry.step for entry in mp.list_run(run).committed]
    return dict(counts), seen, told


@pytest.mark.slow
@pytest.mark.case("V25")
def test_one_rank_of_two_nodes_changes_names_and_a_failure_is_everybodys(tmp_path: Path) -> None:
    results = run_world(4, save_on_two_nodes, tmp_path, deadline_s=280)
    assert {told for _, _, told in results} == {results[0][2]}
    assert results[0][2].startswith("rank 3: ") and "Input/output error" in results[0][2]
    assert sum(results[0][0].values()) > 5 * ROUNDS, "rank 0 makes, renames and removes"
    for rank, (counts, seen, _) in enumerate(results):
        assert seen == [ROUNDS - 1, ROUNDS]
        assert rank == 0 or counts == {}, "nobody else touches a name"
    assert mp.list_run(tmp_path).unfinished == () and mp.list_run(tmp_path).torn == ()
