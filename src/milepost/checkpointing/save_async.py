"""`save_async`: training goes on as soon as its state has been copied."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Unpack

from torch.optim import Optimizer

from milepost._env import env_choice
from milepost.checkpointing.capture import State
from milepost.checkpointing.events import EventKind, Events
from milepost.checkpointing.frozen_parts import FrozenParts
from milepost.checkpointing.in_flight import InFlight, SaveHandle, saves, settle_earlier
from milepost.checkpointing.lineage import Lineage
from milepost.checkpointing.linking import Unchanged
from milepost.checkpointing.save_prepare import PreparedSave, SaveKeywords, prepare_save
from milepost.checkpointing.save_report import SaveReport
from milepost.checkpointing.staged_plan import Check, StagedPlans, stage_plans
from milepost.checkpointing.step_guard import (
    frozen_beside,
    guarded_storages,
    hold_steps,
    storage_of,
)
from milepost.checkpointing.target import check_step
from milepost.checkpointing.world import converse, hand_over
from milepost.engine.host_buffers import HostBuffers
from milepost.engine.rendezvous import Conversation, together
from milepost.errors import SaveInFlightError
from milepost.state.optimizer import inner_optimizers
from milepost.storage.fileops import PathLike


class Overlap(Enum):
    """How much of the state is copied behind training."""

    NONE = "none"
    """Nothing: when the call returns, all of it has been copied."""
    UNTIL_STEP = "until-step"
    """Parameters and moments of the optimizers in the state, while the next forward and backward
    pass runs; the step of each of these optimizers waits for the copies."""


_buffers = HostBuffers()


def save_async(
    path: PathLike,
    state: State,
    *,
    step: int,
    in_flight: InFlight = InFlight.WAIT,
    overlap: Overlap = Overlap.NONE,
    buffers: HostBuffers | None = None,
    **keywords: Unpack[SaveKeywords],
) -> SaveHandle:
    """Save as `save` does, with its keywords, and return as soon as the state may change again.

    What this rank will write is copied into host memory: `buffers`, or memory that later saves of
    this process use again (page-locked where there is CUDA). A background thread writes and commits
    it; the handle says when that is done. What finds no room in `buffers` is written before the
    call returns. With `Overlap.UNTIL_STEP` nothing but an optimizer's `step` may change parameters
    and moments until it has been called once more.

    `in_flight` says what happens while an earlier save is still being written. One that failed
    behind training is raised by the next save, on every rank; until then it is in the log.
    Collective, as `save`; nothing runs on the training process group. `InvalidInputError`,
    `MismatchError` and the like are raised by the call itself; `StateChangedError` with
    `MILEPOST_CHECK_STAGING=1`, naming tensors that changed while they were copied.
    """
    return start_save(Path(path), state, step, in_flight, overlap, buffers, keywords)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequel:
    """What a caller does in the thread behind training.

    `lineage` is asked when writing begins, and replaces the stated one: the save before may have
    failed since. `committed`, called on every rank once the checkpoint is there, gives the report
    that the handle tells. `failed` is called when there will be none.
    """

    lineage: Callable[[], Lineage]
    committed: Callable[[Conversation, SaveReport], SaveReport]
    failed: Callable[[], None]


def start_save(
    target: Path,
    state: State,
    step: int,
    in_flight: InFlight,
    overlap: Overlap,
    buffers: HostBuffers | None,
    keywords: SaveKeywords,
    sequel: Sequel | None = None,
) -> SaveHandle:
    """`save_async`, with something that is to follow behind training."""
    start = time.perf_counter()
    step = check_step(target, step)
    if in_flight in WAITS_FOR:
        saves.drain(WAITS_FOR[in_flight])
    with ExitStack() as stack:
        talk: Conversation = converse()
        stack.enter_context(talk)
        is_behind = settle_earlier(talk)
        if is_behind and in_flight not in WAITS_FOR:
            report = left_out(target, step, in_flight)
            events = Events(keywords.get("on_event"), step=step, path=target, rank=talk.rank)
            events.tell(EventKind.LEFT_OUT)
            return SaveHandle(target, step, report)
        prepared = prepare_save(talk, target, state, step, keywords)
        if prepared.kept is not None:
            return SaveHandle(target, step, prepared.kept)
        stack.callback(prepared.run.pace.finish)  # whatever happens, nobody waits for it for ever
        staged = _stage(talk, prepared, state, overlap, buffers or _buffers)
        stack.callback(staged.release)
        hand_over(talk)
        handle, behind = SaveHandle(target, step), stack.pop_all()
        handle.pace = prepared.run.pace
        run = prepared.run
        handle.pace.ease(run.rules[0].ranks_beside(talk.rank) * run.options.threads)
    try:
        follow = prepared.follow_newest if is_behind else _nothing
        saves.submit(handle, talk, lambda: _finish(prepared, staged, behind, follow, sequel))
    except BaseException:  # no thread can be started
        behind.close()
        raise
    if staged.is_partial:
        prepared.run.pace.wait()
    handle.held_s = time.perf_counter() - start
    return handle


WAITS_FOR = {InFlight.WAIT: 0, InFlight.QUEUE: 1}
"""How many saves may be left under way when one begins; other policies do not wait."""


def left_out(path: Path, step: int, in_flight: InFlight) -> SaveReport:
    """The report of `InFlight.SKIP`; `SaveInFlightError` for `InFlight.ERROR`."""
    if in_flight is InFlight.ERROR:
        raise SaveInFlightError(
            f"{path}: an earlier save is still being written; wait for its handle, or save with "
            "InFlight.WAIT, QUEUE or SKIP"
        )
    return SaveReport(
        path=path,
        step=step,
        checkpoint_id="",
        nbytes=0,
        written=False,
        notes=(f"step {step} was left out: an earlier save was still being written",),
    )


def _stage(
    talk: Conversation,
    prepared: PreparedSave,
    state: State,
    overlap: Overlap,
    buffers: HostBuffers,
) -> StagedPlans:
    """Copy what this rank writes; every rank has when this returns, or none goes on."""
    run = prepared.run
    is_checked = env_choice("MILEPOST_CHECK_STAGING", ("0", "1")) == "1"
    optimizers: list[Optimizer] = []
    with ExitStack() as stack:
        with together(talk, "snapshot"), run.phase("snapshot"):
            if overlap is Overlap.UNTIL_STEP:
                optimizers = [o for each in state.values() for o in inner_optimizers(each).values()]
            guarded = guarded_storages(optimizers)
            beside = frozen_beside(state.values(), guarded)
            frozen = FrozenParts(
                run.target.parent,
                run.plans if run.unchanged is not Unchanged.WRITE else [],
                run.options,
                is_late=lambda tensor: not is_checked and storage_of(tensor) in beside,
                pace=run.pace,
            )
            staged = stage_plans(
                run.plans,
                buffers,
                frozen=frozen,
                threads=run.options.threads,
                is_late=lambda tensor: storage_of(tensor) in guarded,
                check=Check.BITS if is_checked else Check.NONE,
            )
            stack.callback(staged.release)
            run.phases.nbytes["snapshot"] = staged.nbytes
        stack.pop_all()
    hold_steps(optimizers, staged.hold)
    return staged


def _nothing() -> None:
    return None


def _finish(
    prepared: PreparedSave,
    staged: StagedPlans,
    behind: ExitStack,
    follow: Callable[[], None],
    sequel: Sequel | None,
) -> SaveReport:
    """What the background thread does; `behind` frees the copies and ends the conversation."""
    try:
        with behind:
            with prepared.run.events.failing():
                with together(prepared.run.talk, "copied"):
                    prepared.run.talk.hand_over()
                    staged.settle()
                    prepared.run.plans = staged.plans()
                    follow()
                    if sequel is not None:
                        prepared.stand_at(sequel.lineage)
                report = prepared.finish()
            return report if sequel is None else sequel.committed(prepared.run.talk, report)
    except BaseException:
        if sequel is not None:
            sequel.failed()
        raise
