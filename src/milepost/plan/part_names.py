"""How tensors are grouped into parts and how the parts are called: one policy for each layout.

A policy is a pure function of names, so all ranks lay out the same files. Grouped tensors keep
their order; each group is split at the size limit by itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from milepost.format.index import part_names
from milepost.plan.inventory import LeafInfo
from milepost.plan.stages import Stages, find_stages, one_stage

EP_SHARDED = "ep_sharded"
_SHARD = re.compile(r"\.shard_(\d+)$")


class WeightFiles(Enum):
    """Which files the weights of a checkpoint lie in."""

    AUTO = "auto"
    """Parts of each stage for a pipeline, parts as `save_pretrained` names them otherwise."""
    NUMBERED = "numbered"
    """Parts as `save_pretrained` names them."""
    STAGES = "stages"
    """Parts of each stage; a model that is no pipeline is one stage."""
    RANKS = "ranks"
    """One file for each rank with its own experts, `ep_sharded`: no reader can use it as it lies.
    `save_sharded_ep` is the way to ask for it."""


class PartNaming(Protocol):
    """`metadata` goes into the index beside `total_size`; `splits` says whether the size limit of
    a part applies."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def splits(self) -> bool: ...

    def group(self, tensor: str) -> int:
        """Which group a tensor lies in; groups are laid out in ascending order."""
        ...

    def names(self, stem: str, group: int, count: int) -> list[str]:
        """File names of the `count` parts of a group."""
        ...


@dataclass(frozen=True, slots=True)
class Numbered:
    """One group, named as `save_pretrained` does."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    splits: bool = True

    def group(self, tensor: str) -> int:
        return 0

    def names(self, stem: str, group: int, count: int) -> list[str]:
        return part_names(stem, count)


@dataclass(frozen=True, slots=True)
class StageParts:
    """Parts of each pipeline stage, always numbered, and of what no stage owns.

    >>> naming = StageParts(Stages(count=2, owner={"a": 1}, layers=((0,), (1,))))
    >>> naming.names("model", naming.group("a"), 1)
    ['model-pp00001-of-00002-00001.safetensors']
    """

    stages: Stages
    metadata: Mapping[str, Any] = field(default_factory=dict)
    splits: bool = True

    def group(self, tensor: str) -> int:
        owner = self.stages.owner[tensor]
        return self.stages.count if owner is None else owner

    def names(self, stem: str, group: int, count: int) -> list[str]:
        numbers = range(1, count + 1)
        if group == self.stages.count:
            return [f"{stem}-wrapper-{number:05d}.safetensors" for number in numbers]
        stage = f"{stem}-pp{group:05d}-of-{self.stages.count:05d}"
        return [f"{stage}-{number:05d}.safetensors" for number in numbers]


@dataclass(frozen=True, slots=True)
class RankParts:
    """One file for each rank, numbered from 0, whatever its size: the per-rank expert layout.

    `marks` are further metadata of the index.

    >>> naming = RankParts(4)
    >>> naming.names("model", naming.group("layers.0.mlp.experts.down_proj.shard_3"), 1)
    ['model-00003-of-00004.safetensors']
    """

    world_size: int
    marks: Mapping[str, Any] = field(default_factory=dict)

    @property
    def metadata(self) -> Mapping[str, Any]:
        return {"ep_size": self.world_size, "format": EP_SHARDED, **self.marks}

    @property
    def splits(self) -> bool:
        return False

    def group(self, tensor: str) -> int:
        found = _SHARD.search(tensor)
        return 0 if found is None else int(found.group(1))

    def names(self, stem: str, group: int, count: int) -> list[str]:
        assert count == 1, "a rank has one file"
        return [f"{stem}-{group:05d}-of-{self.world_size:05d}.safetensors"]


def naming_of(
    files: WeightFiles, leaves: Mapping[str, LeafInfo], tied: Collection[str], *, world_size: int
) -> PartNaming:
    """The policy for a model of these leaves; `tied` are names kept in place of tied ones."""
    if files is WeightFiles.NUMBERED:
        return Numbered()
    if files is WeightFiles.RANKS:
        return RankParts(world_size)
    stages = find_stages(leaves, tied)
    if stages is None and files is WeightFiles.AUTO:
        return Numbered()
    return StageParts(stages or one_stage(leaves))
