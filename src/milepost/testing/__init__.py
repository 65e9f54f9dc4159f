"""For testing that nothing is lost: faults at every file operation, and power cuts.

matrix = CrashMatrix(prepare, action, scratch=tmp_path)
for attempt in matrix.attempts(matrix.plans(Fault)):
    assert what_was_committed_is_intact(attempt.root), attempt
for loss, root in matrix.power_losses():
    assert what_was_committed_is_intact(root), loss

`WorldCrashMatrix` does the same with an action of several ranks, each a process of its own.
"""

from __future__ import annotations

from milepost.testing.disk import DirectoryTree
from milepost.testing.faults import (
    Ending,
    Fault,
    FaultPlan,
    Operation,
    Outcome,
    lacking,
    plans,
    record,
)
from milepost.testing.forked import run_with_fault, standing_still
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.testing.power import PowerLoss, power_loss_states, tree_after
from milepost.testing.ranks import RankFaultPlan, record_ranks
from milepost.testing.world_matrix import WorldAttempt, WorldCrashMatrix

__all__ = [
    "Attempt",
    "CrashMatrix",
    "DirectoryTree",
    "Ending",
    "Fault",
    "FaultPlan",
    "Operation",
    "Outcome",
    "PowerLoss",
    "RankFaultPlan",
    "WorldAttempt",
    "WorldCrashMatrix",
    "lacking",
    "plans",
    "power_loss_states",
    "record",
    "record_ranks",
    "run_with_fault",
    "standing_still",
    "tree_after",
]
