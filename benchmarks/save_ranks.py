"""Saving a model sharded over 4 ranks: Milepost against DCP, DCP with consolidation, and a gather.

Everything is durable when the clock stops, and the time is that of the slowest rank. Milepost's is
that of the whole `mp.save`: digests, manifest, random state and commit. Two states: all tensors cut
on dim 0 (FSDP2), and all cut on an inner dim (row-wise tensor parallelism), which Milepost saves by
the exchange, through maps, or joined by domains. Bars, for the first state: at least 6 times faster
than DCP's Hugging Face writer with consolidation and than a gather to rank 0, 1.5 times faster than
DCP's own format, 0.8 of the rate of a plain durable write; at most 64 MiB of memory above the state
on every rank, for both.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

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
    sync_all,
    work_directory,
)
from _plain import METHODS, write_plain
from _worlds import COLUMNS, ROWS, STATES, State, Weights, from_all_ranks, in_world, sharded

RANKS = 4
PLAIN = "plain"
WARM_UP_NBYTES = 8 * MIB

Save = Callable[[State, Path], object]


def milepost(model: Weights, state: State, place: Path, *, options: mp.WriteOptions) -> None:
    mp.save(place / "checkpoint-1", {"model": model}, step=1, options=options)


def dcp_native(state: State, place: Path) -> None:
    writer = dcp.FileSystemWriter(place / "dcp", sync_files=True, thread_count=1)
    dcp.save(state, storage_writer=writer)


def dcp_consolidated(state: State, place: Path) -> None:
    names = dict.fromkeys(state, 1)
    writer = HuggingFaceStorageWriter(
        path=str(place / "hf"),
        fqn_to_index_mapping=names,
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        sync_all(place)


def gathered(state: State, place: Path) -> None:
    whole = {}
    for name, value in state.items():
        full = value.full_tensor()  # type: ignore[attr-defined]
        if dist.get_rank() == 0:
            whole[name] = full
    if dist.get_rank() == 0:
        save_file(whole, place / "model.safetensors", metadata={"format": "pt"})
        sync_all(place)


def plain(state: State, place: Path, *, method: str) -> None:
    """Every rank writes its shards into a file of its own."""
    rank_place = place / str(dist.get_rank())
    rank_place.mkdir()
    write_plain(_locals(state), rank_place / "plain", method=method, threads=1)


def _locals(state: State) -> list[torch.Tensor]:
    return [value.to_local() for value in state.values()]  # type: ignore[attr-defined]


def contenders(kind: str, state: State) -> dict[str, Save]:
    """Everybody by name; ours first, the plain writes last. One model, as a training has."""
    model = Weights(state)
    ours = {"mp.save": mp.WriteOptions()}
    if kind == COLUMNS:
        ours["mp.save, mapped"] = mp.WriteOptions(inner_dim=mp.InnerDim.MAPPED)
    ours["mp.save, aggregated"] = mp.WriteOptions(aggregate_below=2**40)
    found: dict[str, Save] = {
        name: partial(milepost, model, options=options) for name, options in ours.items()
    }
    return {
        **found,
        "DCP, sync_files": dcp_native,
        "DCP Hugging Face writer, consolidated": dcp_consolidated,
        "gather + save_file": gathered,
        **{f"{PLAIN} {method}": partial(plain, method=method) for method in METHODS},
    }


def run_once(save: Save, state: State, place: Path) -> tuple[float, int]:
    """Seconds until the slowest rank is done, and bytes that all ranks sent to the disk."""
    if dist.get_rank() == 0:
        place.mkdir()
        settle()
    dist.barrier()
    before = _written_nbytes()
    start = time.perf_counter()
    save(state, place)
    dist.barrier()
    seconds = time.perf_counter() - start
    written = torch.tensor(_written_nbytes() - before)
    dist.all_reduce(written)
    if dist.get_rank() == 0:
        shutil.rmtree(place)
    return seconds, int(written)


def _written_nbytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))


def time_all(options: Options, kind: str, directory: Path) -> dict[str, Any]:
    """In a rank: seconds and bytes of every contender, in turns; round 0 is not counted."""
    state = sharded(options.nbytes, kind)
    everybody = list(contenders(kind, state).items())
    found: dict[str, Any] = {name: {"seconds": [], "written": 0} for name, _ in everybody}
    for number in range(options.rounds + 1):
        first = number % len(everybody)
        turned = [*everybody[first:], *everybody[:first]]
        for name, save in turned[::-1] if number % 2 else turned:
            seconds, written = run_once(save, state, directory / "output")
            if number:
                found[name]["seconds"].append(seconds)
                found[name]["written"] = written
        if dist.get_rank() == 0:
            progress(f"{kind}: round {number} of {options.rounds}")
    return found


def measure_memory(options: Options, kind: str, name: str, directory: Path) -> list[int]:
    """In a rank of a world of its own: the peak above the state of each rank, for one contender."""
    for size, nbytes in (("small", WARM_UP_NBYTES), ("big", options.nbytes)):
        state = sharded(nbytes, kind)
        save = contenders(kind, state)[name]
        place = directory / size
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        peak = peak_extra_nbytes(partial(save, state, place))
    return from_all_ranks(peak)


def results_of(found: dict[str, Any]) -> list[Result]:
    results = []
    for name, entry in found.items():
        group = PLAIN if name.startswith(PLAIN) else ""
        result = Result(name=name, group=group, synced="-", is_baseline=name == "DCP, sync_files")
        result.seconds = entry["seconds"]
        result.more["MiB written"] = round(entry["written"] / MIB)
        results.append(result)
    return results


def check_times(report: Report, kind: str, results: list[Result]) -> None:
    own = find(results, "mp.save")
    best_plain = min((r for r in results if r.group == PLAIN), key=lambda result: result.median)
    limits = {
        "DCP, sync_files": 1.5,
        "DCP Hugging Face writer, consolidated": 6.0,
        "gather + save_file": 6.0,
    }
    for name, limit in limits.items() if kind == ROWS else ():
        report.bar(
            f"{kind}: time of {name} / mp.save",
            found=find(results, name).median / own.median,
            limit=limit,
            higher_is_better=True,
        )
    if kind == ROWS:
        report.bar(
            f"{kind}: rate of mp.save / {best_plain.name}",
            found=best_plain.median / own.median,
            limit=0.8,
            higher_is_better=True,
        )


def main() -> int:
    options = parse_options(__doc__ or "", nbytes="1536MiB")
    report = Report(title=f"save, {RANKS} ranks", options=options)
    for kind in STATES:
        with work_directory(options) as directory:
            found = in_world(RANKS, time_all, options, kind, directory, directory=directory)
        results = results_of(found)
        for result in results if options.memory else ():
            progress(f"{kind}: peak memory of {result.name}")
            with work_directory(options) as directory:
                arguments = (options, kind, result.name, directory)
                peaks = in_world(RANKS, measure_memory, *arguments, directory=directory)
            result.more["extra MiB"] = round(max(peaks) / MIB, 1)
        report.times(f"{kind}, durable", results, nbytes=options.nbytes)
        check_times(report, kind, results)
        if options.memory:
            report.bar(
                f"{kind}: memory of mp.save above the state, MiB",
                found=find(results, "mp.save").more["extra MiB"],
                limit=64,
                higher_is_better=False,
            )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
