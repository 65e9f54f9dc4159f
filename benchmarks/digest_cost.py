"""What digests cost: the rate of XXH3-128, writing and loading with and without it, `verify`.

Other digests are hashed in the same pieces to show why XXH3-128 was taken. `verify` is compared
with reading the same files and doing nothing with the bytes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import xxhash

import milepost as mp
from _common import (
    Contender,
    Report,
    can_drop_caches,
    parse_options,
    run_rounds,
    work_directory,
)
from _state import llama, nbytes_of
from milepost.engine.source import memory_of
from write_modes import engine_write, engine_write_without_digests

KIB = 1024
PIECES = (64 * KIB, 256 * KIB, 1024 * KIB, 16 * 1024 * KIB)
ENGINE_PIECE = 256 * KIB
RUN_NBYTES = 16 * 2**20
CORES = os.cpu_count() or 1


def hash_all(views: list[memoryview], place: Path, *, new: Any, piece: int, threads: int) -> None:
    """Hash every tensor in pieces, tensors in parallel."""

    def one(view: memoryview) -> None:
        hasher = new()
        for begin in range(0, view.nbytes, piece):
            hasher.update(view[begin : begin + piece])
        hasher.digest()

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(one, views):
            pass


class _Crc32:
    def __init__(self) -> None:
        self.value = 0

    def update(self, view: memoryview) -> None:
        self.value = zlib.crc32(view, self.value)

    def digest(self) -> bytes:
        return self.value.to_bytes(4, "big")


def hash_contenders(views: list[memoryview]) -> list[Contender]:
    found = []
    for piece in PIECES:
        run = partial(hash_all, views, new=xxhash.xxh3_128, piece=piece, threads=1)
        name = f"XXH3-128, pieces of {piece // KIB} KiB"
        found.append(Contender(name=name, run=run, is_baseline=piece == ENGINE_PIECE))
    run = partial(hash_all, views, new=xxhash.xxh3_128, piece=ENGINE_PIECE, threads=CORES)
    found.append(Contender(name=f"XXH3-128, 256 KiB, {CORES} threads", run=run))
    others = {"CRC-32 (zlib)": _Crc32, "SHA-256": hashlib.sha256, "BLAKE2b": hashlib.blake2b}
    for name, new in others.items():
        run = partial(hash_all, views, new=new, piece=ENGINE_PIECE, threads=1)
        found.append(Contender(name=name, run=run))
    return found


def engine_contenders(tensors: dict[str, Any]) -> list[Contender]:
    found = []
    for name, call in (("with", engine_write), ("without", engine_write_without_digests)):
        run = partial(call, tensors, mode=mp.WriteMode.AUTO, threads=CORES)
        found.append(
            Contender(name=f"durable write {name} digests", run=run, is_baseline=name == "without")
        )
    return found


def read_files(paths: list[Path], place: Path, *, threads: int) -> None:
    """Read every byte as `verify` does, in pieces of 1 MiB and runs of a tensor's size; drop it."""
    ranges = [
        (path, start, min(start + RUN_NBYTES, path.stat().st_size))
        for path in paths
        for start in range(0, path.stat().st_size, RUN_NBYTES)
    ]

    def one(job: tuple[Path, int, int]) -> None:
        path, start, end = job
        buffer = bytearray(2**20)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            while start < end:
                view = memoryview(buffer)[: min(len(buffer), end - start)]
                start += os.preadv(descriptor, [view], start)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(one, ranges):
            pass


def verify(path: Path, place: Path, *, threads: int) -> None:
    report = mp.Checkpoint.open(path).verify(threads=threads)
    assert report.ok, report.problems


def verify_contenders(path: Path) -> list[Contender]:
    files = [each for each in path.rglob("*") if each.is_file()]
    found = []
    for threads in sorted({1, CORES}):
        count = f"{threads} thread{'s' * (threads > 1)}"
        reading = partial(read_files, files, threads=threads)
        found.append(
            Contender(name=f"read only, {count}", run=reading, group=count, is_baseline=True)
        )
        run = partial(verify, path, threads=threads)
        found.append(Contender(name=f"verify, {count}", run=run, group=count))
    return found


def load(model: Any, path: Path, place: Path, *, check: mp.Verify) -> None:
    mp.load(path, {"model": model}, verify=check, rng=mp.RngRestore.LATER)


def load_contenders(model: Any, path: Path) -> list[Contender]:
    return [
        Contender(
            name=f"mp.load, verify={check.value}",
            run=partial(load, model, path, check=check),
            is_baseline=check is mp.Verify.SIZES,
        )
        for check in mp.Verify
    ]


def main() -> int:
    options = parse_options(__doc__ or "")
    report = Report(title="digest cost", options=options)
    model = llama(options.nbytes)
    tensors = model.state_dict()
    nbytes = nbytes_of(tensors)
    views = [memory_of(tensor.detach()) for tensor in tensors.values()]
    with work_directory(options) as directory:
        hashed = run_rounds(hash_contenders(views), directory, rounds=options.rounds)
        report.times("hashing from memory", hashed, nbytes=nbytes)
        written = run_rounds(engine_contenders(tensors), directory, rounds=options.rounds)
        report.times("writing", written, nbytes=nbytes)
        path = directory / "checkpoint-1"
        mp.save(path, {"model": model}, step=1)
        loaded = run_rounds(load_contenders(model, path), directory, rounds=options.rounds)
        report.times("loading, warm", loaded, nbytes=nbytes)
        plain, _, checked = (median(result.seconds) for result in loaded)
        report.bar(
            "verifying while loading on a warm cache, of loading without",
            found=checked / plain,
            limit=1.2,
            higher_is_better=False,
        )
        del model, tensors, views
        for state in ("warm", "cold"):
            if state == "cold" and not can_drop_caches():
                continue
            found = run_rounds(
                verify_contenders(path), directory, rounds=options.rounds, cold=state == "cold"
            )
            report.times(f"verifying, {state}", found, nbytes=nbytes)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
