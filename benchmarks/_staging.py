"""How long one rank is held by the start of an asynchronous save, against plain copies and DCP.

Only the call is timed, on a state that does not change; each save ends before the next begins. What
is kept between saves (buffers, stagers) is warm: the first round is not counted.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.staging import (
    BlockingAsyncStager,
    DefaultStager,
    StagingOptions,
)
from torch.distributed.checkpoint.state_dict import get_state_dict

import milepost as mp
from _common import MIB, progress, settle

PIECE_NBYTES = 16 * MIB
ADAPTER_RANK = 8

Call = Callable[[Path], Callable[[], object]]
"""Starts a save at a place and returns what waits for its end."""


def nothing() -> None:
    return None


class PlainCopy:
    """The bytes of tensors copied into memory that has been touched before."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in tensors]
        self.copies = [torch.zeros_like(tensor) for tensor in self.tensors]
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)

    def by_threads(self, place: Path) -> Callable[[], object]:
        pieces = [
            (copy.data_ptr() + start, tensor.data_ptr() + start, min(PIECE_NBYTES, nbytes - start))
            for tensor, copy in zip(self.tensors, self.copies, strict=True)
            for nbytes in [tensor.numel() * tensor.element_size()]
            for start in range(0, nbytes, PIECE_NBYTES)
        ]
        for future in [self._pool.submit(ctypes.memmove, *piece) for piece in pieces]:
            future.result()
        return nothing

    def by_torch(self, place: Path) -> Callable[[], object]:
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            copy.copy_(tensor)
        return nothing


def _stager(*, use_shared_memory: bool = False) -> DefaultStager:
    """As it can be without CUDA."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=use_shared_memory,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )


def contenders(loop: Any) -> dict[str, Call]:
    """`loop` has a model and an optimizer that has stepped."""
    plain = PlainCopy(loop.tensors())
    stagers = {
        "dcp stage, a new DefaultStager (async_save's own)": None,
        "dcp stage, a kept DefaultStager": _stager(),
        "dcp stage, kept, shared memory": _stager(use_shared_memory=True),
        "dcp stage, BlockingAsyncStager": BlockingAsyncStager(),  # its cache needs CUDA
    }

    def save(overlap: mp.Overlap) -> Call:
        def call(place: Path) -> Callable[[], object]:
            path = place / "checkpoint-1"
            return mp.save_async(path, loop.state(), step=1, overlap=overlap).wait

        return call

    def stage(stager: Any) -> Call:
        def call(place: Path) -> Callable[[], object]:
            weights, moments = get_state_dict(loop.model, loop.optimizer)
            own = stager or _stager()
            own.stage({"model": weights, "optimizer": moments})
            return nothing

        return call

    return {
        "plain memcpy, all cores": plain.by_threads,
        "plain memcpy, torch": plain.by_torch,
        "mp.save_async": save(mp.Overlap.NONE),
        "mp.save_async, until step": save(mp.Overlap.UNTIL_STEP),
        **{name: stage(stager) for name, stager in stagers.items()},
    }


def calls_of_all(loop: Any, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Seconds of each call, round by round; contenders take turns."""
    ways = contenders(loop)
    found: dict[str, list[float]] = {name: [] for name in ways}
    place = directory / "staged"
    for number in range(rounds + 1):
        names = [*list(ways)[number % len(ways) :], *list(ways)[: number % len(ways)]]
        for name in names[::-1] if number % 2 else names:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            settle()
            start = time.perf_counter()
            wait = ways[name](place)
            seconds = time.perf_counter() - start
            wait()
            if number:
                found[name].append(seconds)
        progress(f"calls, round {number} of {rounds}" + ("" if number else " (not counted)"))
    shutil.rmtree(place, ignore_errors=True)
    return found


def bars_of_calls(report: Any, found: dict[str, list[float]]) -> None:
    """The table, and how long a save holds training, against the best of the others."""
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    plain = min(medians[name] for name in medians if name.startswith("plain"))
    best = min((medians[name], name) for name in medians if name.startswith("dcp"))
    rows = [
        {"contender": name, "call s": round(seconds, 4), "/ memcpy": round(seconds / plain, 2)}
        for name, seconds in medians.items()
    ]
    report.rows("1 rank: until the state may change", rows)
    held = medians["mp.save_async"]
    bars = [
        ("until the state may change, of a plain memcpy into warm buffers", held / plain, 1.15),
        (f"until the state may change, of {best[1]}", held / best[0], 1.0),
        (
            "seconds until training may compute again, Overlap.UNTIL_STEP",
            medians["mp.save_async, until step"],
            0.020,
        ),
    ]
    for text, value, limit in bars:
        report.bar(text, found=value, limit=limit, higher_is_better=False)


class Adapted(nn.Module):
    """Frozen square layers, each with an adapter of two thin matrices."""

    def __init__(self, nbytes: int, layers: int = 8) -> None:
        super().__init__()
        width = max(64, int((nbytes / 4 / layers) ** 0.5) // 16 * 16)
        self.base = nn.ParameterList(
            nn.Parameter(torch.randn(width, width), requires_grad=False) for _ in range(layers)
        )
        self.down = nn.ParameterList(torch.randn(ADAPTER_RANK, width) for _ in range(layers))
        self.up = nn.ParameterList(torch.zeros(width, ADAPTER_RANK) for _ in range(layers))


def linked_saves(report: Any, nbytes: int, rounds: int, directory: Path) -> None:
    """A LoRA run: what a later save copies, writes, and how long it holds training."""
    model = Adapted(nbytes)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    rows, ratios = [], {}
    for unchanged in (mp.Unchanged.WRITE, mp.Unchanged.LINK_VERIFIED, mp.Unchanged.LINK):
        for overlap in mp.Overlap:
            run = directory / f"lora-{unchanged.value}-{overlap.value}"
            held, behind, saved = _saves(run, model, optimizer, rounds, unchanged, overlap)
            shutil.rmtree(run)
            moved = saved.phase_nbytes
            rows.append(
                {
                    "unchanged": unchanged.value,
                    "overlap": overlap.value,
                    "held s": round(statistics.median(held), 4),
                    "durable after s": round(statistics.median(behind), 3),
                    "MiB copied": round(moved["snapshot"] / MIB, 1),
                    "MiB written": round(moved["write"] / MIB, 1),
                    "MiB in all": round(saved.nbytes / MIB, 1),
                }
            )
            ratios[unchanged] = moved["write"] / saved.nbytes, moved["snapshot"] / saved.nbytes
    report.rows("1 rank, frozen base and adapters", rows)
    written, copied = ratios[mp.Unchanged.LINK_VERIFIED]
    for text, found in (("written", written), ("copied", copied)):
        report.bar(
            f"bytes {text} by a linked save of a LoRA run, of the model",
            found=found,
            limit=0.02,
            higher_is_better=False,
        )


def _saves(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rounds: int,
    unchanged: mp.Unchanged,
    overlap: mp.Overlap,
) -> tuple[list[float], list[float], mp.SaveReport]:
    """Seconds that training was held, and until the checkpoint was durable; the last report."""
    held, behind = [], []
    state = {"model": model, "optimizer": optimizer}
    for step in range(rounds + 2):  # of these the first has nothing to link to
        settle()
        start = time.perf_counter()
        handle = mp.save_async(
            run / f"checkpoint-{step}", state, step=step, overlap=overlap, unchanged=unchanged
        )
        optimizer.step()
        saved = handle.wait()
        held.append(handle.held_s)
        behind.append(time.perf_counter() - start)
        if step:
            shutil.rmtree(run / f"checkpoint-{step - 1}")
    return held[2:], behind[2:], saved
