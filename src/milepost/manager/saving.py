"""Whether saves of a manager hold training until they are committed, or go on behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypedDict

from milepost.checkpointing.events import OnEvent
from milepost.checkpointing.in_flight import InFlight
from milepost.checkpointing.load import Verify
from milepost.checkpointing.save_async import Overlap
from milepost.engine.host_buffers import HostBuffers
from milepost.engine.write import WriteOptions
from milepost.errors import InvalidInputError
from milepost.layouts.checkpoint import Layout
from milepost.manager.best import BestMetric
from milepost.manager.mirror import Mirror
from milepost.manager.resume import ResumeFrom
from milepost.manager.retention import RetentionPolicy
from milepost.manager.save_policies import SavePolicy


class Saving(Enum):
    """When `CheckpointManager.save` returns."""

    WAIT = "wait"
    """When the checkpoint is committed: with its `SaveReport`."""
    ASYNC = "async"
    """When the state may change again: with a `SaveHandle`. The rest happens behind training."""


@dataclass(frozen=True, slots=True)
class SaveMode:
    """How a manager saves; `in_flight`, `overlap` and `buffers` are those of `save_async`, and
    `on_event` is told of every save."""

    saving: Saving
    in_flight: InFlight
    overlap: Overlap
    buffers: HostBuffers | None
    on_event: OnEvent | None = None

    def check(self, layout: Layout, mirrors: Sequence[Mirror]) -> None:
        """`InvalidInputError` for what does not go together."""
        if mirrors and layout is not Layout.DIRECTORY:
            raise InvalidInputError(f"mirrors with layout={layout}: only Layout.DIRECTORY has them")
        if self.saving is Saving.ASYNC and layout is not Layout.DIRECTORY:
            raise InvalidInputError(
                f"saving={self.saving} with layout={layout}: only Layout.DIRECTORY is saved behind "
                "training"
            )
        if self.on_event is not None and layout is not Layout.DIRECTORY:
            raise InvalidInputError(f"on_event with layout={layout}: only Layout.DIRECTORY tells")
        asked = (self.in_flight, self.overlap, self.buffers)
        if self.saving is Saving.WAIT and asked != (InFlight.WAIT, Overlap.NONE, None):
            raise InvalidInputError(
                f"in_flight={self.in_flight}, overlap={self.overlap}, buffers={self.buffers}: they "
                "are for saving=Saving.ASYNC"
            )


class ManagerOptions(TypedDict, total=False):
    """Keywords of `CheckpointManager`, which says what they mean; all but `saving`."""

    layout: Layout
    save: SavePolicy | None
    keep: RetentionPolicy | Sequence[RetentionPolicy] | None
    resume: ResumeFrom
    best: BestMetric | None
    verify: Verify
    grace_s: float
    in_flight: InFlight
    overlap: Overlap
    buffers: HostBuffers | None
    mirrors: Sequence[Mirror]
    options: WriteOptions | None
    on_event: OnEvent | None
