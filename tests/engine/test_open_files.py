"""Checkpoints of more files than a process may open are saved and loaded like any other."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import milepost as mp
from milepost.engine import exchange_write, open_files, read_shared
from milepost.engine.write import InnerDim
from tests.worlds import run_world

COUNT, SPARE = 60, 40
NBYTES = 8 * 8 * 4


@contextmanager
def few_descriptors() -> Iterator[None]:
    """This process may open `SPARE` more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with pytest.MonkeyPatch.context() as patched:
            for module in (exchange_write, open_files, read_shared):
                patched.setattr(module, "MAX_OPEN_FILES", SPARE // 2)
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"w{n:02}": torch.randn(8, 8, generator=generator) for n in range(COUNT)}


def model_of(values: dict[str, torch.Tensor]) -> nn.Module:
    model = nn.Module()
    for name, value in values.items():
        model.register_buffer(name, value)
    return model


def test_one_process_writes_and_reads_them(tmp_path: Path) -> None:
    model, path = model_of(tensors()), tmp_path / "checkpoint-1"
    with few_descriptors():
        mp.save(path, {"model": model}, step=1, max_shard_size=NBYTES)
        other = model_of({name: torch.zeros(8, 8) for name in tensors()})
        mp.load(path, {"model": other})
    assert len(list(path.glob("*.safetensors"))) == COUNT
    assert all(torch.equal(found, tensors()[name]) for name, found in other.named_buffers())
    assert mp.Checkpoint.open(path).verify().ok


def on_ranks(rank: int, world_size: int, run: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    held = {n: distribute_tensor(value, mesh, [Shard(1)]) for n, value in tensors().items()}
    model, wrong = model_of(dict(held)), []

    def save(step: int, way: InnerDim) -> Path:
        path, options = run / f"checkpoint-{step}", mp.WriteOptions(inner_dim=way)
        mp.save(path, {"model": model}, step=step, max_shard_size=NBYTES, options=options)
        return path

    save(1, InnerDim.EXCHANGE)  # connects the ranks
    with few_descriptors():
        for step, way in enumerate(InnerDim, 2):
            path = save(step, way)
            for mode in mp.ReadMode:
                other = model_of({name: torch.zeros_like(value) for name, value in held.items()})
                mp.load(path, {"model": other}, options=mp.ReadOptions(mode=mode))
                for name, found in other.named_buffers():
                    assert isinstance(found, DTensor)
                    if not torch.equal(found.to_local(), held[name].to_local()):
                        wrong.append(f"{way} {mode} {name}")
    return wrong


def test_ranks_that_exchange_columns_write_and_read_them(tmp_path: Path) -> None:
    assert run_world(2, on_ranks, tmp_path) == [[], []]
    for entry in mp.list_run(tmp_path).committed:
        checkpoint = mp.Checkpoint.open(entry.path)
        assert len(list(entry.path.glob("*.safetensors"))) == COUNT
        assert checkpoint.verify().ok
