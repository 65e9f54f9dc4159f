"""Contenders that run in processes of their own, in turns: seconds and extra memory of each."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _common import MIB, Options, Result, child, find, progress, settle, turns


@dataclass(frozen=True, kw_only=True)
class Process:
    """A contender that runs in a process of its own, so that memory is its alone. `told` is what
    the process gets as `--child`; it answers `seconds` and `extra` bytes of memory."""

    name: str
    told: str
    synced: str = "-"
    is_baseline: bool = False


def run_processes(
    processes: Sequence[Process], options: Options, directory: Path, *, title: str = ""
) -> list[Result]:
    """Let all take turns, each with an empty `output` in `directory`."""
    results = [
        Result(name=each.name, group="", synced=each.synced, is_baseline=each.is_baseline)
        for each in processes
    ]
    for number in range(options.rounds + 1):
        for process in turns(processes, number):
            (directory / "output").mkdir()
            settle()
            found = child(options, process.told)
            shutil.rmtree(directory / "output")
            if number:
                result = find(results, process.name)
                result.seconds.append(found["seconds"])
                result.extra = max(result.extra, found["extra"])
        progress(f"{title}round {number} of {options.rounds}")
    for result in results:
        result.more["extra MiB"] = round(result.extra / MIB, 1)
    return results
