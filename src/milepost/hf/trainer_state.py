"""The content of trainer_state.json, as the Hugging Face Trainer writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Fields of the Trainer's own machinery, at the values that it writes for a plain run.
_UNUSED: dict[str, Any] = {
    "is_hyper_param_search": False,
    "is_local_process_zero": True,
    "is_world_process_zero": True,
    "stateful_callbacks": {},
    "trial_name": None,
    "trial_params": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCheckpoint:
    """The best checkpoint of a run so far: its metric, its step, and its directory."""

    metric: float
    step: int
    path: str


def trainer_state(
    *,
    global_step: int,
    epoch: float = 0.0,
    log_history: Sequence[Mapping[str, Any]] = (),
    best: BestCheckpoint | None = None,
    max_steps: int = 0,
    num_train_epochs: int = 0,
    logging_steps: float = 500,
    eval_steps: float = 500,
    save_steps: float = 500,
    train_batch_size: int | None = None,
    num_input_tokens_seen: int = 0,
    total_flos: float = 0,
) -> tuple[bytes, list[str]]:
    """The file's bytes and notes; the field names are those of `transformers.TrainerState`.

    NaN and infinity become null and a note names their place; numbers of NumPy and torch become
    plain ones; what is no number, text or container becomes its `str`.
    """
    document: dict[str, Any] = {
        **_UNUSED,
        "best_global_step": None if best is None else best.step,
        "best_metric": None if best is None else best.metric,
        "best_model_checkpoint": None if best is None else best.path,
        "epoch": epoch,
        "eval_steps": eval_steps,
        "global_step": global_step,
        "log_history": [dict(entry) for entry in log_history],
        "logging_steps": logging_steps,
        "max_steps": max_steps,
        "num_input_tokens_seen": num_input_tokens_seen,
        "num_train_epochs": num_train_epochs,
        "save_steps": save_steps,
        "total_flos": total_flos,
        "train_batch_size": train_batch_size,
    }
    return encode_trainer_state(document)


def encode_trainer_state(document: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """The bytes of a whole document, such as the fields of a live `TrainerState`, and notes."""
    notes: list[str] = []
    plain = _plain(document, "", notes)
    text = json.dumps(plain, indent=2, sort_keys=True, allow_nan=False) + "\n"
    return text.encode(), notes


def _plain(value: Any, place: str, notes: list[str]) -> Any:
    """`value` as strict JSON can hold it; `place` is where it stands in the document."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v, f"{place}.{k}".lstrip("."), notes) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{place}[{i}]", notes) for i, v in enumerate(value)]
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _finite(float(value), place, notes)
    return _from_array(value, place, notes)


def _from_array(value: Any, place: str, notes: list[str]) -> Any:
    for convert in ("tolist", "item"):
        if callable(getattr(value, convert, None)):
            return _plain(getattr(value, convert)(), place, notes)
    notes.append(f"trainer_state.json: {place}: a {type(value).__name__} is written as text")
    return str(value)


def _finite(value: float, place: str, notes: list[str]) -> float | None:
    if math.isfinite(value):
        return value
    notes.append(f"trainer_state.json: {place}: {value} has no JSON form and is written as null")
    return None
