"""How many ranks each kind of parallelism gets, and what may be combined."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum


class PipelineSchedule(StrEnum):
    """The order in which pipeline stages run their microbatches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSizes:
    """Sizes of the mesh axes, in ranks; 1 means that the axis is not used.

    Ranks are laid out row-major over `(pp, dp_replicate, dp_shard, cp, tp)`; these axes multiply to
    the world. Expert parallelism takes no ranks of its own: within one replica and stage, the
    experts see the same `dp_shard * cp * tp` ranks as `(efsdp, ep, etp)`. So `ep * etp` divides
    that number, and what is left shards the experts FSDP-wise.

    Raises `ValueError` when a size is below 1 or the expert axes do not fit.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(
                    f"mesh size {field.name}={size!r}: expected a whole number of ranks, at least 1"
                )
        if self.stage_ranks % (self.ep * self.etp):
            raise ValueError(
                f"ep={self.ep} times etp={self.etp} must divide dp_shard * cp * tp = "
                f"{self.stage_ranks}: the experts of one replica live on those ranks"
            )

    @property
    def stage_ranks(self) -> int:
        """Ranks that together hold one replica of one pipeline stage."""
        return self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Ranks that share the FSDP shards of the same experts."""
        return self.stage_ranks // (self.ep * self.etp)

    @property
    def data_world(self) -> int:
        """Slices into which the global batch is cut; ranks that differ in cp, tp, pp share one."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.stage_ranks

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` lies on each of the five axes that make up the world."""
        names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        place = {}
        for name in reversed(names):
            rank, place[name] = divmod(rank, getattr(self, name))
        return place

    def data_rank(self, rank: int) -> int:
        """The slice of the global batch that `rank` reads, from 0 to `data_world - 1`."""
        place = self.coordinates(rank)
        return place["dp_replicate"] * self.dp_shard + place["dp_shard"]

    def check_world(self, world_size: int) -> None:
        """Raises `ValueError` unless the mesh has exactly `world_size` ranks."""
        if self.world_size != world_size:
            raise ValueError(
                f"{self} needs {self.world_size} ranks, but the job has {world_size}; "
                "change a mesh size or the number of processes"
            )

    def __str__(self) -> str:
        used = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)]
        used = [text for text in used if not text.endswith("=1")]
        return ", ".join(used) or "one process"
