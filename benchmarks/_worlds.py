"""Worlds of gloo ranks on this machine, and the tensors that they hold shards of."""

from __future__ import annotations

import json
import logging
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from _state import fill, llm_shapes

MOST_RANKS = 4
ROWS, COLUMNS = "dim 0 (FSDP2)", "inner dim"
STATES = (ROWS, COLUMNS)

State = dict[str, torch.Tensor]


class Weights(torch.nn.Module):
    """The sharded tensors as a model, for `mp.save` and `mp.load`."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.names = dict(zip((f"b{number}" for number in range(len(state))), state, strict=True))
        for name, value in zip(self.names, state.values(), strict=True):
            self.register_buffer(name, value)


def sharded(nbytes: int, kind: str) -> State:
    """This rank's shards of the shapes of a Llama; tensors of one dim are cut on dim 0.

    The global shapes are the same in worlds of up to `MOST_RANKS`, all of whose shards are even.
    """
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    state: State = {}
    for number, (name, shape) in enumerate(llm_shapes(nbytes).items()):
        dim = 1 if kind == COLUMNS and len(shape) > 1 else 0
        local_shape = list(shape)
        local_shape[dim] = shape[dim] // MOST_RANKS * (MOST_RANKS // world_size)
        local = torch.empty(local_shape, dtype=torch.bfloat16)
        fill(local, number * world_size + dist.get_rank())
        state[name] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
    return state


def rank_main(
    rank: int,
    ranks: int,
    port: int,
    task: Callable[..., Any],
    arguments: tuple[Any, ...],
    out: Path,
) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))  # as torchrun does
    warnings.filterwarnings("ignore", module=r"torch\.distributed")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = task(*arguments)
    if rank == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def in_world(ranks: int, task: Callable[..., Any], *arguments: Any, directory: Path) -> Any:
    """What rank 0 of a new world of `ranks` finds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = directory / "answer.json"
    multiprocessing.spawn(rank_main, (ranks, port, task, arguments, out), nprocs=ranks)
    return json.loads(out.read_text())


def from_all_ranks(value: int) -> list[int]:
    """The value of every rank, in order; collective."""
    own = torch.tensor(value)
    found = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [int(each) for each in found]
