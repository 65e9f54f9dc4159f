"""Maps are written to only where a full disk has been found out before: a store cannot fail."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import milepost as mp
from milepost.engine.write import InnerDim
from milepost.errors import InvalidInputError
from milepost.storage import fileops
from tests.worlds import run_world


def save_mapped(rank: int, world_size: int, run: Path) -> list[Any]:
    """What is said where the file system cannot reserve, and the blocks behind each map else."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = torch.nn.Module()
    value = torch.arange(512 * 512, dtype=torch.float32).view(512, 512)
    model.register_buffer("columns", distribute_tensor(value, mesh, [Shard(1)]))
    options = mp.WriteOptions(inner_dim=InnerDim.MAPPED)
    maps: list[tuple[int, int]] = []
    cannot_reserve = True

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "reserve" and cannot_reserve:
            return False
        if name == "map":
            status = os.fstat(arguments[0])
            maps.append((status.st_size, status.st_blocks * 512))
        return function(*arguments)

    with fileops.hooked(hook):
        try:
            mp.save(run / "checkpoint-1", {"model": model}, step=1, options=options)
        except InvalidInputError as error:
            said = str(error)
        assert not maps and not mp.list_run(run).committed
        cannot_reserve = False
        mp.save(run / "checkpoint-2", {"model": model}, step=2, options=options)
    return [said, maps]


def test_a_file_system_that_cannot_reserve_gets_no_maps(tmp_path: Path) -> None:
    for said, maps in run_world(2, save_mapped, tmp_path):
        assert "inner_dim=InnerDim.MAPPED needs a file system that reserves space" in said
        assert "InnerDim.EXCHANGE" in said
        assert maps and all(behind >= nbytes > 2**20 for nbytes, behind in maps)
    (entry,) = mp.list_run(tmp_path).committed
    assert entry.step == 2 and mp.Checkpoint.open(entry.path).verify().ok
