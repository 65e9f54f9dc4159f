"""`Payload`: the content of a checkpoint that is one set of weights and one training state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Dialect(StrEnum):
    """Which program's habits a checkpoint follows."""

    TRIO = "llm-trio"
    LLM = "llm-v0.0.5"
    LLM_DEMO = "llm-demo"
    LLM_DRAFT = "llm-draft"
    MODERN_LLM = "modern-llm"
    MODERN_LLM_OLDEST = "modern-llm-oldest"
    STATE_DICT = "state-dict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """What any of the dialects holds, under one set of names.

    Tensors are `LazyTensor` or torch tensors, as the tree they were taken from. `epoch` is the
    zero-based last finished epoch. What a file does not record has the default of the field, and
    the field's name is in `defaulted`. `metadata` is all the rest: every recorded value that is
    neither weights nor training state, under the file's own key. `stored_names` leads from a name
    in `model_state` to the name in the file where the two differ (`_orig_mod`). `conflicts` has the
    two values of metadata that stands twice in a file and differs: at the top, and nested; the
    nested one is used.
    """

    model_state: Mapping[str, Any]
    optimizer_state: Any = None
    scheduler_state: Any = None
    scaler_state: Any = None
    extra_state: Any = None
    model_config: Any = None
    epoch: int = 0
    step: int | None = None
    loss: float | None = None
    best_loss: float = math.inf
    metrics: Mapping[str, Any] = field(default_factory=dict)
    format_version: str | None = None
    dialect: Dialect = Dialect.TRIO
    quantization: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    stored_names: Mapping[str, str] = field(default_factory=dict)
    defaulted: frozenset[str] = frozenset()
    conflicts: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    def training_state(self) -> dict[str, Any]:
        """The parts of the training state that there are, by their name in a trio."""
        slots = {name: getattr(self, name) for name in STATE_SLOTS}
        return {name: value for name, value in slots.items() if value is not None}


STATE_SLOTS = ("optimizer_state", "scheduler_state", "scaler_state", "extra_state")
