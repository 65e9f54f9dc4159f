"""How much saves hold up training: blocked time, steps while a save is written, extra memory.

A training loop (linear layers, AdamW, fp32) with 1 and with 4 gloo ranks (FSDP2), on CPU. Each
contender saves once in a round, and steps go on until its checkpoint is durable. `blocked` is the
call itself, and what the first step took longer than a step without a save: with
`Overlap.UNTIL_STEP` the step waits for the copies.

First of all the calls alone, with a state that stands still (`_staging.py`): how long a save holds
training, against plain copies of the same bytes into warm memory and DCP's stagers; and a LoRA run,
whose frozen weights are linked.

Threads or a process: two contenders copy the state into the same shared memory and write it by the
engine's own writer, once in a thread, once in a process, both of low priority (nice 10) and with
the rests that `mp.save_async` takes. They differ in nothing else, so what they do to the steps
decides. Hashing, copying and writing do not hold the interpreter lock, so a thread competes for the
same cores as a process does and no more; a process needs its copies in shared memory, a start of
its own and a way to fail of its own. What it would spare training is what does hold the lock: the
plan, the manifest and messages, some milliseconds. The bar at the end says whether that is so.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import milepost as mp
from _common import (
    GIB,
    MIB,
    Options,
    Report,
    answer,
    child,
    parse_options,
    peak_extra_nbytes,
    progress,
    settle,
    work_directory,
)
from _staging import bars_of_calls, calls_of_all, linked_saves
from _worlds import in_world
from milepost.checkpointing.pace import Pace
from milepost.engine.source import TensorSource
from milepost.engine.write import FileWrite, Piece, WriteOptions, write_files
from milepost.state.placements import local_part

LAYERS = 8
BATCH = 16
LEAST_STEPS = 12
MOST_STEPS = 2000
NICE = 10
CALLS_NBYTES = 4
"""The calls alone are timed on so many times `--nbytes`: 2 GiB by default."""

Save = Callable[[Path], "Pending"]


class Pending:
    """A save that may still be under way."""

    def __init__(self, done: Callable[[], bool], wait: Callable[[], object]) -> None:
        self.done, self.wait = done, wait


def nothing(place: Path) -> Pending:
    return Pending(lambda: True, lambda: None)


class Loop:
    """The training: a third of `nbytes` are weights, the rest moments."""

    def __init__(self, nbytes: int) -> None:
        torch.manual_seed(0)
        width = max(16, int((nbytes / 3 / 4 / LAYERS) ** 0.5) // 16 * 16)
        self.model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        self.inputs = torch.randn(BATCH, width)
        if dist.get_world_size() > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.step()

    def step(self) -> float:
        """Seconds of one step."""
        start = time.perf_counter()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """What this rank holds."""
        found = [local_part(p.detach())[1] for p in self.model.parameters()]
        for slots in self.optimizer.state.values():
            found += [local_part(value)[1] for value in slots.values()]
        return found


# ---------------------------------------------------------------------------------- contenders


class SharedWriter:
    """Copies into shared memory; a thread or a process, in the way of a save behind training,
    writes one file of it."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self._pace = Pace()
        self._pace.ease(WriteOptions().threads * dist.get_world_size())
        self.copies = [torch.empty_like(tensor).share_memory_() for tensor in tensors]
        self._copy()
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs,), daemon=True)
        self._process.start()

    def _copy(self) -> None:
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            copy.copy_(tensor)

    def _serve(self, pipe: Any) -> None:
        while (place := pipe.recv()) is not None:
            self._write(place)
            pipe.send("written")

    def _write(self, place: Path) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # and threads it starts
        pieces, start = [], 0
        for copy in self.copies:
            pieces.append(Piece(start=start, source=TensorSource(copy)))
            start = pieces[-1].end
        path = place / f"rank-{dist.get_rank() if dist.is_initialized() else 0}"
        write_files([FileWrite(path=path, pieces=tuple(pieces))], self._pace.paced(WriteOptions()))

    def by_process(self, place: Path) -> Pending:
        self._copy()
        self._ours.send(place)
        return Pending(self._ours.poll, self._ours.recv)

    def by_thread(self, place: Path) -> Pending:
        self._copy()
        thread = threading.Thread(target=self._write, args=(place,))
        thread.start()
        return Pending(lambda: not thread.is_alive(), thread.join)

    def close(self) -> None:
        self._ours.send(None)
        self._process.join()


def milepost(loop: Loop, overlap: mp.Overlap | None, place: Path) -> Pending:
    path = place / "checkpoint-1"
    if overlap is None:
        mp.save(path, loop.state(), step=1)
        return nothing(place)
    handle = mp.save_async(path, loop.state(), step=1, overlap=overlap)
    return Pending(handle.done, handle.wait)


def torch_dcp(loop: Loop, kind: AsyncCheckpointerType, group: Any, place: Path) -> Pending:
    """In a group of its own: DCP runs collectives behind training."""
    weights, moments = get_state_dict(loop.model, loop.optimizer)
    future: Any = dcp.async_save(
        {"model": weights, "optimizer": moments},
        checkpoint_id=place / "dcp",
        process_group=group,
        async_checkpointer_type=kind,
    )
    future = getattr(future, "upload_completion", future)
    return Pending(future.done, future.result)


def contenders(loop: Loop, writer: SharedWriter) -> dict[str, Save]:
    thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    return {
        "no save": nothing,
        "mp.save": partial(milepost, loop, None),
        "mp.save_async": partial(milepost, loop, mp.Overlap.NONE),
        "mp.save_async, until step": partial(milepost, loop, mp.Overlap.UNTIL_STEP),
        "plain copy, writer thread": writer.by_thread,
        "plain copy, writer process": writer.by_process,
        "dcp.async_save, thread": partial(torch_dcp, loop, thread, groups[0]),
        "dcp.async_save, process": partial(torch_dcp, loop, process, groups[1]),
    }


# ---------------------------------------------------------------------------------- measuring


def measured(loop: Loop, save: Save, place: Path) -> dict[str, Any]:
    """One save and the steps until it is durable, on all ranks alike."""
    for _ in range(2):
        loop.step()
    start = time.perf_counter()
    pending = save(place)
    call_s = time.perf_counter() - start
    steps: list[float] = []
    count_during = 0
    while len(steps) < MOST_STEPS:
        is_busy = torch.tensor(int(not pending.done()))
        dist.all_reduce(is_busy)
        if not is_busy and len(steps) >= LEAST_STEPS:
            break
        steps.append(loop.step())
        count_during += int(is_busy > 0)
    pending.wait()
    during = steps[:count_during] or steps
    durable_s = call_s + sum(steps[:count_during])
    return {"call_s": call_s, "steps": during, "until_durable_s": durable_s}


def rounds_of_all(nbytes: int, rounds: int, directory: str) -> dict[str, Any]:
    """What every contender took in each round, at this rank."""
    loop = Loop(nbytes)
    writer = SharedWriter(loop.tensors())
    ways = contenders(loop, writer)
    found: dict[str, Any] = {name: [] for name in ways}
    place = Path(directory) / "output"
    for number in range(rounds + 1):
        names = list(ways)
        names = [*names[number % len(names) :], *names[: number % len(names)]]
        for name in names[::-1] if number % 2 else names:
            if dist.get_rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                settle()
            dist.barrier()
            taken = measured(loop, ways[name], place)
            if number:
                found[name].append(taken)
        if dist.get_rank() == 0:
            progress(f"round {number} of {rounds}" + ("" if number else " (not counted)"))
    writer.close()
    shutil.rmtree(place, ignore_errors=True)
    found["nbytes"] = sum(t.numel() * t.element_size() for t in loop.tensors())
    return found


def calls_of_one_rank(nbytes: int, rounds: int, directory: str) -> dict[str, list[float]]:
    return calls_of_all(Loop(nbytes), rounds, Path(directory))


def memory_of_one(name: str, nbytes: int, directory: str) -> int:
    """Peak of resident memory of this process above the training, bytes; the first save of a size.

    A small one has been made before. What another process takes is not in it.
    """
    small, loop = Loop(3 * MIB), Loop(nbytes)
    writer = SharedWriter(small.tensors())
    for each in (small, loop):
        place = Path(directory) / f"output-{each is loop}"
        place.mkdir()
        save = contenders(each, writer)[name]
        if each is small:
            save(place).wait()
    nbytes_above = peak_extra_nbytes(lambda: save(place).wait())
    writer.close()
    return nbytes_above


# ------------------------------------------------------------------------------------ report


def table(found: dict[str, Any]) -> list[dict[str, Any]]:
    alone = [second for taken in found["no save"] for second in taken["steps"]]
    calm = statistics.median(alone)
    rows = []
    for name, rounds in found.items():
        if name == "nbytes":
            continue
        steps = [second for taken in rounds for second in taken["steps"]]
        excess = [max(0.0, taken["steps"][0] - calm) for taken in rounds]
        blocked = [taken["call_s"] + more for taken, more in zip(rounds, excess, strict=True)]
        is_behind = name not in ("no save", "mp.save")
        rows.append(
            {
                "contender": name,
                "call s": round(statistics.median(taken["call_s"] for taken in rounds), 4),
                "blocked s": round(statistics.median(blocked), 4) if name != "no save" else 0.0,
                "step s": round(statistics.median(steps), 4),
                "steps/s / no save": round(calm * len(steps) / sum(steps), 2) if is_behind else "",
                "p99 step s": round(sorted(steps)[ceil(0.99 * len(steps)) - 1], 4),
                "durable after s": round(
                    statistics.median(taken["until_durable_s"] for taken in rounds), 3
                ),
                "seconds": blocked,
            }
        )
    return rows


def main() -> int:
    options = parse_options(__doc__ or "", nbytes="512MiB", rounds=5)
    if options.child:
        with work_directory(options) as directory:
            task = (memory_of_one, options.child, options.nbytes, str(directory))
            answer(in_world(1, *task, directory=directory))
        return 0
    report = Report(title="What saves do to training", options=options)
    with work_directory(options) as directory:
        arguments = (CALLS_NBYTES * options.nbytes, options.rounds, str(directory))
        bars_of_calls(report, in_world(1, calls_of_one_rank, *arguments, directory=directory))
        linked_saves(report, options.nbytes, options.rounds, directory)
    for ranks in (1, 4):
        with work_directory(options) as directory:
            arguments = (options.nbytes, options.rounds, str(directory))
            found = in_world(ranks, rounds_of_all, *arguments, directory=directory)
        report.rows(f"{ranks} ranks, {found['nbytes'] / GIB:.2f} GiB a rank", table(found))
        rows = {row["contender"]: row for row in report.tables[next(reversed(report.tables))]}
        report.bar(
            f"{ranks} ranks: steps/s while mp.save_async is written, of those without a save",
            found=rows["mp.save_async"]["steps/s / no save"],
            limit=0.9,
            higher_is_better=True,
        )
        thread, process = (
            rows[f"plain copy, writer {kind}"]["steps/s / no save"]
            for kind in ("thread", "process")
        )
        report.bar(
            f"{ranks} ranks: steps/s beside a thread that writes, of those beside a process",
            found=thread / process,
            limit=0.95,
            higher_is_better=True,
        )
    if options.memory:
        _memory(report, options)
    return report.finish()


def _memory(report: Report, options: Options) -> None:
    rows = next(iter(report.tables.values()))
    names = [row["contender"] for row in rows if row["contender"].startswith(("mp.", "dcp."))]
    peaks = [(name, child(options, name) / MIB) for name in names]
    report.rows(
        "peak of resident memory of the training process above the training, 1 rank",
        [{"contender": name, "MiB": round(peak, 1)} for name, peak in peaks],
    )


if __name__ == "__main__":
    sys.exit(main())
