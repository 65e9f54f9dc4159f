"""Resuming from a trio: all is checked first, then live state is filled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from milepost.checkpointing.config import (
    STRUCTURAL_FIELDS,
    as_mapping,
    config_differences,
    config_message,
)
from milepost.checkpointing.provenance import exactness, exactness_differences
from milepost.checkpointing.report import Level, LoadReport
from milepost.errors import ConfigMismatchError, InvalidInputError, LoadTornError
from milepost.layouts.payload import Payload
from milepost.manager.schedules import check_shape, restore_all, schedule_notes, settings_of
from milepost.manager.trio_optimizer import is_plain_state, plan_optimizer
from milepost.state.leaves import collect_leaves
from milepost.state.model_plan import RestorePlan, plan_restore_model
from milepost.state.optimizer_plan import OptimizerPlan
from milepost.state.rng import restore_rng, unpack_rng
from milepost.state.tensors import is_dtensor, same_bits, stored_dtype, stored_shape

logger = logging.getLogger(__name__)

OWN_KEY = "milepost"
"""Under it our additions stand in `extra_state`: plain containers and tensors only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrioState:
    """The live objects of one training."""

    model: nn.Module
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None


@dataclass(slots=True, kw_only=True)
class TrioPlan:
    """A checked restore: nothing live has changed yet."""

    report: LoadReport
    payload: Payload
    extra_state: Any
    model: RestorePlan
    tensors: dict[str, torch.Tensor]
    optimizer: OptimizerPlan | None = None
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    small: list[tuple[str, Any, Any]] = field(default_factory=list)


def refuse_sharded(model: nn.Module) -> None:
    """A trio holds whole tensors; `InvalidInputError` names the first that is cut over ranks."""
    for name, tensor in collect_leaves(model).tensors.items():
        if is_dtensor(tensor):
            raise InvalidInputError(
                f"{name}: cut over ranks (a DTensor, as FSDP and tensor parallelism make them); a "
                "trio is written and read by rank 0 from whole tensors: use "
                "layout=Layout.DIRECTORY"
            )


def plan_trio(
    path: Path,
    payload: Payload,
    state: TrioState,
    expected_config: Mapping[str, Any] | None,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> TrioPlan:
    """Compare a payload with the live objects; `MismatchError` of the fitting kind, or a plan."""
    refuse_sharded(state.model)
    check_config(path, payload, expected_config)
    own, extra_state = split_own(payload.extra_state)
    report = LoadReport(
        path=path,
        step=payload.step,
        epoch=payload.epoch,
        checkpoint_id=payload.metadata.get("save_id"),
        metrics={"loss": payload.loss, **payload.metrics},
        level=Level.EXACT,
    )
    model, tensors = _plan_model(state.model, payload)
    plan = TrioPlan(
        report=report, payload=payload, extra_state=extra_state, model=model, tensors=tensors
    )
    report.models["model"] = model.report
    _plan_optimizer(plan, state, own)
    _plan_small(plan, state)
    _plan_rng(plan, own, rank, world_size)
    _set_level(plan, state, own)
    return plan


def check_config(path: Path, payload: Payload, expected: Mapping[str, Any] | None) -> None:
    """Refuse a checkpoint of another architecture, field by field."""
    if expected is None or payload.model_config is None:
        return
    differences = config_differences(
        as_mapping(payload.model_config), as_mapping(expected), fields=STRUCTURAL_FIELDS
    )
    if differences:
        raise ConfigMismatchError(config_message(str(path), differences), differences=differences)


def split_own(extra_state: Any) -> tuple[dict[str, Any], Any]:
    """Our additions, and the caller's extra state as it was given: None when there was none."""
    if not isinstance(extra_state, dict) or OWN_KEY not in extra_state:
        return {}, extra_state
    rest = {key: value for key, value in extra_state.items() if key != OWN_KEY}
    own = extra_state[OWN_KEY]
    return (dict(own) if isinstance(own, Mapping) else {}), rest or None


def _plan_model(model: nn.Module, payload: Payload) -> tuple[RestorePlan, dict[str, torch.Tensor]]:
    saved = payload.model_state
    tensors = {name: value for name, value in saved.items() if isinstance(value, torch.Tensor)}
    plan = plan_restore_model(
        model,
        {name: (stored_dtype(t), stored_shape(t)) for name, t in tensors.items()},
        {},
        extra={name: value for name, value in saved.items() if name not in tensors},
    )
    plan.check_ties(lambda a, b: same_bits(tensors[a], tensors[b]))
    return plan, tensors


def _plan_optimizer(plan: TrioPlan, state: TrioState, own: Mapping[str, Any]) -> None:
    saved = plan.payload.optimizer_state
    if state.optimizer is None or saved is None:
        _note_one_sided(plan, "optimizer", state.optimizer, saved)
        return
    if not is_plain_state(saved):  # one that keeps its state its own way takes it back its own way
        check_shape(state.optimizer, saved, key="optimizer")
        plan.small.append(("optimizer", state.optimizer, saved))
        return
    plan.optimizer, plan.moments = plan_optimizer(
        state.optimizer,
        state.model,
        saved,
        own.get("param_names"),
        own.get("optimizer_class"),
        {name: tuple(tensor.shape) for name, tensor in plan.tensors.items()},
        where=f"{plan.report.path}: optimizer_state",
    )
    plan.report.optimizers["optimizer"] = plan.optimizer.report


def _plan_small(plan: TrioPlan, state: TrioState) -> None:
    pairs = (
        ("scheduler", state.scheduler, plan.payload.scheduler_state),
        ("scaler", state.scaler, plan.payload.scaler_state),
    )
    for key, obj, saved in pairs:
        if obj is None or saved is None:
            _note_one_sided(plan, key, obj, saved)
            continue
        check_shape(obj, saved, key=key)
        plan.small.append((key, obj, saved))


def _note_one_sided(plan: TrioPlan, key: str, live: Any, saved: Any) -> None:
    if live is not None:
        plan.report.kept.append(key)
    elif saved is not None:
        plan.report.not_loaded.append(key)


def _plan_rng(plan: TrioPlan, own: Mapping[str, Any], rank: int, world_size: int) -> None:
    rows = own.get("rng")
    if rows is None:
        plan.report.differences.append("the checkpoint holds no random state")
        return
    if len(rows) != world_size:
        plan.report.differences.append(
            f"random state: saved by {len(rows)} ranks, now {world_size}; it is not restored"
        )
        return
    where = f"{plan.report.path}: random state of rank {rank}"
    saved = unpack_rng(rows[rank].numpy().tobytes(), where)
    plan.report._restore_rng = lambda: restore_rng(saved)


def _set_level(plan: TrioPlan, state: TrioState, own: Mapping[str, Any]) -> None:
    report = plan.report
    now = exactness({"optimizer": state.optimizer})
    report.differences += exactness_differences(own.get("exactness") or {}, now)
    if plan.optimizer is not None:
        report.differences += list(plan.optimizer.report.implementation)
    if report.kept or report.not_loaded:
        report.level = Level.WARM_RESTART
    elif report.differences:
        report.level = Level.EXACT_STATE


def apply_trio(plan: TrioPlan) -> None:
    """Fill live state. An error of a scheduler or scaler changes nothing; a later one tears."""
    before = {key: settings_of(obj) for key, obj, _ in plan.small}
    restore_all(plan.small)
    for key, obj, _ in plan.small:
        plan.report.notes += schedule_notes(key, before[key], settings_of(obj))
    _apply(plan.report.path, lambda: _fill(plan))


def _fill(plan: TrioPlan) -> None:
    plan.model.fill(plan.tensors)
    plan.model.finish()
    if plan.optimizer is not None:
        plan.optimizer.fill(plan.moments)
        plan.optimizer.apply()


def _apply(path: Path, fill: Callable[[], None]) -> None:
    try:
        fill()
    except Exception as error:
        raise LoadTornError(
            f"{path}: {error}; the state is half loaded and must not be used until a load "
            "succeeds: load again, or load an older checkpoint",
            path=path,
        ) from error
