"""Mode and times of a file, given to the files that are made of it."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from milepost.storage import fileops


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAttributes:
    """The permission bits, and access and modification time in nanoseconds since the epoch."""

    mode: int
    times_ns: tuple[int, int]

    @classmethod
    def of(cls, path: Path) -> FileAttributes:
        status = path.stat()
        return cls(
            mode=stat.S_IMODE(status.st_mode) & 0o777,
            times_ns=(status.st_atime_ns, status.st_mtime_ns),
        )

    def give(self, path: Path) -> None:
        """Set them on `path`."""
        fileops.change_mode(path, self.mode)
        fileops.set_times(path, ns=self.times_ns)
