"""Milepost's write engine, each mode, with and without digests, against plain durable writes.

Shows the choice behind `WriteMode.AUTO` and what digests cost. The bar: with digests, at least 0.9
of the rate of the fastest plain single-pass durable write of the same bytes in the same run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from _common import Contender, Report, parse_options, run_rounds, work_directory
from _plain import METHODS, write_plain
from _state import llm_tensors, nbytes_of
from milepost.engine import write as engine
from milepost.engine.source import BytesSource, TensorSource
from milepost.engine.write import FileWrite, Piece, WriteMode, WriteOptions, write_files
from milepost.plan.parts import plan_parts
from milepost.storage.fileops import sync_directory

THREADS = (1, 2, 4)
PLAIN_SYNCED = "file, directory"


class _NoDigest:
    """In place of XXH3-128, to see what the engine takes without it."""

    def update(self, data: Any) -> None:
        pass

    def digest(self) -> bytes:
        return bytes(16)


@contextmanager
def without_digests() -> Iterator[None]:
    real = engine.xxhash
    engine.xxhash = SimpleNamespace(xxh3_128=_NoDigest)
    try:
        yield
    finally:
        engine.xxhash = real


def engine_write(
    tensors: dict[str, torch.Tensor], place: Path, *, mode: WriteMode, threads: int
) -> None:
    """One safetensors file of them, durable."""
    items = [(name, "BF16", tuple(tensor.shape)) for name, tensor in tensors.items()]
    (part,) = plan_parts(items, stem="model", max_part_nbytes=2**62).parts
    pieces = [Piece(start=0, source=BytesSource(part.header))]
    for name in part.tensors:
        pieces.append(Piece(start=part.offset(name), source=TensorSource(tensors[name])))
    write = FileWrite(path=place / part.name, pieces=tuple(pieces))
    write_files([write], WriteOptions(mode=mode, threads=threads))
    sync_directory(place)


def engine_write_without_digests(
    tensors: dict[str, torch.Tensor], place: Path, *, mode: WriteMode, threads: int
) -> None:
    with without_digests():
        engine_write(tensors, place, mode=mode, threads=threads)


def contenders(tensors: dict[str, torch.Tensor]) -> list[Contender]:
    found = []
    in_order = list(tensors.values())
    for method in METHODS:
        for threads in THREADS:
            run = partial(_plain, in_order, method=method, threads=threads)
            name = f"plain {method}, {threads} thread{'s' * (threads > 1)}"
            found.append(Contender(name=name, run=run, group="plain", synced=PLAIN_SYNCED))
    for mode in (WriteMode.BUFFERED, WriteMode.DIRECT):
        for threads in THREADS[:2]:
            for digests, call in (
                ("digests", engine_write),
                ("none", engine_write_without_digests),
            ):
                run = partial(call, tensors, mode=mode, threads=threads)
                name = f"milepost {mode.value}, {threads} thread{'s' * (threads > 1)}, {digests}"
                found.append(Contender(name=name, run=run, group="engine", synced=PLAIN_SYNCED))
    return found


def _plain(tensors: list[torch.Tensor], place: Path, *, method: str, threads: int) -> None:
    write_plain(tensors, place / "plain", method=method, threads=threads)


def main() -> int:
    options = parse_options(__doc__ or "")
    report = Report(title="write modes", options=options)
    tensors = llm_tensors(options.nbytes)
    nbytes = nbytes_of(tensors)
    with work_directory(options) as directory:
        results = run_rounds(contenders(tensors), directory, rounds=options.rounds)
    plain = [each for each in results if each.group == "plain"]
    fastest = min(plain, key=lambda each: each.median)
    for each in results:
        each.more["rate / fastest plain"] = round(fastest.median / each.median, 2)
    report.times(f"durable write of {nbytes / 2**30:.2f} GiB", results, nbytes=nbytes)
    own = [each for each in results if each.name.endswith(", digests")]
    best = min(own, key=lambda each: each.median)
    auto = next(each for each in own if each.name.startswith("milepost buffered, 2"))
    print(f"\nfastest plain: {fastest.name}; fastest of ours: {best.name}; auto is: {auto.name}")
    report.bar(
        "rate of the engine as it is by default / fastest plain",
        found=fastest.median / auto.median,
        limit=0.9,
        higher_is_better=True,
    )
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
