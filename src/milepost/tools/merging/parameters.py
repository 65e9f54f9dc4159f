"""Values of knobs that differ between tensors: by depth, and by name.

A value is a number; or a list of numbers, spread evenly over the depth of the model and
interpolated between them; or a list of `{"filter": text, "value": ...}`, of which the first counts
whose text is in the tensor's name (none, or "*", fits all).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from milepost.errors import InvalidInputError
from milepost.tools.merging.methods import Method, Values

Setting: TypeAlias = Any
"""A number, a list of numbers, or a list of filters: as YAML has it."""


def value_at(setting: Setting, name: str, depth: float, *, where: str) -> float | None:
    """The value for the tensor `name` at `depth`, 0 to 1; None when no filter fits."""
    if isinstance(setting, bool):
        return float(setting)
    if isinstance(setting, int | float):
        return float(setting)
    if isinstance(setting, Sequence) and not isinstance(setting, str) and setting:
        if all(isinstance(item, Mapping) for item in setting):
            return _filtered(setting, name, depth, where=where)
        if all(isinstance(item, int | float) for item in setting):
            return _interpolated([float(item) for item in setting], depth)
    raise InvalidInputError(
        f"{where}: {setting!r} is neither a number, nor a list of numbers, nor a list of "
        "{filter: text, value: ...}"
    )


def _filtered(
    rules: Sequence[Mapping[str, Any]], name: str, depth: float, *, where: str
) -> float | None:
    for rule in rules:
        unknown = set(rule) - {"filter", "value"}
        if unknown or "value" not in rule:
            raise InvalidInputError(f"{where}: {dict(rule)!r}: expected the keys filter and value")
        text = rule.get("filter")
        if text in (None, "*") or str(text) in name:
            return value_at(rule["value"], name, depth, where=where)
    return None


def _interpolated(points: Sequence[float], depth: float) -> float:
    if len(points) == 1:
        return points[0]
    place = depth * (len(points) - 1)
    left = min(int(place), len(points) - 2)
    return points[left] + (points[left + 1] - points[left]) * (place - left)


def resolve(
    method: Method,
    shared: Sequence[Mapping[str, Setting]],
    each: Sequence[Sequence[Mapping[str, Setting]]],
    name: str,
    depth: float,
    seed: int,
) -> Values:
    """The knobs of one tensor.

    Of the levels in `shared`, and in `each` model's own before them, the first with a value counts.
    """

    def found(parameter: str, levels: Sequence[Mapping[str, Setting]]) -> float:
        spec = method.parameters[parameter]
        for level in levels:
            if level.get(parameter) is None:
                continue
            value = value_at(level[parameter], name, depth, where=parameter)
            if value is not None:
                spec.check(parameter, value)
                return value
        return spec.default

    return Values(
        each={
            parameter: [found(parameter, [*own, *shared]) for own in each]
            for parameter, spec in method.parameters.items()
            if spec.each
        },
        shared={
            parameter: found(parameter, shared)
            for parameter, spec in method.parameters.items()
            if not spec.each
        },
        seed=seed,
    )
