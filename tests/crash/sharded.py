"""A small state on many ranks: rows, columns and replicas; and what a run of it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch._dynamo  # DTensors import it, which takes each new rank a second
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import milepost as mp
from milepost.layouts.run import list_run

Committed: TypeAlias = dict[int, float]
"""What a run holds: by step, the value that its tensors were made from."""

EVERY_RANK_WRITES = {"MILEPOST_AGGREGATE_BELOW": "1"}


def values(value: float) -> dict[str, torch.Tensor]:
    return {
        "rows": torch.arange(24.0).reshape(6, 4) * value,
        "columns": torch.arange(32.0).reshape(4, 8) + value,
        "same": torch.full((5,), value),
    }


class Sharded(nn.Module):
    """Three parameters made from one value; cut over a mesh, or whole without one."""

    def __init__(self, value: float, mesh: Any = None) -> None:
        super().__init__()
        for name, whole in values(value).items():
            held = whole if mesh is None else _cut(name, whole, mesh)
            self.register_parameter(name, nn.Parameter(held))


def _cut(name: str, whole: torch.Tensor, mesh: Any) -> DTensor:
    """Without communication: every rank knows the whole."""
    if name == "same":
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    dim = 0 if name == "rows" else 1
    parts, rank = whole.chunk(mesh.size(), dim), mesh.get_local_rank()
    part = parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)
    return DTensor.from_local(
        part.contiguous(),
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def mesh_of_world() -> Any:
    """All ranks on one axis; None in a process that is alone."""
    if not dist.is_initialized():
        return None
    return init_device_mesh("cpu", (dist.get_world_size(),))


def state(value: float) -> dict[str, Any]:
    return {"model": Sharded(value, mesh_of_world()), "progress": {"value": value}}


def save(root: Path, step: int, value: float, **options: Any) -> None:
    path, live = root / f"checkpoint-{step}", state(value)
    mp.save(path, live, step=step, metrics={"value": value}, rng=mp.Rng.LEAVE_OUT, **options)


def save_behind(root: Path, step: int, value: float, **options: Any) -> None:
    """The same, by the background thread."""
    path, live = root / f"checkpoint-{step}", state(value)
    mp.save_async(
        path, live, step=step, metrics={"value": value}, rng=mp.Rng.LEAVE_OUT, **options
    ).wait()


def load(path: Path, value: float) -> None:
    """Load into this process, or these ranks, and compare every value."""
    live = state(0.5)
    mp.load(path, live)
    assert live["progress"] == {"value": value}
    wanted = state(value)["model"].state_dict()
    for name, found in live["model"].state_dict().items():
        assert torch.equal(_local(found), _local(wanted[name])), (path, name)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def committed(root: Path) -> Committed:
    """What `root` holds; each of it is proven by its digests and loads bit for bit."""
    found: Committed = {}
    for entry in list_run(root).committed:
        checkpoint = mp.Checkpoint.open(root / entry.name)
        report = checkpoint.verify()
        assert report.has_digests and not report.problems, report.problems
        value = entry.manifest.metrics["value"]
        assert isinstance(value, float)
        load(root / entry.name, value)
        found[entry.step] = value
    return found
