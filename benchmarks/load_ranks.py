"""Loading on 2 ranks what 4 ranks saved: Milepost against DCP, its Hugging Face reader, and reads.

The time is that of the slower rank, from a barrier to a barrier, into tensors that are there. Two
states: all tensors cut on dim 0 (FSDP2), and all cut on an inner dim (row-wise tensor parallelism).
Cold runs drop the files from the page cache by `posix_fadvise`, which needs no rights. Whoever runs
cold after another finds the pages that the other one left: plain reads of 1.5 GiB took 0.6 s after
themselves and 1.0 to 1.8 s after others. So in ten rounds everybody follows everybody else equally
often. Bars: faster than both rivals, cold and warm; at least 0.8 of the rate of plain reads for
shards of dim 0; at most 1.05 times the bytes needed for these and 1.5 times for columns, as the
reader counts; at most 64 MiB of memory above the state on each rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count, cycle, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

import milepost as mp
from _common import (
    MIB,
    Options,
    Report,
    Result,
    find,
    parse_options,
    peak_extra_nbytes,
    progress,
    settle,
    work_directory,
)
from _worlds import ROWS, STATES, State, Weights, from_all_ranks, in_world, sharded
from milepost.engine.source import memory_of
from milepost.format.header import read_header

SAVED_ON, LOADED_ON = 4, 2
WARM, COLD = "warm", "cold"
OWN, PLAIN = "mp.load", "plain reads"
PIECE_NBYTES = 8 * MIB
WARM_UP_NBYTES = 8 * MIB
MOST_READ = {True: 1.05, False: 1.5}

Load = Callable[[State, Path], object]


def save_all(nbytes: int, kind: str, base: Path) -> None:
    """In a rank: the state in every format, below `base`."""
    state = sharded(nbytes, kind)
    if dist.get_rank() == 0:
        base.mkdir(exist_ok=True)
    dist.barrier()
    mp.save(base / "checkpoint-1", {"model": Weights(state)}, step=1)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(base / "dcp", sync_files=True))
    writer = HuggingFaceStorageWriter(
        path=str(base / "hf"),
        fqn_to_index_mapping=dict.fromkeys(state, 1),
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(state, storage_writer=writer)


def milepost(state: State, base: Path, *, options: mp.ReadOptions) -> None:
    model = Weights(state)
    mp.load(base / "checkpoint-1", {"model": model}, options=options)


def dcp_native(state: State, base: Path) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(base / "dcp"))


def dcp_huggingface(state: State, base: Path) -> None:
    dcp.load(state, storage_reader=HuggingFaceStorageReader(path=str(base / "hf")))


def plain(state: State, base: Path) -> None:
    """As many bytes as the rank needs, one run after the other of one file, by as many threads."""
    path = base / "checkpoint-1" / "model.safetensors"
    position = read_header(path).data_start + dist.get_rank() * _needed_nbytes(state)
    descriptor = os.open(path, os.O_RDONLY)
    pieces = []
    for tensor in state.values():
        view = memory_of(tensor.to_local())  # type: ignore[attr-defined]
        for start in range(0, view.nbytes, PIECE_NBYTES):
            piece = view[start : start + PIECE_NBYTES]
            pieces.append((piece, position))
            position += piece.nbytes
    numbers = count()

    def work() -> None:
        while (number := next(numbers)) < len(pieces):
            piece, offset = pieces[number]
            while piece.nbytes:
                done = os.preadv(descriptor, [piece], offset)
                assert done, f"{path} is shorter than it should be"
                piece, offset = piece[done:], offset + done

    threads = mp.ReadOptions().threads
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()
    os.close(descriptor)


def _needed_nbytes(state: State) -> int:
    return sum(t.to_local().numel() * t.element_size() for t in state.values())  # type: ignore[attr-defined]


def contenders() -> dict[str, Load]:
    """Everybody by name, ours first."""
    return {
        OWN: partial(milepost, options=mp.ReadOptions()),
        "mp.load, shared": partial(milepost, options=mp.ReadOptions(mode=mp.ReadMode.SHARED)),
        "dcp.load": dcp_native,
        "DCP Hugging Face reader": dcp_huggingface,
        PLAIN: plain,
    }


def drop_from_cache(base: Path) -> None:
    """Forget the pages of all files below `base`, which are on the disk."""
    for path in base.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def run_once(load: Load, state: State, base: Path, temperature: str) -> float:
    """Seconds until the slower rank is done."""
    if dist.get_rank() == 0:
        settle()
        if temperature == COLD:
            drop_from_cache(base)
    dist.barrier()
    start = time.perf_counter()
    load(state, base)
    dist.barrier()
    return time.perf_counter() - start


def balanced_orders(names: Sequence[str]) -> list[list[str]]:
    """Orders in which each name directly follows each other one equally often (Williams, 1949)."""
    n = len(names)
    first = [position // 2 if position % 2 == 0 else n - 1 - position // 2 for position in range(n)]
    orders = [[names[(index + shift) % n] for index in first] for shift in range(n)]
    return orders + [order[::-1] for order in orders] if n % 2 else orders


def time_all(options: Options, kind: str, base: Path) -> dict[str, Any]:
    """In a rank: seconds of every contender, in turns, warm and cold; round 0 is not counted."""
    state = sharded(options.nbytes, kind)
    everybody = contenders()
    found: dict[str, Any] = {t: {name: [] for name in everybody} for t in (WARM, COLD)}
    orders = cycle(balanced_orders(list(everybody)))
    for number, order in zip(range(options.rounds + 1), orders, strict=False):
        for name, temperature in product(order, (WARM, COLD)):
            load = everybody[name]
            if temperature == WARM:
                load(state, base)  # whoever ran before may have left a cold cache
            seconds = run_once(load, state, base, temperature)
            if number:
                found[temperature][name].append(seconds)
        if dist.get_rank() == 0:
            progress(f"{kind}: round {number} of {options.rounds}")
    return found


def count_bytes(options: Options, kind: str, base: Path) -> float:
    """In a rank: bytes of files read by all ranks over bytes that they need."""
    state = sharded(options.nbytes, kind)
    read: list[int] = []  # appending is safe from any thread
    milepost(state, base, options=mp.ReadOptions(on_bytes=read.append))
    return sum(from_all_ranks(sum(read))) / sum(from_all_ranks(_needed_nbytes(state)))


def measure_memory(options: Options, kind: str, name: str, base: Path, small: Path) -> list[int]:
    """In a rank of a world of its own: the peak above the state of each rank, for one contender."""
    load = contenders()[name]
    peak = 0
    for place, nbytes in ((small, WARM_UP_NBYTES), (base, options.nbytes)):
        state = sharded(nbytes, kind)
        dist.barrier()
        peak = peak_extra_nbytes(partial(load, state, place))
    return from_all_ranks(peak)


def results_of(found: dict[str, dict[str, list[float]]]) -> list[Result]:
    results = []
    for temperature, entries in found.items():
        for name, seconds in entries.items():
            result = Result(
                name=f"{name}, {temperature}",
                group=temperature,
                synced="-",
                is_baseline=name == "dcp.load",
            )
            result.seconds = seconds
            results.append(result)
    return results


def check_times(report: Report, kind: str, results: list[Result]) -> None:
    for temperature in (WARM, COLD):
        own = find(results, f"{OWN}, {temperature}").median
        limits = {"dcp.load": 1.0, "DCP Hugging Face reader": 1.0}
        if kind == ROWS:
            limits[PLAIN] = 0.8
        for name, limit in limits.items():
            report.bar(
                f"{kind}, {temperature}: time of {name} / {OWN}",
                found=find(results, f"{name}, {temperature}").median / own,
                limit=limit,
                higher_is_better=True,
            )


def add_memory(report: Report, options: Options, kind: str, base: Path, directory: Path) -> None:
    rows = []
    for name in contenders():
        progress(f"{kind}: peak memory of {name}")
        small = base.with_name(f"{base.name}-small")
        arguments = (options, kind, name, base, small)
        peaks = in_world(LOADED_ON, measure_memory, *arguments, directory=directory)
        rows.append({"contender": name, "extra MiB": round(max(peaks) / MIB, 1)})
    report.rows(f"{kind}: memory above the state of a rank", rows)
    report.bar(
        f"{kind}: memory of {OWN} above the state, MiB",
        found=float(rows[0]["extra MiB"]),
        limit=64,
        higher_is_better=False,
    )


def main() -> int:
    options = parse_options(__doc__ or "", nbytes="1536MiB", rounds=10)
    report = Report(title=f"load on {LOADED_ON} ranks, saved on {SAVED_ON}", options=options)
    for kind in STATES:
        with work_directory(options) as directory:
            base = directory / "saved"
            for nbytes, place in (
                (options.nbytes, base),
                (WARM_UP_NBYTES, base.with_name("saved-small")),
            ):
                in_world(SAVED_ON, save_all, nbytes, kind, place, directory=directory)
            found = in_world(LOADED_ON, time_all, options, kind, base, directory=directory)
            results = results_of(found)
            report.times(f"{kind}", results, nbytes=options.nbytes)
            check_times(report, kind, results)
            ratio = in_world(LOADED_ON, count_bytes, options, kind, base, directory=directory)
            report.bar(
                f"{kind}: file bytes read / bytes needed",
                found=ratio,
                limit=MOST_READ[kind == ROWS],
                higher_is_better=False,
            )
            if options.memory:
                add_memory(report, options, kind, base, directory)
    return report.finish()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
