"""What a load did, in words and in lists: reported, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from milepost.state.model_plan import ModelReport
from milepost.state.optimizer_plan import OptimizerReport


class Level(Enum):
    """How much of the saved training goes on."""

    EXACT = "exact"
    """Every value, random state and position equals the saved bits; the continuation is
    bit-identical wherever two uninterrupted runs of the program are."""
    EXACT_STATE = "exact-state"
    """The same values, but something recorded that can break bits differs; it is listed."""
    RESHARDED = "resharded"
    """The same values on another topology; the order of additions differs."""
    WARM_RESTART = "warm-restart"
    """Weights, but not all of the training state: fresh moments, or parts left out."""
    WEIGHTS_ONLY = "weights-only"
    """Nothing but weights was asked for."""


@dataclass(slots=True, kw_only=True)
class LoadReport:
    """The outcome of a load; every list is empty when nothing of the kind happened.

    `models` and `optimizers` hold the details by key. `not_loaded` names entries of the checkpoint
    that the state did not ask for, `kept` entries of the state that the checkpoint does not hold
    and that were left as they were. `differences` says what can break bits, or why the level is no
    higher. `passed_over` names newer checkpoints that were not taken, and newer saves that were cut
    off, with reasons. `config` maps fields of the model's configuration that differ and do not
    matter to (saved, now), `fingerprint` fields of the topology that differ. `fresh_moments` says
    of each optimizer that starts afresh why it does.
    """

    path: Path
    step: int | None
    epoch: float | None
    checkpoint_id: str | None
    level: Level
    metrics: Mapping[str, Any] = field(default_factory=dict)
    models: dict[str, ModelReport] = field(default_factory=dict)
    optimizers: dict[str, OptimizerReport] = field(default_factory=dict)
    fresh_moments: dict[str, str] = field(default_factory=dict)
    not_loaded: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)
    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    fingerprint: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _restore_rng: Callable[[], list[str]] | None = None

    def restore_rng(self) -> list[str]:
        """Set every random generator to its saved state; what could not be restored.

        Call it once the first batch iterator exists: making one draws from the global generator.
        Empty, and nothing is done, when the checkpoint has no random state.
        """
        return [] if self._restore_rng is None else self._restore_rng()

    def lines(self) -> list[str]:
        """The report as sentences, for a log."""
        lines = [f"{self.path}: step {self.step}, {self.level.value}"]
        lines += [f"passed over: {text}" for text in self.passed_over]
        for key, model in self.models.items():
            lines.append(
                f"{key}: {model.asked} tensors asked for, {model.found} found, "
                f"{model.filled} filled"
            )
            lines += _counted(key, "missing, kept as they were", model.missing)
            lines += _counted(key, "unexpected, ignored", model.unexpected)
            lines += _counted(key, "cast", [str(difference) for difference in model.cast])
            lines += _counted(key, "skipped", [str(difference) for difference in model.skipped])
            lines += _counted(key, "buffers rebuilt", model.rebuilt)
            lines += _counted(key, "untied", [f"{name} from {kept}" for name, kept in model.untied])
        for key, optimizer in self.optimizers.items():
            lines.append(
                f"{key}: state of {optimizer.asked} parameters asked for, {optimizer.found} found, "
                f"{optimizer.filled} filled from {optimizer.tensors} tensors"
            )
            lines += _counted(key, "parameters start fresh", optimizer.missing)
            lines += _counted(key, "parameters of other shapes start fresh", optimizer.reshaped)
            lines += _counted(key, "states ignored", optimizer.unexpected)
            lines += _counted(key, "groups keep their settings", optimizer.new_groups)
            lines += _counted(key, "states of each rank", optimizer.per_rank)
            lines += _counted(key, "states of another topology, afresh", optimizer.not_carried)
            lines += _counted(key, "states quantised anew", optimizer.requantised)
        lines += [f"{key}: fresh moments: {why}" for key, why in self.fresh_moments.items()]
        if self.not_loaded:
            lines.append(f"not asked for: {', '.join(self.not_loaded)}")
        if self.kept:
            lines.append(f"not in the checkpoint, left as they were: {', '.join(self.kept)}")
        lines += [f"differs: {text}" for text in self.differences]
        lines += [f"fingerprint.{k}: saved {a}, now {b}" for k, (a, b) in self.fingerprint.items()]
        lines += [f"model_config.{k}: saved {a!r}, now {b!r}" for k, (a, b) in self.config.items()]
        return lines + self.notes


def _counted(key: str, what: str, names: Any) -> list[str]:
    if not names:
        return []
    shown = ", ".join(str(name) for name in list(names)[:3])
    more = ", ..." if len(names) > 3 else ""
    return [f"{key}: {len(names)} {what}: {shown}{more}"]
