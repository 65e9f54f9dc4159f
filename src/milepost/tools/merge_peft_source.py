"""A base with an adapter folded in as an input of other verbs: each tensor is merged when read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from milepost.adapters.kinds import CheckpointKind, checkpoint_kind
from milepost.errors import InvalidInputError
from milepost.layouts.checkpoint import Checkpoint
from milepost.tools.merge_peft_adapter import (
    OpenedAdapter,
    base_of,
    open_adapter,
    refuse_merged_twice,
    refuse_other_base,
)
from milepost.tools.merge_peft_base import BaseIndex
from milepost.tools.merge_peft_config import MergeTask
from milepost.tools.merge_peft_edits import Differences
from milepost.tools.merge_peft_groups import Banks, Merging, TiedDelta
from milepost.tools.rewrite.groups import Computed, Copied, TensorSpec
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.source import EpSlices, Source, SourceTensor, open_source
from milepost.tools.rewrite.streams import MemoryStream, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedTensor(SourceTensor):
    """A tensor that is made of one of the base and factors whenever it is read, whole."""

    group: Computed

    def read(self, rows: tuple[int, int] | None = None) -> torch.Tensor:
        with torch.no_grad():
            given = {key: tensor.read() for key, tensor in self.group.inputs.items()}
            made = self.group.make(given)[self.name]
        return made if rows is None else made[slice(*rows)]

    def stream(self, first: int = 0, last: int | None = None) -> Stream:
        return MemoryStream(self.read(), first)

    @property
    def held_nbytes(self) -> int:
        """All of it, and what it is made of."""
        return self.nbytes + sum(tensor.nbytes for tensor in self.group.inputs.values())


class AdaptedSource(Source):
    """The base of one adapter, its tensors those of the merge in the dtypes of the base.

    What keeps the adapter from being merged is added to `problems`.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: OpenedAdapter, problems: Problems) -> None:
        super().__init__(checkpoint, EpSlices.REFUSE)
        self.adapter = adapter
        base = Source(checkpoint, EpSlices.REFUSE)
        problems.attempt(lambda: refuse_merged_twice(adapter, base))
        problems.attempt(lambda: refuse_other_base(adapter, base))
        merging = Merging(
            BaseIndex(base),
            [adapter],
            problems,
            Differences(),
            dtype=None,
            task=MergeTask.CAUSAL_LM,
            tied=TiedDelta.FOLD,
            banks=Banks.ALONE,
        )
        groups = merging.groups()
        self._ties = merging.ties()
        made: dict[str, SourceTensor] = {}
        for group in groups:
            if isinstance(group, Copied):
                (tensor,) = group.sources
                if tensor.source is base and tensor.name == group.output.name:
                    made[tensor.name] = self.tensors[tensor.name]
                    continue
                group = _as_it_is(tensor, group.output)
            assert isinstance(group, Computed), "a merge copies tensors or makes them whole"
            for spec in group.outputs:
                made[spec.name] = AdaptedTensor(
                    name=spec.name,
                    dtype=spec.dtype,
                    shape=spec.shape,
                    nbytes=spec.nbytes,
                    source=self,
                    group=group,
                )
        self.tensors = made

    @property
    def tied(self) -> Mapping[str, str]:
        """Ties that the merge leaves."""
        return self._ties

    def identity(self) -> dict[str, Any]:
        """That of the base, and the adapter."""
        adapter = {"name": self.adapter.directory.name, "digest": self.adapter.digest}
        return {**super().identity(), "adapter": adapter}


def _as_it_is(tensor: SourceTensor, spec: TensorSpec) -> Computed:
    """A tensor of the adapter, or one under another name, for readers of this source."""
    return Computed(
        inputs={tensor.name: tensor},
        outputs=(spec,),
        make=lambda given: {spec.name: given[tensor.name]},
    )


def open_with_adapter(path: Path, problems: Problems) -> Source:
    """What `path` stands for as an input: a checkpoint; the base of an adapter with the adapter
    merged, for a directory with an adapter alone; and so for `BASE+ADAPTER`, with this base."""
    base, plus, lora = str(path).rpartition("+")
    if plus and not path.exists():
        return _adapted(Path(lora), Path(base), problems)
    if path.is_dir() and checkpoint_kind(path) is CheckpointKind.ADAPTER:
        return _adapted(path, None, problems)
    return open_source(path)


def _adapted(directory: Path, base: Path | None, problems: Problems) -> AdaptedSource:
    adapter = open_adapter(directory)
    found = base_of([adapter], base)
    if found == directory:
        raise InvalidInputError(f"{directory}: names itself as its base; give BASE+ADAPTER")
    return AdaptedSource(Checkpoint.open(found), adapter, problems)
