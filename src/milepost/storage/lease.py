"""The writer's lease on a run directory: one process writes into a run at a time.

The lease is `flock(2)` on `.milepost.lock`, so it ends with the process that holds it, however that
ends. The file's content names the holder. It decides where locks do not reach across hosts: a
content that names another host and was refreshed within a day (by the file system's clock) refuses
the run as well.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from milepost.errors import RunInUseError
from milepost.storage import fileops

LOCK_NAME = ".milepost.lock"
STALE_AFTER_S = 24 * 3600.0

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: dict[str, RunLease] = {}
_guard = threading.Lock()


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def process_start(pid: int) -> str | None:
    """When process `pid` of this host began, in clock ticks since boot; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process, told apart from every other that had its number."""

    host: str
    boot_id: str
    pid: int
    start: str

    @classmethod
    def this_process(cls) -> Owner:
        pid = os.getpid()
        return cls(
            host=platform.node(), boot_id=_boot_id(), pid=pid, start=process_start(pid) or ""
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Owner | None:
        """The owner that a lease file names; None when it names nobody that can be understood."""
        try:
            data: Any = json.loads(raw)
            return cls(
                host=str(data["host"]),
                boot_id=str(data["boot_id"]),
                pid=int(data["pid"]),
                start=str(data["start"]),
            )
        except (ValueError, KeyError, TypeError):
            return None

    def to_bytes(self) -> bytes:
        return json.dumps(
            {"host": self.host, "boot_id": self.boot_id, "pid": self.pid, "start": self.start}
        ).encode()

    def is_on_this_host(self) -> bool:
        return self.host == platform.node()

    def is_dead(self) -> bool:
        """Known to be gone: same host, and rebooted since or the process number is another's."""
        if not self.is_on_this_host():
            return False
        return self.boot_id != _boot_id() or process_start(self.pid) != self.start

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLease:
    """The right to write into `run`; a context manager, re-entrant inside one process.

    Taking it creates the directory when it is missing. `RunInUseError` names the process that
    holds it. The lease also ends when the process does.
    """

    def __init__(self, run: Path) -> None:
        self.run = Path(os.path.abspath(run))  # the process may change its directory meanwhile
        self._descriptor = -1
        self._depth = 0
        self._turn = threading.RLock()  # of its own: another file system may hang

    @classmethod
    def of(cls, run: Path) -> RunLease:
        """The lease object of this process for `run`."""
        key = os.path.realpath(run)
        with _guard:
            if key not in _held:
                _held[key] = cls(run)
            return _held[key]

    def __enter__(self) -> RunLease:
        with self._turn:
            if self._depth == 0:
                self._acquire()
            self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._turn:
            self._depth -= 1
            if self._depth == 0:
                self._release()

    def _acquire(self) -> None:
        fileops.make_directories(self.run)
        path = self.run / LOCK_NAME
        descriptor = fileops.open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            self._refuse_others(descriptor, is_locked=self._lock(descriptor))
            content = Owner.this_process().to_bytes()
            fileops.truncate_file(descriptor, 0)
            fileops.write_at(descriptor, content, 0)
        except BaseException:
            fileops.close_file(descriptor)
            raise
        self._descriptor = descriptor

    def _lock(self, descriptor: int) -> bool:
        """Whether the lock is ours; False on a file system without locks."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = Owner.from_bytes(os.pread(descriptor, 4096, 0))
            raise RunInUseError(
                f"{self.run}: {owner or 'another process'} is writing checkpoints here; "
                "give each job a directory of its own, or wait until it has ended",
                path=self.run,
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def _refuse_others(self, descriptor: int, *, is_locked: bool) -> None:
        """Refuse a holder that the lock does not show: on another host, or where nothing locks."""
        owner = Owner.from_bytes(os.pread(descriptor, 4096, 0))
        if owner is None or owner.is_dead() or owner == Owner.this_process():
            return
        if is_locked and owner.is_on_this_host():
            return  # it lives, but gave the lease back
        age_s = filesystem_age_s(self.run / LOCK_NAME)
        if age_s < STALE_AFTER_S:
            raise RunInUseError(
                f"{self.run}: {owner} held the lease {age_s:.0f} s ago and has not given it back; "
                f"end that job, or remove {LOCK_NAME} when you are sure it is dead",
                path=self.run,
            )

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:  # this process is a fork of the one that took the lease
            return
        with suppress(OSError):  # an empty lease is a courtesy to other hosts, the lock ends anyway
            fileops.truncate_file(descriptor, 0)
        fileops.close_file(descriptor)

    def refresh(self) -> None:
        """Show other hosts that the holder lives."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.utime(self._descriptor)

    def _leave_to_parent(self) -> None:
        """In a forked child: the lease is the parent's, and ends with it. A copy of its descriptor
        would keep the lock for as long as the child lives."""
        if self._descriptor >= 0:
            fileops.close_file(self._descriptor)
        self._descriptor = -1


def _start_afresh() -> None:
    """In a forked child."""
    global _guard
    _guard = threading.Lock()
    for lease in _held.values():
        lease._leave_to_parent()
    _held.clear()


os.register_at_fork(after_in_child=_start_afresh)


def filesystem_age_s(path: Path) -> float:
    """Seconds since `path` changed, by the file system's clock, not this host's."""
    probe = path.with_name(f".milepost-clock-{os.getpid()}-{threading.get_ident()}")
    try:
        descriptor = fileops.open_file(probe, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            now_s = os.fstat(descriptor).st_mtime
        finally:
            fileops.close_file(descriptor)
            fileops.unlink(probe)
    except OSError:
        now_s = time.time()
    return now_s - path.stat().st_mtime
