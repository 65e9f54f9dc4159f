"""What an action does to the file system, and what can go wrong at each operation of it.

`record` runs an action and lists its file operations; `plans` says which faults can meet them.

With one writing thread (`WriteOptions(threads=1)`, or `MILEPOST_IO_THREADS=1`) the operations come
in the same order each time, so the n-th of a run is the n-th of the record.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from milepost.storage import fileops

Action: TypeAlias = Callable[[], object]


class Fault(Enum):
    """What happens at the n-th operation."""

    KILL_BEFORE = "kill before"
    KILL_HALFWAY = "kill halfway"
    """Half of the bytes of a write are written; other operations have no half."""
    KILL_AFTER = "kill after"
    EIO = "EIO"
    """The operation fails, once."""
    EINTR = "EINTR"
    """A signal interrupts it, once."""
    SHORT_WRITE = "short write"
    """A write takes half of its bytes."""
    ENOSPC = "ENOSPC"
    """It fails, and so does everything after it that needs room on the disk."""
    EDQUOT = "EDQUOT"
    """The same, by quota."""
    READ_ONLY = "read-only"
    """It fails, and so does everything after it: EROFS."""
    SLOW = "slow disk"
    """It takes a while longer, and is done."""

    @property
    def kills(self) -> bool:
        return self in (Fault.KILL_BEFORE, Fault.KILL_HALFWAY, Fault.KILL_AFTER)

    def applies_to(self, operation: Operation) -> bool:
        """Whether the fault can meet this operation."""
        if self in (Fault.KILL_HALFWAY, Fault.SHORT_WRITE):
            return operation.name == "write" and operation.nbytes > 1
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One file operation that was carried out.

    `arguments` are those of the system call, with the bytes of a write copied. `happened` is False
    when it changed nothing: it failed, or the file system cannot do it. `ended_ns` is the monotonic
    clock when it ended, in nanoseconds: all processes of a host share that clock.
    """

    name: str
    target: str
    nbytes: int = 0
    arguments: tuple[Any, ...] = field(default=(), repr=False)
    happened: bool = True
    ended_ns: int = field(default=0, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """A fault at the operation `nth`, counted from 0 as in the list that `record` returns."""

    nth: int
    fault: Fault

    def __str__(self) -> str:
        return f"{self.fault.value} at operation {self.nth}"


class Ending(Enum):
    FINISHED = "finished"
    RAISED = "raised"
    KILLED = "killed"
    HUNG = "hung"
    """It neither went on nor ended in time, and was ended by the harness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an action ended. `error` is the class of what it raised, `classes` that and its bases.

    `struck` is False when the action had fewer operations than the plan counts.
    """

    ending: Ending
    error: str | None = None
    classes: tuple[str, ...] = ()
    message: str = ""
    struck: bool = True


def record(action: Action) -> list[Operation]:
    """Run `action` in this process and return its file operations in order.

    The bytes of every write are kept, so the action should write little.
    """
    operations: list[Operation] = []
    guard = threading.Lock()

    def hook(
        name: str, target: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        copied, nbytes = _copied(name, arguments)
        happened = False
        try:
            result = function(*arguments)
            happened = result is not False
            if name == "write":
                copied, nbytes = (copied[0], copied[1][:result], copied[2]), result
            return result
        finally:
            with guard:
                operations.append(
                    Operation(
                        name=name,
                        target=target,
                        nbytes=nbytes,
                        arguments=copied,
                        happened=happened,
                        ended_ns=time.monotonic_ns(),
                    )
                )

    with fileops.hooked(hook):
        action()
    return operations


def _copied(name: str, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], int]:
    if name == "write":
        descriptor, view, offset = arguments
        return (descriptor, bytes(view), offset), len(view)
    if name in ("reserve", "truncate"):
        return arguments, int(arguments[1])
    return arguments, 0


def plans(operations: Sequence[Operation], faults: Iterable[Fault]) -> list[FaultPlan]:
    """Each fault at each operation that it can meet."""
    wanted = list(faults)
    return [
        FaultPlan(number, fault)
        for number, operation in enumerate(operations)
        for fault in wanted
        if fault.applies_to(operation)
    ]


@contextmanager
def lacking(*operations: str) -> Iterator[None]:
    """While the block runs, the file system cannot do these: of exchange, reserve, link and clone.

    Inside an action, so that it is recorded and struck by faults as on such a file system.
    """
    unknown = set(operations) - {"exchange", "reserve", "link", "clone"}
    assert not unknown, f"no file system is without {unknown}"

    def hook(
        name: str, target: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        if name not in operations:
            return function(*arguments)
        if name == "link":
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), target)
        return False

    with fileops.hooked(hook):
        yield
