"""Saving a model in one process: Milepost against safetensors, torch.save, save_pretrained and DCP.

Durable against durable, page cache against page cache. Milepost's time is that of the whole
`mp.save`: digests, manifest, config files, random state and commit. Bars: the rate of the fastest
plain single-pass durable write of the same bytes in the same run, times 0.9; never slower than
`safetensors.save_file` + fsync; at most 64 MiB of memory above the state.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import milepost as mp
from _common import (
    MIB,
    Contender,
    Options,
    Report,
    answer,
    child,
    find,
    parse_options,
    peak_extra_nbytes,
    progress,
    run_rounds,
    sync_all,
    work_directory,
)
from _plain import METHODS, write_plain
from _state import llama, nbytes_of

DURABLE, PAGE_CACHE, PLAIN = "durable", "page cache", "plain"
WARM_UP_NBYTES = 4 * MIB
EVERYTHING = "files, directory, its parent"

Save = Callable[[Any, Path], object]


def milepost(model: Any, place: Path, *, durability: mp.Durability) -> None:
    options = mp.WriteOptions(durability=durability)
    mp.save(place / "checkpoint-1", {"model": model}, step=1, options=options)


def safetensors(model: Any, place: Path) -> None:
    save_file(model.state_dict(), place / "model.safetensors", metadata={"format": "pt"})


def torch_save(model: Any, place: Path) -> None:
    torch.save(model.state_dict(), place / "model.pt")


def save_pretrained(model: Any, place: Path) -> None:
    model.save_pretrained(place)


def dcp_save(model: Any, place: Path, *, sync: bool, threads: int) -> None:
    writer = dcp.FileSystemWriter(place / "dcp", sync_files=sync, thread_count=threads)
    dcp.save({"model": model.state_dict()}, storage_writer=writer, no_dist=True)


def then_sync(save: Save, model: Any, place: Path) -> None:
    """The save, and fsync of all that it wrote."""
    save(model, place)
    sync_all(place)


def contenders(model: Any) -> list[Contender]:
    """Everybody, ready to save `model`."""
    found = [
        Contender(
            name="mp.save",
            run=partial(milepost, model, durability=mp.Durability.DURABLE),
            group=DURABLE,
            synced=EVERYTHING,
        ),
        Contender(
            name="mp.save, page cache",
            run=partial(milepost, model, durability=mp.Durability.PAGE_CACHE),
            group=PAGE_CACHE,
            synced="directories",
        ),
    ]
    others: list[tuple[str, Save]] = [
        ("safetensors.save_file", safetensors),
        ("torch.save", torch_save),
        ("save_pretrained", save_pretrained),
    ]
    for name, save in others:
        first = save is safetensors
        durable = partial(then_sync, save, model)
        found += [
            Contender(
                name=f"{name} + fsync",
                run=durable,
                group=DURABLE,
                synced=EVERYTHING,
                is_baseline=first,
            ),
            Contender(name=name, run=partial(save, model), group=PAGE_CACHE, is_baseline=first),
        ]
    threads = os.cpu_count() or 1
    durable = partial(dcp_save, sync=True, threads=threads)
    cached = partial(dcp_save, sync=False, threads=threads)
    found += [
        Contender(
            name=f"DCP, {threads} threads, sync_files + fsync",
            run=partial(then_sync, durable, model),
            group=DURABLE,
            synced=EVERYTHING,
        ),
        Contender(
            name=f"DCP, {threads} threads",
            run=partial(cached, model),
            group=PAGE_CACHE,
            synced="metadata file",
        ),
    ]
    return found


def plain_contenders(model: Any) -> list[Contender]:
    tensors = list(model.state_dict().values())
    return [
        Contender(name=f"plain {method}", run=partial(_plain, tensors, method), group=PLAIN)
        for method in METHODS
    ]


def _plain(tensors: list[torch.Tensor], method: str, place: Path) -> None:
    write_plain(tensors, place / "plain", method=method, threads=2)


def measure_memory(options: Options, name: str) -> None:
    """In a process of its own: the peak above the state while one contender saves."""
    with work_directory(options) as directory:
        runs = []
        for size, nbytes in (("small", WARM_UP_NBYTES), ("big", options.nbytes)):
            place = directory / size
            place.mkdir()
            contender = next(c for c in contenders(llama(nbytes)) if c.name == name)
            runs.append(partial(contender.run, place))
        warm_up, run = runs
        warm_up()
        answer(peak_extra_nbytes(run))


def main() -> int:
    options = parse_options(__doc__ or "")
    if options.child:
        measure_memory(options, options.child)
        return 0
    report = Report(title="save, one process", options=options)
    model = llama(options.nbytes)
    nbytes = nbytes_of(model.state_dict())
    with work_directory(options) as directory:
        everybody = [*contenders(model), *plain_contenders(model)]
        results = run_rounds(everybody, directory, rounds=options.rounds)
    del model, everybody
    plain = min((r for r in results if r.group == PLAIN), key=lambda result: result.median)
    shown = [result for result in results if result.group != PLAIN]
    for result in shown if options.memory else ():
        progress(f"peak memory of {result.name}")
        result.more["extra MiB"] = round(child(options, result.name) / MIB, 1)
    for group in (DURABLE, PAGE_CACHE):
        chosen = [result for result in shown if result.group == group]
        report.times(f"{group}, {nbytes / 2**30:.2f} GiB of weights", chosen, nbytes=nbytes)
    report.times(
        "plain durable writes, 2 threads, no digests",
        [result for result in results if result.group == PLAIN],
        nbytes=nbytes,
    )
    own, rival = find(results, "mp.save"), find(results, "safetensors.save_file + fsync")
    report.bar(
        f"rate of mp.save / {plain.name}",
        found=plain.median / own.median,
        limit=0.9,
        higher_is_better=True,
    )
    report.bar(
        f"time of mp.save / {rival.name}",
        found=own.median / rival.median,
        limit=1.0,
        higher_is_better=False,
    )
    if options.memory:
        report.bar(
            "memory of mp.save above the state, MiB",
            found=own.more["extra MiB"],
            limit=64,
            higher_is_better=False,
        )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
