"""Saves of real ranks in which bytes travel: every way gives the same files, in bounded memory."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import milepost as mp
from milepost.checkpointing import world as worlds
from milepost.engine.write import InnerDim
from milepost.state.tensors import same_bits
from milepost.storage import fileops
from tests.worlds import run_world

MIB = 2**20
SHAPES = {
    "rows": ((64, 33), 0),
    "uneven": ((7, 5), 0),
    "columns": ((40, 37), 1),
    "long_rows": ((3, 70_000), 1),
    "deep": ((4, 6, 10), 2),
    "middle": ((4, 9, 50), 1),
    "strided": ((64, 64), 1),
    "vector": ((1000,), 0),
    "odd_bytes": ((7, 3), 0),
    "whole": ((50, 50), None),
    "scalar": ((), None),
}


def values() -> dict[str, torch.Tensor]:
    """The whole tensors, the same everywhere; of several widths, one of single bytes."""
    generator = torch.Generator().manual_seed(7)
    found = {name: torch.randn(shape, generator=generator) for name, (shape, _) in SHAPES.items()}
    found["columns"] = found["columns"].to(torch.bfloat16)
    found["middle"] = found["middle"].to(torch.float64)
    found["odd_bytes"] = (found["odd_bytes"] * 10).to(torch.int8)
    return found


class Holder(torch.nn.Module):
    """The tensors of `values` as shards of this rank."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        for name, value in values().items():
            dim = SHAPES[name][1]
            self.register_buffer(name, value if dim is None else shard(value, mesh, dim))


def shard(value: torch.Tensor, mesh: Any, dim: int) -> DTensor:
    """This rank's piece, by `torch.chunk`; one of them is not dense in memory."""
    parts = torch.chunk(value, mesh.size(), dim)
    rank = dist.get_rank() % mesh.size()
    part = parts[rank] if rank < len(parts) else value.narrow(dim, 0, 0)
    if value.shape == SHAPES["strided"][0]:
        part = part.t().contiguous().t()
    return DTensor.from_local(
        part, mesh, [Shard(dim)], run_check=False, shape=value.shape, stride=value.stride()
    )


def save_each_way(rank: int, world_size: int, run: Path) -> list[int]:
    mesh = init_device_mesh("cpu", (world_size,))
    model = Holder(mesh)
    ways = {
        1: mp.WriteOptions(aggregate_below=1),
        2: mp.WriteOptions(aggregate_below=2**40),
        3: mp.WriteOptions(inner_dim=InnerDim.MAPPED),
        4: mp.WriteOptions(inner_dim=InnerDim.MAPPED, mode=mp.WriteMode.DIRECT),
        5: mp.WriteOptions(mode=mp.WriteMode.DIRECT, aggregate_below=1),
    }
    for step, options in ways.items():
        mp.save(run / f"checkpoint-{step}", {"model": model}, step=step, options=options)
    os.environ["MILEPOST_HOST_ID"] = f"host {rank // 2}"
    worlds._world().hosts = ()  # the ranks find out again on which hosts they are
    for step, options in ((6, ways[1]), (7, ways[2])):
        mp.save(run / f"checkpoint-{step}", {"model": model}, step=step, options=options)
    try:
        mp.save(run / "checkpoint-8", {"model": model}, step=8, options=ways[3])
    except mp.errors.InvalidInputError as error:
        assert "needs all ranks on one host" in str(error)
        return [*ways, 6, 7]
    raise AssertionError("a map was shared by two hosts")


@pytest.mark.case("V39")
def test_direct_aggregated_mapped_and_on_two_hosts_give_the_same_values(tmp_path: Path) -> None:
    (steps, *_) = run_world(4, save_each_way, tmp_path)
    expected = values()
    for step in steps:
        checkpoint = mp.Checkpoint.open(tmp_path / f"checkpoint-{step}")
        assert checkpoint.verify().problems == ()
        stored = checkpoint.read_weights()
        for name, value in expected.items():
            assert same_bits(stored[name], value), (step, name)


Writes = dict[str, list[tuple[str, int, int]]]


def noting(found: list[tuple[str, int, int]]) -> fileops.Hook:
    def hook(name: str, path: str, function: Callable[..., Any], arguments: Any) -> Any:
        result = function(*arguments)
        if name == "write":
            found.append((Path(path).name, arguments[2], arguments[2] + result))
        return result

    return hook


def count_writers(rank: int, world_size: int, run: Path) -> Writes:
    """Which bytes of which file this rank wrote, on four hosts of one rank each."""
    os.environ["MILEPOST_HOST_ID"] = f"host {rank}"
    found: Writes = {"direct": [], "aggregated": []}
    model = Holder(init_device_mesh("cpu", (world_size,)))
    for step, (way, below) in enumerate((("direct", 1), ("aggregated", 2**40)), start=1):

        def hook(
            name: str, path: str, function: Callable[..., Any], args: Any, at: str = way
        ) -> Any:
            result = function(*args)
            if name == "write":
                found[at].append((Path(path).name, args[2], args[2] + result))
            return result

        with fileops.hooked(hook):
            options = mp.WriteOptions(aggregate_below=below)
            mp.save(run / f"checkpoint-{step}", {"model": model}, step=step, options=options)
    return found


def test_no_page_of_a_file_is_written_by_two_hosts(tmp_path: Path) -> None:
    results = run_world(4, count_writers, tmp_path)
    for way, least in (("direct", 3), ("aggregated", 1)):
        pages: dict[tuple[str, int], int] = {}
        for rank, found in enumerate(results):
            for name, start, end in found[way]:
                for page in range(start // 4096, (end - 1) // 4096 + 1):
                    assert pages.setdefault((name, page), rank) == rank, (name, page)
        writers = {rank for (name, _), rank in pages.items() if name == "model.safetensors"}
        assert len(writers) >= least


def peak_extra_nbytes(run: Callable[[], object]) -> int:
    """How far the resident memory of this process rises while `run` runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5\n")
    before = _resident("VmRSS")
    run()
    return _resident("VmHWM") - before


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def first_save_of(rank: int, world_size: int, run: Path, way: str) -> int:
    """Peak memory of the first save of this process: 256 MiB in all, 64 MiB a rank."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = torch.nn.Module()
    dim = 0 if way == "rows" else 1
    for number in range(8):
        local = torch.full((1024, 4096), rank + number, dtype=torch.bfloat16)
        local = local.t().contiguous().t() if way == "not dense" else local
        whole = (4096, 4096) if dim == 0 else (1024, 4 * 4096)
        value = DTensor.from_local(
            local,
            mesh,
            [Shard(dim)],
            run_check=False,
            shape=torch.Size(whole),
            stride=(whole[1], 1),
        )
        model.register_buffer(f"b{number}", value)
    small = {"model": torch.nn.Linear(2, 2)}
    dist.broadcast(small["model"].weight.data, 0)
    dist.broadcast(small["model"].bias.data, 0)
    mp.save(run / "checkpoint-1", small, step=1)  # what is imported on demand is there afterwards
    return peak_extra_nbytes(lambda: mp.save(run / "checkpoint-2", {"model": model}, step=2))


@pytest.mark.parametrize("way", ["rows", "columns", "not dense"])
def test_a_save_needs_a_bounded_amount_of_memory_on_every_rank(way: str, tmp_path: Path) -> None:
    for extra in run_world(4, first_save_of, tmp_path, way):
        assert extra <= 64 * MIB


def fail_in_the_exchange(rank: int, world_size: int, run: Path, way: str) -> str:
    """The first write of rank 1 behind the exchange fails; the others still get their columns."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = torch.nn.Module()
    for number in range(4):
        local = torch.full((2048, 1024), float(rank))
        model.register_buffer(f"b{number}", DTensor.from_local(local, mesh, [Shard(1)]))
    options = mp.WriteOptions(inner_dim=InnerDim(way))
    failed = "map" if way == "mapped" else "write"

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if rank == 1 and name == failed and target.endswith("model.safetensors"):
            raise OSError(28, "No space left on device")
        return function(*arguments)

    message = "nothing"
    try:
        with fileops.hooked(hook):
            mp.save(run / "checkpoint-1", {"model": model}, step=1, options=options)
    except mp.errors.NoSpaceError as error:
        message = str(error)
    mp.save(run / "checkpoint-2", {"model": model}, step=2, options=options)
    return message


@pytest.mark.parametrize("way", ["exchange", "mapped"])
def test_a_rank_that_cannot_write_goes_on_answering_and_all_raise_its_error(
    way: str, tmp_path: Path
) -> None:
    for message in run_world(3, fail_in_the_exchange, tmp_path, way):
        assert "earlier checkpoints are untouched" in message
    listing = mp.list_run(tmp_path)
    assert [entry.step for entry in listing.committed] == [2]
    assert listing.unfinished == () and listing.torn == ()
    assert mp.Checkpoint.open(tmp_path / "checkpoint-2").verify().ok
