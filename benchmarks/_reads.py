"""Which bytes of which file a process read, as strace saw it."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

CALLS = "openat,lseek,read,readv,pread64,preadv,preadv2,mmap"
# With -y a descriptor is followed by its path: pread64(3</x/y>, ""..., 9, 3) = 9
_LINE = re.compile(r"(?P<call>\w+)\((?P<arguments>.*)\)\s+= (?P<result>\w+)(?:<(?P<path>.*)>)?$")
_DESCRIPTOR = re.compile(r"(?<![\w])(?P<number>\d+)<(?P<path>/[^>]*)>")


class BytesRead:
    """Byte ranges read and bytes mapped, by file."""

    def __init__(self) -> None:
        self.ranges: dict[Path, list[tuple[int, int]]] = {}
        self._mapped: dict[Path, int] = {}

    def total(self, path: Path) -> int:
        return sum(end - start for start, end in self.ranges.get(path, ()))

    def beyond(self, path: Path, offset: int) -> int:
        """Bytes read at or after `offset`; a map counts as if all of it were read."""
        read = sum(max(0, end - max(start, offset)) for start, end in self.ranges.get(path, ()))
        return read + self.mapped(path)

    def mapped(self, path: Path) -> int:
        return self._mapped.get(path, 0)

    def add_thread(self, log: str) -> None:
        """Take in the calls of one thread, in order."""
        positions: dict[int, int] = {}
        for line in log.splitlines():
            found = _LINE.search(line)
            if found is None or found["result"].startswith("-"):
                continue
            call, arguments = found["call"], found["arguments"]
            if call == "openat":
                positions[int(found["result"])] = 0
                continue
            place = _DESCRIPTOR.search(arguments)
            if place is None:
                continue
            number, path = int(place["number"]), Path(place["path"])
            if call == "mmap":
                self._mapped[path] = self.mapped(path) + int(arguments.split(", ")[1], 0)
                continue
            count = int(found["result"], 0)
            if call == "lseek":
                positions[number] = count
                continue
            if call in ("read", "readv"):
                start = positions.get(number, 0)
                positions[number] = start + count
            else:
                start = int(arguments.split(", ")[-2 if call == "preadv2" else -1])
            self.ranges.setdefault(path, []).append((start, start + count))


def has_strace() -> bool:
    return shutil.which("strace") is not None


def bytes_read_under_strace(run: Callable[..., object]) -> BytesRead:
    """What a process reads; `run` starts it behind the words that it is given."""
    seen = BytesRead()
    with tempfile.TemporaryDirectory(prefix="milepost-bench-") as name:
        run("strace", "-ff", "-y", "-s", "0", "-e", f"trace={CALLS}", "-o", f"{name}/thread")
        for log in sorted(Path(name).iterdir()):
            seen.add_thread(log.read_text(errors="replace"))
    return seen
