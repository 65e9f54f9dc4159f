from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from milepost.errors import CheckpointError
from milepost.testing.faults import Fault, FaultPlan, Operation
from milepost.testing.matrix import Attempt, CrashMatrix
from milepost.testing.power import PowerLoss
from milepost.testing.ranks import RankFaultPlan

Check: TypeAlias = Callable[[Attempt], None]
Record: TypeAlias = tuple[Sequence[Operation], int]
"""Operations, and how many of them have returned when the first power cut comes."""
CheckDisk: TypeAlias = Callable[[PowerLoss, Path], None]
CutPower: TypeAlias = Callable[[CrashMatrix, Iterable[Record], CheckDisk], None]

POINTS = "points"
DISKS = "disks after power cuts"
FILLING = ("open", "write", "reserve", "fsync")
SAMPLE = 20


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The tests fork, and a pool of threads does not survive that."""
    torch.set_num_threads(1)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, in memory where that can be: there are thousands of small saves."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    place = Path(tempfile.mkdtemp(prefix="milepost-crash-", dir=memory))
    yield place
    shutil.rmtree(place)


@pytest.fixture(params=["some", pytest.param("rest", marks=pytest.mark.slow)])
def explore(request: pytest.FixtureRequest) -> Callable[[CrashMatrix, Check], None]:
    """Tries a matrix and checks each attempt: a part of its points, or all the others."""

    def run(matrix: CrashMatrix, check: Check) -> None:
        some, rest = split(matrix)
        chosen = some if request.param == "some" else rest
        lost = []
        for attempt in matrix.attempts(chosen):
            try:
                check(attempt)
            except (AssertionError, CheckpointError, OSError) as error:
                lost.append(f"{attempt}\n  {type(error).__name__}: {error}")
        shown = "\n".join(lost[:8])
        assert not lost, f"{len(lost)} of {len(chosen)} points:\n{shown}"
        tell_points(request, 1, [(0, matrix.operations, plan) for plan in chosen])

    return run


def tell_points(
    request: pytest.FixtureRequest,
    world_size: int,
    tried: Iterable[tuple[int, Sequence[Operation], FaultPlan | RankFaultPlan]],
) -> None:
    """Keep what was tried for the report: layout, scenario, ranks, rank, operation, fault."""
    layout = request.path.stem.removeprefix("test_crash_")
    call = getattr(request.node, "callspec", None)
    scenario = str(call.params.get("name", "-")) if call is not None else "-"
    points = {
        f"{layout} | {scenario} | {world_size} ranks | rank {rank} | {plan.nth} "
        f"{operations[plan.nth].name} | {plan.fault.name}"
        for rank, operations, plan in tried
    }
    request.node.user_properties.append((POINTS, sorted(points)))


@pytest.fixture(params=["some", pytest.param("rest", marks=pytest.mark.slow)])
def cut_power(request: pytest.FixtureRequest) -> CutPower:
    """Cuts the power during each of some records, and checks each disk that may be left."""

    def run(matrix: CrashMatrix, records: Iterable[Record], check: CheckDisk) -> None:
        few = request.param == "some"
        lost, count = [], 0
        for operations, first in records:
            samples = 1 if few else 8
            losses = matrix.power_losses(operations, first=first, samples=samples, seed=samples)
            for loss, root in losses:
                count += 1
                try:
                    check(loss, root)
                except (AssertionError, CheckpointError, OSError) as error:
                    lost.append(f"{loss}\n  {type(error).__name__}: {error}")
        assert not lost, f"{len(lost)} of {count} disks:\n" + "\n".join(lost[:8])
        request.node.user_properties.append((DISKS, count))

    return run


def split(matrix: CrashMatrix) -> tuple[list[FaultPlan], list[FaultPlan]]:
    """What is tried in each run of the tests, and what only in a long one.

    Always: a kill before each operation, of the writes of a file before the first and the last, and
    an error of each operation that changes names. Of all else, a sample.
    """
    writes: dict[str, list[int]] = {}
    for number, operation in enumerate(matrix.operations):
        if operation.name == "write":
            writes.setdefault(operation.target, []).append(number)
    inner = {number for numbers in writes.values() for number in numbers[1:-1]}
    plans = matrix.plans(Fault)
    filling = {n for n, one in enumerate(matrix.operations) if one.name in FILLING}
    always = {FaultPlan(n, Fault.KILL_BEFORE) for n in range(len(matrix.operations))}
    always = {plan for plan in always if plan.nth not in inner}
    always |= {FaultPlan(n, Fault.EIO) for n in range(len(matrix.operations)) if n not in filling}
    others = [plan for plan in plans if plan not in always]
    always |= set(random.Random(1).sample(others, min(SAMPLE, len(others))))
    return [p for p in plans if p in always], [p for p in plans if p not in always]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the distinct points and disks; the list goes to the file that `CRASH_POINTS` names."""
    found = [
        (report.nodeid.rpartition("::")[2], what, value)
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
        for what, value in report.user_properties
        if what in (POINTS, DISKS)
    ]
    if not found:
        return
    terminalreporter.section("crash matrix")
    for test, what, value in sorted(found, key=lambda each: each[:2]):
        count = len(value) if what == POINTS else value
        terminalreporter.line(f"{count:6} {what}: {test}")
    points = sorted({point for _, what, value in found if what == POINTS for point in value})
    by_world = Counter(" |".join(point.split(" |")[:3]) for point in points)
    for world, count in sorted(by_world.items()):
        terminalreporter.line(f"{count:6} distinct {POINTS}: {world}")
    disks = sum(value for _, what, value in found if what == DISKS)
    terminalreporter.line(f"{len(points):6} distinct {POINTS} in all, nothing lost")
    terminalreporter.line(f"{disks:6} {DISKS} in all, nothing lost")
    if "CRASH_POINTS" in os.environ:
        Path(os.environ["CRASH_POINTS"]).write_text("\n".join(points) + "\n", encoding="utf-8")
