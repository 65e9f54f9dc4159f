"""Numbers that a caller hands to a save, made plain before anything is written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from milepost.errors import InvalidInputError

MAX_INTEGER = 2**63 - 1


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float | int | str | None]:
    """Metrics as strict JSON: what is not finite is written as text (`nan`, `inf`, `-inf`)."""
    plain: dict[str, float | int | str | None] = {}
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise InvalidInputError(f"metrics: the name {name!r} is no text")
        number = _number(value, f"metrics[{name!r}]")
        plain[name] = number if math.isfinite(number) else str(number)
    return plain


def recorded_metrics(metrics: Mapping[str, Any]) -> dict[str, float | int | str | None]:
    """Metrics out of a checkpoint that is there, as a manifest has them: text where one is no
    finite number."""
    plain: dict[str, float | int | str | None] = {}
    for name, value in metrics.items():
        is_plain = isinstance(value, int | str) or (
            isinstance(value, float) and math.isfinite(value)
        )
        plain[str(name)] = value if is_plain else str(value)
    return plain


def plain_epoch(epoch: Any) -> float | None:
    """The epoch as a finite number, from 0 up."""
    if epoch is None:
        return None
    number = _number(epoch, "epoch")
    if not math.isfinite(number) or number < 0:
        raise InvalidInputError(f"epoch={epoch!r}: expected a finite number from 0 up")
    return float(number)


def _number(value: Any, where: str) -> float | int:
    """A python number from one of python, NumPy or torch."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except (RuntimeError, ValueError):
        number = None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise InvalidInputError(f"{where}: expected a number, got {value!r:.200}")
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise InvalidInputError(f"{where}: {number} is beyond 64 bits; pass it as a float")
    return number
