"""What an action does to the file system, and the same action with a fault at one operation of it.

`record` runs an action and lists its file operations; `run_with_fault` runs it again in a forked
child that is killed, or told by the file system that something went wrong, at the n-th of them:

    operations = record(lambda: mp.save(path, state, step=1, options=WriteOptions(threads=1)))
    for plan in plans(operations, Fault):
        outcome = run_with_fault(action, plan)

With one writing thread (`WriteOptions(threads=1)`, or `MILEPOST_IO_THREADS=1`) the operations come
in the same order each time, so the n-th of a run is the n-th of the record. The child is a fork of
this process: have torch use one thread (`torch.set_num_threads(1)`) before it computes anything.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn, TypeAlias

from milepost.storage import fileops

Action: TypeAlias = Callable[[], object]

_MAX_MESSAGE_CHARS = 8000
_NEED_ROOM = frozenset({"open", "write", "reserve", "mkdir", "link", "symlink", "rename"})


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

    @property
    def kills(self) -> bool:
        return self in (Fault.KILL_BEFORE, Fault.KILL_HALFWAY, Fault.KILL_AFTER)

    def applies_to(self, operation: Operation) -> bool:
        """Whether the fault can meet this operation."""
        if self in (Fault.KILL_HALFWAY, Fault.SHORT_WRITE):
            return operation.name == "write" and operation.nbytes > 1
        return True


_NUMBERS = {
    Fault.EIO: errno.EIO,
    Fault.EINTR: errno.EINTR,
    Fault.ENOSPC: errno.ENOSPC,
    Fault.EDQUOT: errno.EDQUOT,
    Fault.READ_ONLY: errno.EROFS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One file operation that was carried out.

    `arguments` are those of the system call, with the bytes of a write copied. `happened` is False
    when it changed nothing: it failed, or the file system cannot do it.
    """

    name: str
    target: str
    nbytes: int = 0
    arguments: tuple[Any, ...] = field(default=(), repr=False)
    happened: bool = True


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
    """While the block runs, the file system cannot do these: `exchange`, `reserve` or `link`.

    Inside an action, so that it is recorded and struck by faults as on such a file system.
    """
    unknown = set(operations) - {"exchange", "reserve", "link"}
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


class _Striker:
    """The hook that lets operations pass up to the n-th."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self.count = 0
        self._guard = threading.Lock()

    @property
    def struck(self) -> bool:
        return self.count > self.plan.nth

    def __call__(
        self, name: str, target: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        with self._guard:
            number = self.count
            self.count += 1
        if number < self.plan.nth:
            return function(*arguments)
        if number == self.plan.nth:
            return self._strike(name, target, function, arguments)
        fault = self.plan.fault
        if fault is Fault.READ_ONLY:
            raise _failure(fault, target)
        if fault in (Fault.ENOSPC, Fault.EDQUOT) and _needs_room(name, arguments):
            raise _failure(fault, target)
        return function(*arguments)

    def _strike(
        self, name: str, target: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        fault = self.plan.fault
        if fault in _NUMBERS:
            raise _failure(fault, target)
        if fault in (Fault.KILL_HALFWAY, Fault.SHORT_WRITE) and name == "write":
            descriptor, view, offset = arguments
            arguments = (descriptor, view[: max(1, len(view) // 2)], offset)
        result = None if fault is Fault.KILL_BEFORE else function(*arguments)
        if fault.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def _failure(fault: Fault, target: str) -> OSError:
    number = _NUMBERS[fault]
    return OSError(number, os.strerror(number), target)


def _needs_room(name: str, arguments: tuple[Any, ...]) -> bool:
    if name == "open":
        return bool(arguments[1] & os.O_CREAT) and not os.path.lexists(arguments[0])
    return name in _NEED_ROOM


def run_with_fault(action: Action, plan: FaultPlan, *, timeout_s: float = 60.0) -> Outcome:
    """Run `action` in a forked child with a fault, and say how it ended.

    The child ends without running what was registered at exit. `TimeoutError` when it does not end.
    """
    reading, writing = os.pipe()
    pid = _fork()
    if pid == 0:
        os.close(reading)
        _be_the_child(action, plan, writing)
    os.close(writing)
    try:
        raw = _read_until_closed(reading, timeout_s)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(reading)
    _, status = os.waitpid(pid, 0)
    return _outcome(raw, status, plan)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork beside threads
        return os.fork()


@contextmanager
def standing_still(action: Action, nth: int, *, timeout_s: float = 60.0) -> Iterator[int]:
    """A forked child that runs `action` and stops before the operation `nth`; its process number.

    It holds then whatever it had taken: leases, open files. When the block ends it is killed.
    """
    reading, writing = os.pipe()

    def stop() -> None:
        os.write(writing, b"!")
        while True:
            signal.pause()

    pid = _fork()
    if pid == 0:
        try:
            with fileops.hooked(_Stop(nth, stop)):
                action()
        finally:
            os._exit(1)
    os.close(writing)
    try:
        if not _read_some(reading, timeout_s):
            raise ChildProcessError(f"the action ended before its operation {nth}")
        yield pid
    finally:
        os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class _Stop:
    """The hook that lets `nth` operations pass and then calls `stop`."""

    def __init__(self, nth: int, stop: Callable[[], None]) -> None:
        self.left = nth
        self.stop = stop

    def __call__(
        self, name: str, target: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        if self.left == 0:
            self.stop()
        self.left -= 1
        return function(*arguments)


def _be_the_child(action: Action, plan: FaultPlan, writing: int) -> NoReturn:
    striker = _Striker(plan)
    report: dict[str, Any] = {}
    try:
        with fileops.hooked(striker):
            action()
    except BaseException as error:
        report["error"] = type(error).__name__
        report["classes"] = [one.__name__ for one in type(error).__mro__]
        report["message"] = str(error)[:_MAX_MESSAGE_CHARS]
        raise
    finally:
        report["struck"] = striker.struck
        os.write(writing, json.dumps(report).encode())
        os._exit(0)


def _read_until_closed(descriptor: int, timeout_s: float) -> bytes:
    end_s = time.monotonic() + timeout_s
    raw = b""
    while data := _read_some(descriptor, end_s - time.monotonic()):
        raw += data
    return raw


def _read_some(descriptor: int, timeout_s: float) -> bytes:
    ready, _, _ = select.select([descriptor], [], [], max(0.0, timeout_s))
    if not ready:
        raise TimeoutError("the action neither went on nor ended in time")
    return os.read(descriptor, 65536)


def _outcome(raw: bytes, status: int, plan: FaultPlan) -> Outcome:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and plan.fault.kills:
        return Outcome(ending=Ending.KILLED)
    if not raw:
        raise ChildProcessError(f"{plan}: the child ended by itself, with wait status {status}")
    report = json.loads(raw)
    error = report.get("error")
    return Outcome(
        ending=Ending.FINISHED if error is None else Ending.RAISED,
        error=error,
        classes=tuple(report.get("classes", ())),
        message=report.get("message", ""),
        struck=report["struck"],
    )
