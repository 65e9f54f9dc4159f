"""Exports into layouts of few files: the trio and the single `.pt`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milepost.checkpointing.optimizer_dict import torch_state_dict
from milepost.errors import InvalidInputError
from milepost.format.tree import decode
from milepost.layouts.checkpoint import Checkpoint, Layout
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.layouts.payload import STATE_SLOTS
from milepost.layouts.single_file import write_single_file
from milepost.layouts.trio import StaleFile, TrioContent, trio_names, write_trio
from milepost.layouts.trio_names import split_suffix
from milepost.state.optimizer_record import OptimizerRecord
from milepost.tools.carried import needed_sidecars
from milepost.tools.export import ExportReport, ExportTarget, TrainingState
from milepost.tools.sources import mapped_weights

# The usual names of schedulers and scalers, and the slot of a trio where each belongs.
_SLOT_OF_KEY = {
    "scheduler": "scheduler_state",
    "lr_scheduler": "scheduler_state",
    "scaler": "scaler_state",
    "grad_scaler": "scaler_state",
}


@dataclass(slots=True, kw_only=True)
class Slots:
    """Training state sorted into the slots of a trio; what has no slot of its own is extra."""

    values: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, slot: str, key: str, value: Any) -> None:
        """Into the slot; under its own key into the extra state when the slot is taken."""
        if slot == "extra_state" or slot in self.values:
            self.values.setdefault("extra_state", {})[key] = value
        else:
            self.values[slot] = value


def export_trio(
    checkpoint: Checkpoint, target: Path, *, training_state: TrainingState
) -> ExportReport:
    """Write a trio; `target` is its directory and stem, or any of its files."""
    _refuse_sidecars(checkpoint, ExportTarget.TRIO)
    stem = split_suffix(target.name)[0]
    slots = _slots(checkpoint, training_state)
    info = checkpoint.info
    content = TrioContent(
        model_state=mapped_weights(checkpoint),
        epoch=_finished_epoch(checkpoint, slots),
        loss=_loss(checkpoint),
        best_loss=info.best_loss,
        model_config=_config(checkpoint),
        step=info.step,
        metrics=dict(info.metrics),
        **slots.values,
    )
    # The `.pt` of this name may be the very file that is exported.
    written = write_trio(target.parent, [stem], content, stale=StaleFile.KEEP)
    return ExportReport(
        path=target.parent / stem,
        target=ExportTarget.TRIO,
        files=tuple(trio_names(stem)),
        nbytes=written.nbytes,
        notes=tuple(slots.notes),
    )


def export_single_file(
    checkpoint: Checkpoint, target: Path, *, training_state: TrainingState
) -> ExportReport:
    """Write one `.pt`: weights, optimizer state, and all else as metadata."""
    _refuse_sidecars(checkpoint, ExportTarget.SINGLE_FILE)
    slots = _slots(checkpoint, training_state)
    info = checkpoint.info
    described = {
        "step": info.step,
        "epoch": info.epoch,
        "loss": _loss(checkpoint),
        "best_loss": info.best_loss,
        "metrics": dict(info.metrics) or None,
        "config": _config(checkpoint),
    }
    optimizer = slots.values.pop("optimizer_state", None)
    metadata = {**described, **slots.values}
    write_single_file(
        target,
        mapped_weights(checkpoint),
        optimizer,
        {key: value for key, value in metadata.items() if value is not None},
    )
    return ExportReport(
        path=target,
        target=ExportTarget.SINGLE_FILE,
        files=(target.name,),
        nbytes=target.stat().st_size,
        notes=tuple(slots.notes),
    )


def _refuse_sidecars(checkpoint: Checkpoint, to: ExportTarget) -> None:
    needs = needed_sidecars(checkpoint)
    if needs:
        raise InvalidInputError(
            f"{checkpoint.path}: its weights need {', '.join(needs)}, for which a {to.value} has "
            "no place; export it to a directory",
            path=checkpoint.path,
        )


def _finished_epoch(checkpoint: Checkpoint, slots: Slots) -> int:
    """The last finished epoch, counted from 0 as in a trio; a directory counts epochs done."""
    epoch = checkpoint.info.epoch
    if checkpoint.layout not in (Layout.DIRECTORY, Layout.HUGGING_FACE):
        return int(epoch or 0)
    if epoch is None or epoch < 1 or epoch != int(epoch):
        slots.notes.append(
            f"epoch {'unknown' if epoch is None else epoch}: a trio counts whole epochs from 0; "
            f"this one says {max(0, int(epoch or 0) - 1)}"
        )
    return max(0, int(epoch or 0) - 1)


def _loss(checkpoint: Checkpoint) -> float | None:
    info = checkpoint.info
    loss = info.metrics.get("loss") if info.loss is None else info.loss
    return float(loss) if isinstance(loss, int | float | str) else None


def _config(checkpoint: Checkpoint) -> Any:
    """The recorded configuration, decoded; of a directory without one, its `config.json`."""
    config = checkpoint.info.model_config
    if not isinstance(checkpoint, DirectoryCheckpoint):
        return config
    if config is not None:
        return decode(config, None, where=f"{checkpoint.path}: model_config")
    from milepost.layouts.huggingface import HuggingFaceCheckpoint

    return HuggingFaceCheckpoint(checkpoint.path, stem="model").config or None


def _slots(checkpoint: Checkpoint, training_state: TrainingState) -> Slots:
    slots = Slots()
    if training_state is TrainingState.LEAVE_OUT:
        return slots
    if not isinstance(checkpoint, DirectoryCheckpoint):
        for key, value in checkpoint.training_state().items():
            slots.put(key if key in STATE_SLOTS else "extra_state", key, value)
        return slots
    state = checkpoint.training_state()
    for key, entry in checkpoint.manifest.state.items():
        if key not in state:
            continue
        if entry.kind == "optimizer":
            slots.put("optimizer_state", key, _optimizer(checkpoint, key, state[key]))
        elif entry.kind == "model":
            slots.notes.append(f"{key}: state of the model besides its tensors is left out")
        else:
            slots.put(_SLOT_OF_KEY.get(key, "extra_state"), key, state[key])
    slots.notes.append("random state is left out: this layout has no place for it")
    return slots


def _optimizer(
    checkpoint: DirectoryCheckpoint, key: str, decoded: Mapping[str, Any]
) -> dict[str, Any]:
    where = f"{checkpoint.path}/training/state.json: {key}"
    tree = {name: value for name, value in decoded.items() if name != "tensors"}
    record = OptimizerRecord.from_tree(tree, where=where)
    return torch_state_dict(record, decoded["tensors"])
