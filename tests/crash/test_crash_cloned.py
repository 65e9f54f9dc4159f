"""A fault at every operation of a save that clones a part, on a file system that has no links."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from milepost.plan import parts
from milepost.storage import fileops
from milepost.testing.faults import Ending, Fault
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.testing.power import PowerLoss
from tests.crash.test_crash_linked import (
    CutPower,
    Explore,
    check_next_save,
    committed,
    first,
    linking,
)


@pytest.fixture(autouse=True)
def _clones(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small parts of frozen weights; links are refused, and a clone is a copy that is one step."""
    monkeypatch.setattr(parts, "FROZEN_NBYTES", 1)

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "link":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), target)
        if name == "clone":
            descriptor, source = arguments
            data = Path(source).read_bytes()
            return os.pwrite(descriptor, data, 0) == len(data)
        return function(*arguments)

    with fileops.hooked(hook):
        yield


STATES = [{1: 1.0}, {1: 1.0, 2: 2.0}]


@pytest.mark.case("V16")
def test_no_fault_at_any_operation_costs_what_is_cloned(scratch: Path, explore: Explore) -> None:
    def check(attempt: Attempt) -> None:
        found = committed(attempt.root)
        assert found in STATES
        if attempt.plan.fault.kills and attempt.operation.happened:
            assert attempt.outcome.ending is Ending.KILLED
        elif attempt.plan.fault in (Fault.EINTR, Fault.SHORT_WRITE, Fault.SLOW):
            assert attempt.outcome.ending is Ending.FINISHED
        if attempt.outcome.ending is Ending.FINISHED:
            assert found == STATES[-1]
        check_next_save(attempt.root, found)

    matrix = CrashMatrix(first, linking, scratch=scratch)
    names = [operation.name for operation in matrix.operations if operation.happened]
    assert "clone" in names and "link" not in names
    explore(matrix, check)


@pytest.mark.case("V17")
def test_no_power_cut_costs_what_is_cloned(scratch: Path, cut_power: CutPower) -> None:
    def check(loss: PowerLoss, root: Path) -> None:
        found = committed(root)
        assert found in (STATES[-1:] if loss.finished else STATES), found
        check_next_save(root, found)

    matrix = CrashMatrix(first, linking, scratch=scratch)
    cut_power(matrix, [(matrix.operations, 0)], check)
