"""`milepost diff`: what differs between two checkpoints, of any two layouts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.cli.answer import Answer
from milepost.cli.exit_codes import ExitCode
from milepost.cli.text import counted, human, metrics_text, number, table
from milepost.layouts.checkpoint import Checkpoint, TensorInfo

if TYPE_CHECKING:
    from rich.console import Console

    from milepost.tools.compare import Change

_SHOWN = 40


class Compare(Enum):
    HEADERS = "headers"
    VALUES = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A tensor that both hold, in another shape or dtype."""

    name: str
    first: TensorInfo
    second: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`config` maps a dotted field to both values, None where it is missing on that side."""

    config: dict[str, tuple[Any, Any]]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[TensorChange, ...]
    tied: dict[str, tuple[str | None, str | None]]

    def __bool__(self) -> bool:
        parts = (self.config, self.only_first, self.only_second, self.changed, self.tied)
        return any(bool(part) for part in parts)


def diff_answer(first: Path, second: Path, *, compare: Compare = Compare.HEADERS) -> Answer:
    """Compare two checkpoints; what they say of themselves (step, metrics) is shown, not judged."""
    pair = Checkpoint.open(first), Checkpoint.open(second)
    difference = header_difference(*pair)
    changes: list[Change] | None = None
    if compare is Compare.VALUES:
        from milepost.tools.compare import compare_values

        changes = list(compare_values(*pair))
    differs = bool(difference) or any(not change.same for change in changes or ())
    document = {
        "same": not differs,
        "first": _about(pair[0]),
        "second": _about(pair[1]),
        "config": {key: {"first": a, "second": b} for key, (a, b) in difference.config.items()},
        "only_first": difference.only_first,
        "only_second": difference.only_second,
        "changed": [_change_document(change) for change in difference.changed],
        "tied": {key: {"first": a, "second": b} for key, (a, b) in difference.tied.items()},
    }
    if changes is not None:
        document["values"] = [_value_document(change) for change in changes]
    return Answer(
        document=document,
        show=partial(_show, pair=pair, difference=difference, changes=changes),
        exit_code=ExitCode.FINDING if differs else ExitCode.OK,
    )


def header_difference(first: Checkpoint, second: Checkpoint) -> Difference:
    """Compare config, names, shapes, dtypes and ties; no tensor byte is read."""
    mine, theirs = first.tensors(), second.tensors()
    names = [{*tensors, *tied} for tensors, tied in ((mine, first.tied), (theirs, second.tied))]
    return Difference(
        config=_config_difference(_config(first), _config(second)),
        only_first=tuple(name for name in (*mine, *first.tied) if name not in names[1]),
        only_second=tuple(name for name in (*theirs, *second.tied) if name not in names[0]),
        changed=tuple(
            TensorChange(name=name, first=info, second=theirs[name])
            for name, info in mine.items()
            if name in theirs
            and (info.dtype, info.shape) != (theirs[name].dtype, theirs[name].shape)
        ),
        tied={
            name: (first.tied.get(name), second.tied.get(name))
            for name in sorted({*first.tied, *second.tied} & names[0] & names[1])
            if first.tied.get(name) != second.tied.get(name)
        },
    )


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """`config.json` and the configuration that was given at the save, flat, by dotted field."""
    flat: dict[str, Any] = {}
    recorded = checkpoint.info.model_config
    place = checkpoint.path / "config.json"
    if place.is_file():
        try:
            document = json.loads(place.read_bytes())
        except ValueError:
            document = {"config.json": "is not JSON"}
        flat.update(_flat(document, ""))
        if recorded is not None and recorded != document:
            flat.update(_flat(recorded, "model_config."))
    elif recorded is not None:
        flat.update(_flat(recorded, ""))
    return flat


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted names of what is nested; `prefix` ends in a dot or is empty."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}{key}.")
    else:
        yield prefix.removesuffix("."), value


def _config_difference(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Fields that differ; the version of the library that wrote a config is no difference."""
    names = sorted({*first, *second} - {"transformers_version", "_name_or_path"})
    absent = object()
    return {
        name: (first.get(name), second.get(name))
        for name in names
        if first.get(name, absent) != second.get(name, absent)
    }


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    info = checkpoint.info
    return {
        "path": checkpoint.path,
        "layout": checkpoint.layout,
        "step": info.step,
        "epoch": info.epoch,
        "metrics": info.metrics,
        "checkpoint_id": info.checkpoint_id,
    }


def _change_document(change: TensorChange) -> dict[str, Any]:
    return {
        "name": change.name,
        "first": {"dtype": change.first.dtype, "shape": change.first.shape},
        "second": {"dtype": change.second.dtype, "shape": change.second.shape},
    }


def _value_document(change: Change) -> dict[str, Any]:
    return {name: getattr(change, name) for name in type(change).__slots__}


# ---- for people


def _show(
    console: Console,
    *,
    pair: tuple[Checkpoint, Checkpoint],
    difference: Difference,
    changes: Sequence[Change] | None,
) -> None:
    for letter, checkpoint in zip("AB", pair, strict=True):
        console.print(f"{letter}: {_line(checkpoint)}", soft_wrap=True)
    if not difference:
        console.print("config, names, shapes, dtypes: the same")
    if difference.config:
        console.print(f"\nconfig, differing: {counted(len(difference.config), 'field')}")
        rows = table("field", "A", "B")
        for name, (mine, theirs) in difference.config.items():
            rows.add_row(name, _value(mine), _value(theirs))
        console.print(rows)
    _show_names(console, "only in A", difference.only_first, pair[0].tied)
    _show_names(console, "only in B", difference.only_second, pair[1].tied)
    if difference.changed:
        console.print(f"\nshape or dtype, differing: {counted(len(difference.changed), 'tensor')}")
        rows = table("tensor", "A", "B")
        for change in difference.changed[:_SHOWN]:
            rows.add_row(change.name, _kind(change.first), _kind(change.second))
        console.print(rows)
        _show_rest(console, len(difference.changed))
    for name, (mine, theirs) in difference.tied.items():
        console.print(f"tied: {name}: A {mine or 'not tied'}, B {theirs or 'not tied'}")
    if changes is not None:
        _show_values(console, changes)


def _line(checkpoint: Checkpoint) -> str:
    info = checkpoint.info
    step = "" if info.step is None else f", step {info.step}"
    metrics = metrics_text(info.metrics, limit=3)
    size = human(checkpoint.nbytes)
    layout = checkpoint.layout.value
    return f"{checkpoint.path}  {layout}{step}, {size}{', ' if metrics else ''}{metrics}"


def _kind(info: TensorInfo) -> str:
    return f"{info.dtype} {'x'.join(map(str, info.shape)) or 'scalar'}"


def _value(value: Any) -> str:
    text = "-" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _show_names(console: Console, what: str, names: Sequence[str], tied: Mapping[str, str]) -> None:
    if not names:
        return
    console.print(f"\n{what}: {counted(len(names), 'tensor')}")
    for name in names[:_SHOWN]:
        tie = f" (tied to {tied[name]})" if name in tied else ""
        console.print(f"  {name}{tie}", soft_wrap=True)
    _show_rest(console, len(names))


def _show_rest(console: Console, count: int) -> None:
    if count > _SHOWN:
        console.print(f"  and {count - _SHOWN} more (--json lists all)")


def _show_values(console: Console, changes: Sequence[Change]) -> None:
    moved = sorted(
        (change for change in changes if not change.same),
        key=lambda change: -(change.relative if change.relative is not None else float("inf")),
    )
    equal = len(changes) - len(moved)
    console.print(f"\nvalues: {equal} of {len(changes)} tensors are the same, bit for bit")
    if not moved:
        return
    rows = table("tensor", "relative", "largest", "elements", right=("relative", "largest"))
    for change in moved[:_SHOWN]:
        rows.add_row(
            change.name,
            number(change.relative),
            number(change.largest),
            change.note or f"{change.differing:,} of {change.elements:,}",
        )
    console.print(rows)
    _show_rest(console, len(moved))
