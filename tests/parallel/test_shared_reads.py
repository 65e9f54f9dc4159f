"""Loads by several ranks count what they read; with shared reads no byte is read twice."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import milepost as mp
from milepost.plan.read_groups import SMALL_NBYTES
from tests.worlds import run_world

SHAPES = {"wide": (96, 8192), "tall": (1025, 1024), "odd": (70, 3, 600), "bias": (50,), "one": ()}
SMALL = {"bias", "one"}


class Weights(nn.Module):
    """Tensors of several forms; two of them are small."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(value))


NBYTES = sum(p.numel() * 4 for p in Weights(0).parameters())
SMALL_BYTES = sum(p.numel() * 4 for n, p in Weights(0).named_parameters() if n in SMALL)


class Counter:
    def __init__(self) -> None:
        self.nbytes, self._guard = 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._guard:
            self.nbytes += nbytes


def placed(model: Weights, mesh: Any, placements: Sequence[Placement]) -> Weights:
    for name, param in list(model.named_parameters()):
        if param.ndim > 1:
            value = nn.Parameter(distribute_tensor(param.data, mesh, placements))
            model.register_parameter(name, value)
    return model


HOLDINGS: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "replicas": ((4,), (Replicate(),)),
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "rows, replicated": ((2, 2), (Replicate(), Shard(0))),
    "rows and columns": ((2, 2), (Shard(0), Shard(1))),
    "columns, replicated": ((2, 2), (Replicate(), Shard(1))),
}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def load_placed(rank: int, size: int, run: Path) -> dict[str, list[int]]:
    """Bytes read by this rank for each way to hold the model, directly and shared."""
    found = {}
    shapes: tuple[tuple[int, ...], ...] = ((4,), (2, 2))
    meshes = {shape: init_device_mesh("cpu", shape) for shape in shapes}
    for name, (mesh_shape, placements) in HOLDINGS.items():
        mesh = meshes[mesh_shape]
        expected = placed(Weights(0), mesh, placements)
        counts = []
        for mode in mp.ReadMode:
            for cast in (torch.float32, torch.float64):
                model = placed(Weights(1), mesh, placements).to(cast)
                counter = Counter()
                mp.load(
                    run / "checkpoint-1",
                    {"model": model},
                    dtype=mp.DtypePolicy.CAST,
                    options=mp.ReadOptions(mode=mode, on_bytes=counter.add),
                )
                for one, two in zip(expected.parameters(), model.parameters(), strict=True):
                    assert torch.equal(local(one).to(cast), local(two)), (name, mode, one.shape)
                counts.append(counter.nbytes)
        found[name] = counts
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    mp.save(tmp_path / "checkpoint-1", {"model": Weights(0)}, step=1)
    return tmp_path


@pytest.mark.case("V43")
def test_shared_reads_give_the_same_values_and_read_the_files_once(run: Path) -> None:
    results = run_world(4, load_placed, run)
    for name in HOLDINGS:
        direct, direct_cast, shared, shared_cast = (
            sum(each[name][n] for each in results) for n in range(4)
        )
        once = NBYTES + 3 * SMALL_BYTES  # small tensors are read by each
        assert (shared, shared_cast) == (once, once), name
        replicas = {"replicas": 4, "rows, replicated": 2, "columns, replicated": 2}.get(name, 1)
        needed = replicas * (NBYTES - SMALL_BYTES) + 4 * SMALL_BYTES
        for count in (direct, direct_cast):
            if "columns" in name:
                assert needed <= count <= 1.5 * needed, name
            else:
                assert count == needed, name
    assert SMALL_BYTES < SMALL_NBYTES


def load_failing(rank: int, size: int, run: Path) -> None:
    """Rank 1 cannot read its first block; whoever waits for it must not hang."""
    mesh = init_device_mesh("cpu", (size,))
    model = placed(Weights(1), mesh, [Replicate()])
    real, calls = os.preadv, 0

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal calls
        if threading.current_thread().name.startswith("milepost-read-ahead"):
            calls += 1
            if calls == 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    options = mp.ReadOptions(mode=mp.ReadMode.SHARED)
    if rank == 1:
        os.preadv = failing  # type: ignore[assignment]
    try:
        mp.load(run / "checkpoint-1", {"model": model}, options=options)
    except mp.errors.LoadTornError as error:
        assert "Input/output error" in str(error)
        assert rank == 1 or "rank 1" in str(error)
    else:
        raise AssertionError("the load should have failed")
    os.preadv = real
    mp.load(run / "checkpoint-1", {"model": model}, options=options)
    for one, two in zip(Weights(0).parameters(), model.parameters(), strict=True):
        assert torch.equal(one, local(two))


def test_a_rank_that_cannot_read_its_block_fails_all_and_the_next_load_works(run: Path) -> None:
    run_world(3, load_failing, run)


def load_in_different_modes(rank: int, size: int, run: Path) -> str:
    mode = mp.ReadMode.SHARED if rank else mp.ReadMode.DIRECT
    with pytest.raises(mp.errors.CheckpointError) as caught:
        mp.load(run / "checkpoint-1", {"model": Weights(1)}, options=mp.ReadOptions(mode=mode))
    return str(caught.value)


def test_ranks_that_read_in_different_modes_are_refused(run: Path) -> None:
    for message in run_world(2, load_in_different_modes, run):
        assert "the same read mode" in message


WIDTH = 1536


def trained(rank: int, size: int, columns: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    if columns:
        for layer in model:
            value = distribute_tensor(layer.get_parameter("weight").data, mesh, [Shard(1)])
            layer.register_parameter("weight", nn.Parameter(value))
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


def save_on_four(rank: int, size: int, run: Path) -> None:
    for columns in (False, True):
        model, optimizer = trained(rank, size, columns)
        state = {"model": model, "optimizer": optimizer}
        mp.save(run / f"{columns}/checkpoint-1", state, step=1)


def read_chars() -> int:
    with open("/proc/self/io", "rb", buffering=0) as file:
        return int(file.read(4096).split()[1])


def load_on_two(rank: int, size: int, run: Path) -> list[tuple[int, int, int]]:
    counts = []
    for columns in (False, True):
        model, optimizer = trained(rank, size, columns)
        state = {"model": model, "optimizer": optimizer}
        mp.load(run / f"{columns}/checkpoint-1", state)  # what a first load imports is read once
        counter = Counter()
        dist.barrier()
        before = read_chars()
        options = mp.ReadOptions(on_bytes=counter.add)
        mp.load(run / f"{columns}/checkpoint-1", state, options=options)
        kernel = read_chars() - before
        needed = 3 * sum(local(p).numel() * 4 for p in model.parameters())
        counts.append((needed, counter.nbytes, kernel))
    return counts


@pytest.mark.case("V43")
def test_a_resharding_load_reads_what_its_shards_need_moments_included(tmp_path: Path) -> None:
    run_world(4, save_on_four, tmp_path)
    for rows, columns in run_world(2, load_on_two, tmp_path):
        needed, counted, kernel = rows
        assert counted == needed
        assert kernel <= 1.05 * needed  # headers, manifest and trees included
        needed, counted, kernel = columns
        assert needed <= counted <= 1.5 * needed
        assert kernel <= 1.05 * counted
