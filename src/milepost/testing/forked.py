"""An action in a forked child that is killed, or told by the file system that something went wrong.

    operations = record(lambda: mp.save(path, state, step=1, options=WriteOptions(threads=1)))
    for plan in plans(operations, Fault):
        outcome = run_with_fault(action, plan)

The child is a fork of this process: have torch use one thread (`torch.set_num_threads(1)`) before
it computes anything.
"""

from __future__ import annotations

import errno
import os
import pickle
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from milepost.storage import fileops
from milepost.testing.faults import Action, Ending, Fault, FaultPlan, Outcome

SLOW_S = 0.02
_MAX_MESSAGE_CHARS = 8000
_NEED_ROOM = frozenset({"open", "write", "reserve", "mkdir", "link", "clone", "symlink", "rename"})
_NUMBERS = {
    Fault.EIO: errno.EIO,
    Fault.EINTR: errno.EINTR,
    Fault.ENOSPC: errno.ENOSPC,
    Fault.EDQUOT: errno.EDQUOT,
    Fault.READ_ONLY: errno.EROFS,
}


class Striker:
    """The hook that lets operations pass up to the n-th. A slow disk takes `slow_s` longer."""

    def __init__(self, plan: FaultPlan, *, slow_s: float = SLOW_S) -> None:
        self.plan, self.slow_s = plan, slow_s
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
        if fault is Fault.SLOW:
            time.sleep(self.slow_s)
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
    pid = fork()
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


def fork() -> int:
    """`os.fork`, on Python 3.12 and later too."""
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

    pid = fork()
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
    striker = Striker(plan)
    try:
        outcome = outcome_of(action, striker)
        os.write(writing, pickle.dumps(outcome))
    finally:
        os._exit(0)


def outcome_of(action: Action, striker: Striker) -> Outcome:
    """Run `action` in this process with a fault, and say how it ended, if it lets it."""
    try:
        with fileops.hooked(striker):
            action()
    except BaseException as error:  # noqa: BLE001 - it is what the caller asks for
        return Outcome(
            ending=Ending.RAISED,
            error=type(error).__name__,
            classes=tuple(one.__name__ for one in type(error).__mro__),
            message=str(error)[:_MAX_MESSAGE_CHARS],
            struck=striker.struck,
        )
    return Outcome(ending=Ending.FINISHED, struck=striker.struck)


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
    outcome = pickle.loads(raw)
    assert isinstance(outcome, Outcome)
    return outcome
