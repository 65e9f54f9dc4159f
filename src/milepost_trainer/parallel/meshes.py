"""The device meshes of a job: one grid of ranks, seen in the two ways that its parts need."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from milepost_trainer.parallel.sizes import MeshSizes


@dataclass(frozen=True, slots=True)
class Meshes:
    """Two views of the same ranks in the same row-major order.

    `dense` is `(pp, dp_replicate, dp_shard, cp, tp)`; its axes dp_shard and cp together are
    `shard`, which cuts parameters FSDP-wise. `expert` is `(pp, dp_replicate, efsdp, ep, etp)`.
    """

    dense: DeviceMesh
    shard: DeviceMesh
    expert: DeviceMesh | None

    @property
    def fully_shard(self) -> DeviceMesh:
        """For `fully_shard` of everything but experts: replicated too, if the job is (HSDP)."""
        return _with_replicas(self.dense, self.shard)

    @property
    def fully_shard_experts(self) -> DeviceMesh:
        """The same for experts."""
        assert self.expert is not None
        return _with_replicas(self.expert, self.expert["efsdp"])


def _with_replicas(root: DeviceMesh, shard: DeviceMesh) -> DeviceMesh:
    replicate = root["dp_replicate"]
    return DeviceMesh._concatenate([replicate, shard]) if replicate.size() > 1 else shard


def make_meshes(sizes: MeshSizes, device_type: str) -> Meshes:
    """Collective: makes the process groups of every axis."""
    outer = (sizes.pp, sizes.dp_replicate)
    dense = init_device_mesh(
        device_type,
        (*outer, sizes.dp_shard, sizes.cp, sizes.tp),
        mesh_dim_names=("pp", "dp_replicate", "dp_shard", "cp", "tp"),
    )
    shard, expert = dense["dp_shard"], None
    if sizes.cp > 1:
        shard = dense["dp_shard", "cp"]._flatten("dp_shard_cp")
    if sizes.ep * sizes.etp > 1:
        expert = init_device_mesh(
            device_type,
            (*outer, sizes.efsdp, sizes.ep, sizes.etp),
            mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep", "etp"),
        )
    return Meshes(dense, shard, expert)
