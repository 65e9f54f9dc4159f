"""What the benchmarks share: options, machine, interleaved rounds, memory and read counts, report.

Rules that every script keeps, each of them learnt from a wrong number:

- contenders take turns, in an order that changes from round to round, and round 0 is thrown away:
  the first writer pays for pages that the machine has not touched yet;
- a run begins with its output removed and `sync` done, so that nobody pays for another's writeback;
- durable is compared with durable, page cache with page cache, and the table says what is fsynced;
- peak memory is measured in a process of its own, after a small run that imports everything.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from milepost.plan.parts import parse_nbytes

MIB = 2**20
GIB = 2**30
Turn = TypeVar("Turn")
PACKAGES = ("torch", "milepost", "safetensors", "transformers", "xxhash", "typer", "rich")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says. `child` is set in a process that measures one contender;
    `more` has what only this script knows."""

    nbytes: int
    rounds: int
    json: Path | None
    directory: Path
    memory: bool
    child: str | None
    more: Mapping[str, Any]


def parse_options(
    description: str,
    *,
    nbytes: str = "2GiB",
    rounds: int = 5,
    add_more: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Options:
    parser = argparse.ArgumentParser(description=description.strip().partition("\n")[0])
    parser.add_argument("--nbytes", default=nbytes, help=f"bytes of tensors (default {nbytes})")
    parser.add_argument("--rounds", type=int, default=rounds, help="measured, after a warm-up")
    parser.add_argument("--json", type=Path, metavar="OUT", help="also write the results there")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument("--skip-memory", action="store_true", help="no process for each contender")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    shared = {action.dest for action in parser._actions}
    if add_more is not None:
        add_more(parser)
    given = parser.parse_args()
    return Options(
        nbytes=parse_nbytes(given.nbytes),
        rounds=given.rounds,
        json=given.json,
        directory=Path(given.directory),
        memory=not given.skip_memory,
        child=given.child,
        more={name: value for name, value in vars(given).items() if name not in shared},
    )


@contextmanager
def work_directory(options: Options) -> Iterator[Path]:
    """A directory on the measured disk, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="milepost-bench-", dir=options.directory) as name:
        yield Path(name)


# ------------------------------------------------------------------------------- the machine


def environment(options: Options) -> dict[str, Any]:
    """Where and when: a number without them says nothing."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {_memory_nbytes() / GIB:.0f} GiB memory",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "filesystem": _filesystem(options.directory),
        "load": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "nbytes": options.nbytes,
        "rounds": options.rounds,
    }


def _cpu() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_nbytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _filesystem(directory: Path) -> str:
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in _lines("/proc/self/mountinfo"):
        fields = line.split()
        if fields[2] == wanted:
            kind, source = fields[fields.index("-") + 1 :][:2]
            return f"{kind} on {source}"
    return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "-"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# ---------------------------------------------------------------------------------- contenders


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to do the thing. `run` gets an empty directory; `synced` says what is durable.

    Times are compared inside a `group` only, with its `baseline` where a ratio is printed.
    """

    name: str
    run: Callable[[Path], object]
    group: str = ""
    synced: str = "-"
    is_baseline: bool = False


@dataclass(kw_only=True)
class Result:
    """What one contender took, in seconds, at most as extra memory, and further columns by name."""

    name: str
    group: str
    synced: str
    is_baseline: bool
    seconds: list[float] = field(default_factory=list)
    extra: float = 0.0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        return min(self.seconds)


def run_rounds(
    contenders: Sequence[Contender], directory: Path, *, rounds: int, cold: bool = False
) -> list[Result]:
    """Time all contenders, in turns. `cold` empties the page cache before each run."""
    results = {
        each.name: Result(
            name=each.name, group=each.group, synced=each.synced, is_baseline=each.is_baseline
        )
        for each in contenders
    }
    assert len(results) == len(contenders), "two contenders have one name"
    for number in range(rounds + 1):
        for contender in turns(contenders, number):
            seconds = timed(contender, directory, cold=cold)
            if number:
                results[contender.name].seconds.append(seconds)
        progress(f"round {number} of {rounds}" + ("" if number else " (warm-up, not counted)"))
    return list(results.values())


def timed(contender: Contender, directory: Path, *, cold: bool = False) -> float:
    """One run in an empty directory that is removed afterwards."""
    place = directory / "output"
    place.mkdir()
    settle(cold=cold)
    start = time.perf_counter()
    result = contender.run(place)
    seconds = time.perf_counter() - start
    del result
    shutil.rmtree(place)
    return seconds


def turns(contenders: Sequence[Turn], number: int) -> list[Turn]:
    """The contenders in the order of a round."""
    first = number % len(contenders)
    turned = [*contenders[first:], *contenders[:first]]
    return turned[::-1] if number % 2 else turned


def settle(*, cold: bool = False) -> None:
    """Nothing of what came before is still to be written, or (`cold`) still in the page cache."""
    gc.collect()
    os.sync()
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")


def can_drop_caches() -> bool:
    return os.access("/proc/sys/vm/drop_caches", os.W_OK)


def sync_all(place: Path) -> None:
    """fsync every file below `place`, every directory, and the directory that holds it."""
    for directory, _, files in os.walk(place, topdown=False):
        for name in (*files, "."):
            _fsync(os.path.join(directory, name))
    _fsync(str(place.parent))


def _fsync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------- memory and bytes read


def peak_extra_nbytes(run: Callable[[], object]) -> int:
    """How far the resident memory of this process rises above what it is now while `run` runs.

    Pages of mapped files count too. The caller has run the same thing on something small.
    """
    import ctypes

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5\n")  # the peak is counted from here on
    before = _status_nbytes("VmRSS")
    result = run()
    peak = _status_nbytes("VmHWM")
    del result
    return max(0, peak - before)


def _status_nbytes(key: str) -> int:
    for line in _lines("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def bytes_read_by(run: Callable[[], object]) -> int:
    """Bytes that `read` calls of this process returned while `run` ran (rchar of /proc/self/io).

    What is read through a map is not in it.
    """
    before = _read_chars()
    result = run()
    after = _read_chars()
    overhead = _read_chars() - after  # reading the counter counts itself
    del result
    return after - before - overhead


def _read_chars() -> int:
    with open("/proc/self/io", "rb", buffering=0) as file:
        return int(file.read(4096).split()[1])


def child(options: Options, what: str, *prefix: str) -> Any:
    """Run this script again as a process that measures `what`; what it gives to `answer`."""
    command = [*prefix, sys.executable, sys.argv[0], "--child", what]
    command += ["--nbytes", str(options.nbytes), "--directory", str(options.directory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def answer(value: Any) -> None:
    """Print the result of a child."""
    print(json.dumps(value), flush=True)


# ------------------------------------------------------------------------------------- report


@dataclass(kw_only=True)
class Report:
    """Tables and bars of one script, printed as they come and written as JSON at the end."""

    title: str
    options: Options
    environment: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    bars: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.environment = environment(self.options)
        print(f"# {self.title}\n")
        for key, value in self.environment.items():
            text = value
            if isinstance(value, Mapping):
                text = ", ".join(f"{name} {number}" for name, number in value.items())
            print(f"{key:<11} {text}")

    def times(self, title: str, results: Sequence[Result], *, nbytes: int | None = None) -> None:
        """A table of times, with a ratio to the baseline of each group."""
        rows = []
        for result in results:
            base = next((r for r in results if r.is_baseline and r.group == result.group), None)
            row: dict[str, Any] = {"contender": result.name}
            if result.group:
                row["group"] = result.group
            row["median s"] = round(result.median, 4)
            row["min s"] = round(result.minimum, 4)
            if nbytes is not None:
                row["GiB/s"] = round(nbytes / GIB / result.median, 2)
            if base is not None:
                row[f"time / {base.name}"] = round(result.median / base.median, 2)
            row.update(result.more)
            if result.synced != "-":
                row["fsynced"] = result.synced
            rows.append({**row, "seconds": [round(value, 4) for value in result.seconds]})
        self.rows(title, rows)

    def rows(self, title: str, rows: Sequence[dict[str, Any]]) -> None:
        """A table; `seconds` goes into the JSON only."""
        self.tables[title] = list(rows)
        columns = list(dict.fromkeys(key for row in rows for key in row if key != "seconds"))
        lines = [columns, ["---"] * len(columns)]
        lines += [[str(row.get(column, "")) for column in columns] for row in rows]
        widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
        print(f"\n## {title}\n")
        for line in lines:
            print("| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |")
        sys.stdout.flush()

    def bar(self, text: str, *, found: float, limit: float, higher_is_better: bool) -> None:
        """A claim with its number; a missed one is printed so and makes the exit code 1."""
        holds = found >= limit if higher_is_better else found <= limit
        sign = ">=" if higher_is_better else "<="
        self.bars.append({"bar": text, "found": found, "limit": limit, "holds": holds})
        print(f"\n{'holds ' if holds else 'MISSED'} {text}: {found:.3f} {sign} {limit:g}")

    def finish(self) -> int:
        """Write the JSON; the exit code."""
        if self.options.json is not None:
            content = {key: value for key, value in asdict(self).items() if key != "options"}
            self.options.json.write_text(json.dumps(content, indent=2) + "\n")
        return 0 if all(bar["holds"] for bar in self.bars) else 1


def find(results: Sequence[Result], name: str) -> Result:
    return next(result for result in results if result.name == name)


def progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
