"""Output that some ranks do not see, and nodes that each have a disk of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import milepost as mp
from milepost.checkpointing.copies import Copies
from milepost.state.tensors import same_bits
from milepost.storage import fileops
from tests.worlds import run_world


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(2000, 300, generator=generator),
        "columns": torch.randn(700, 500, generator=generator),
        "small": torch.randn(10, 3, generator=generator),
        "norm": torch.randn(11, generator=generator),
    }


def state(world_size: int) -> dict[str, Any]:
    """A model with shards of dim 0 and dim 1, a replica, and a value of each rank."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = torch.nn.Module()
    for name, value in values().items():
        if name == "norm":
            model.register_buffer(name, value)
            continue
        dim = 1 if name == "columns" else 0
        part = torch.chunk(value, world_size, dim)[mesh.get_rank()].contiguous()
        shard = DTensor.from_local(
            part, mesh, [Shard(dim)], run_check=False, shape=value.shape, stride=value.stride()
        )
        model.register_buffer(name, shard)
    return {"model": model, "mine": {"rank": mesh.get_rank()}}


def at_node(rank: int, node: int, base: Path) -> None:
    """Go where the directory `run` is that of a node."""
    os.environ["MILEPOST_HOST_ID"] = f"node {node}"
    place = base / f"node{node}"
    (place / "run").mkdir(parents=True, exist_ok=True)
    os.chdir(place)


def check(path: Path) -> None:
    checkpoint = mp.Checkpoint.open(path)
    assert checkpoint.verify().problems == ()
    stored = checkpoint.read_weights()
    for name, value in values().items():
        assert same_bits(stored[name], value), name


def save_on_some(rank: int, world_size: int, base: Path, nodes: list[int]) -> list[str]:
    at_node(rank, nodes[rank], base)
    written: list[str] = []

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name in ("open", "write", "mkdir"):
            written.append(target)
        return function(*arguments)

    with fileops.hooked(hook):
        for step, below in ((1, 1), (2, 2**40)):
            options = mp.WriteOptions(aggregate_below=below)
            mp.save(f"run/checkpoint-{step}", state(world_size), step=step, options=options)
    return written


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 1, 2], [0, 1, 0, 1]], ids=str)
def test_ranks_that_do_not_see_the_output_send_what_they_hold(
    nodes: list[int], tmp_path: Path
) -> None:
    results = run_world(4, save_on_some, tmp_path, nodes)
    for rank, written in enumerate(results):
        assert bool(written) == (nodes[rank] == 0), (rank, written[:3])
    for step in (1, 2):
        check(tmp_path / "node0/run" / f"checkpoint-{step}")
    for node in set(nodes) - {0}:
        assert not list((tmp_path / f"node{node}/run").iterdir())
    assert not list((tmp_path / "node0/run").glob(".milepost-staging*"))


def save_per_node(rank: int, world_size: int, base: Path) -> list[str]:
    node = rank // 2
    os.environ["MILEPOST_HOST_ID"] = f"node {node}"
    run = base / f"node{node}" / "run"
    saved = state(world_size)
    mp.save(run / "checkpoint-1", saved, step=1, copies=Copies.PER_NODE)
    mp.save(
        run / "checkpoint-1",
        saved,
        step=1,
        copies=Copies.PER_NODE,
        on_existing=mp.OnExisting.REPLACE,
    )
    errors = []
    for number, operation in ((2, "fsync"), (3, "rename")):
        for failing in (0, 2):
            try:
                with fileops.hooked(_failing(operation if rank == failing else None)):
                    mp.save(
                        run / f"checkpoint-{number}",
                        saved,
                        step=number,
                        copies=Copies.PER_NODE,
                    )
            except mp.errors.CheckpointError as error:
                errors.append(str(error))
    mp.save(run / "checkpoint-4", saved, step=4, copies=Copies.PER_NODE)
    mp.load(run / "checkpoint-4", state(world_size))
    return errors


def _failing(operation: str | None) -> fileops.Hook:
    """Fails every `operation` on something of a checkpoint."""

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == operation and "checkpoint-" in target:
            raise OSError(5, "Input/output error")
        return function(*arguments)

    return hook


def test_every_node_has_a_whole_copy_or_none_has(tmp_path: Path) -> None:
    results = run_world(4, save_per_node, tmp_path)
    for errors in results:
        assert len(errors) == 4
        assert all("Input/output error" in error for error in errors)
    listings = [mp.list_run(tmp_path / f"node{node}/run") for node in (0, 1)]
    ids = []
    for node, listing in enumerate(listings):
        assert [entry.step for entry in listing.committed] == [1, 4]
        assert listing.torn == () and listing.unfinished == ()
        ids.append([entry.manifest.checkpoint_id for entry in listing.committed])
        for step in (1, 4):
            check(tmp_path / f"node{node}/run/checkpoint-{step}")
    assert ids[0] == ids[1]


def load_elsewhere(rank: int, world_size: int, base: Path) -> str:
    at_node(rank, 0, base)
    mp.save("run/checkpoint-1", state(world_size), step=1)
    at_node(rank, rank, base)
    try:
        mp.load("run/checkpoint-1", state(world_size))
    except mp.errors.CheckpointError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_does_not_see_the_checkpoint_is_named_with_its_host(tmp_path: Path) -> None:
    for message in run_world(2, load_elsewhere, tmp_path):
        assert "rank 1 on node 1" in message and "run/checkpoint-1" in message
