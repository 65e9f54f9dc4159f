"""Which dialect a decoded `.pt` follows, and its content under one set of names.

Pure: works on the tree of an archive whether its tensors were read or not, and needs no torch.

| dialect             | weights            | optimizer              | recognised by                |
|---------------------|--------------------|------------------------|------------------------------|
| `llm-v0.0.5`        | `model_state`      | `optimizer_state`      | no `metadata`, an `*_state`  |
| `llm-demo`          | `model_state_dict` | `optimizer_state_dict` | the weights' key             |
| `llm-draft`         | `model`            | `optimizer`            | the weights' key             |
| `modern-llm`        | `model_state`      | `optimizer`            | `metadata`, or nothing else  |
| `modern-llm-oldest` | `model`            | `optimizer`            | the weights' key, `metadata` |
| `state-dict`        | the dict itself    | none                   | tensors at the top           |

Defaults where a file records nothing: `epoch` 0, `loss` none, `best_loss` infinite, and none for
every state and for the configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from milepost.errors import FormatError, InvalidInputError
from milepost.format.lazy import LazyTensor, Opaque
from milepost.format.names import strip_compile_prefix, strip_compile_segments
from milepost.layouts.payload import STATE_SLOTS, Dialect, Payload
from milepost.layouts.trio_migrations import LEGACY_VERSION, migrate

WEIGHT_KEYS = ("model_state", "model_state_dict", "model")
NESTED_KEY = "metadata"
_SLOT_KEYS: Mapping[str, tuple[str, ...]] = {
    "optimizer_state": ("optimizer_state", "optimizer_state_dict", "optimizer"),
    "scheduler_state": ("scheduler_state", "scheduler_state_dict", "scheduler"),
    "scaler_state": ("scaler_state", "scaler_state_dict", "scaler"),
    "extra_state": ("extra_state",),
}
_CONFIG_KEYS = ("model_config", "config")
_STEP_KEYS = ("step", "global_step")
_LLM_MARKS = ("optimizer_state", "scheduler_state", "scaler_state", "best_loss")
_METRIC = re.compile(r"(?:.+_)?(?:loss|perplexity|accuracy)")
_TENSOR_TEXT = re.compile(r"tensor\(([^,)]+)[,)].*", re.DOTALL)


def read_payload(tree: Any, *, where: str) -> Payload:
    """The content of a decoded `.pt`. `FormatError` when it is no training checkpoint."""
    dialect = recognise_dialect(tree, where=where)
    if dialect is Dialect.STATE_DICT:
        return _payload(dialect, tree, {}, {}, where=where)
    document = dict(tree)
    if dialect is Dialect.LLM:
        document = migrate(document, where=where, version=LEGACY_VERSION)
        del document["format_version"]  # that of the migrated document, which no file has
    weights = document.pop(next(key for key in WEIGHT_KEYS if key in document))
    nested = document.get(NESTED_KEY)
    if nested is None or isinstance(nested, Mapping):
        document.pop(NESTED_KEY, None)
    nested = nested if isinstance(nested, Mapping) else {}
    slots = _take_slots(document, nested)
    metadata = {**nested, **{key: document[key] for key in document if key not in nested}}
    payload = _payload(dialect, weights, slots, metadata, where=where)
    payload = replace(payload, conflicts=_conflicts(document, nested))
    if dialect is not Dialect.LLM:
        return payload
    added = set(migrate({}, where=where, version=LEGACY_VERSION)) - set(tree)
    return replace(
        payload,
        format_version=LEGACY_VERSION,
        defaulted=payload.defaulted | (added - {"format_version"}),
    )


def recognise_dialect(tree: Any, *, where: str) -> Dialect:
    """The dialect of a decoded `.pt`. `FormatError` says what was found instead of a checkpoint."""
    if not isinstance(tree, Mapping):
        raise FormatError(
            f"{where}: holds a {_kind(tree)}, expected the dict of a training checkpoint",
            path=where,
        )
    key = next((key for key in WEIGHT_KEYS if key in tree), None)
    if key is None:
        if tree and all(_is_state_dict_item(*item) for item in tree.items()):
            return Dialect.STATE_DICT
        found = ", ".join(str(name)[:40] for name in list(tree)[:8]) or "none"
        raise FormatError(
            f"{where}: no weights: a training checkpoint has one of {', '.join(WEIGHT_KEYS)}, or "
            f"is a state dict; the keys here are {found}",
            path=where,
        )
    if not isinstance(tree[key], Mapping):
        raise FormatError(
            f"{where}: {key} is a {_kind(tree[key])}, expected a state dict", path=where
        )
    if key == "model_state_dict":
        return Dialect.LLM_DEMO
    is_nested = isinstance(tree.get(NESTED_KEY), Mapping)
    if key == "model":
        return Dialect.MODERN_LLM_OLDEST if is_nested else Dialect.LLM_DRAFT
    if not is_nested and any(mark in tree for mark in _LLM_MARKS):
        return Dialect.LLM
    return Dialect.MODERN_LLM


def _is_state_dict_item(name: Any, value: Any) -> bool:
    if not isinstance(name, str):
        return False
    return is_tensor(value) or name.rpartition(".")[2] == "_extra_state"


def is_tensor(value: Any) -> bool:
    """Whether `value` is a tensor, read or not; asks without importing torch."""
    return isinstance(value, LazyTensor) or (
        hasattr(value, "untyped_storage") and hasattr(value, "stride")
    )


def _kind(value: Any) -> str:
    return "tensor" if is_tensor(value) else type(value).__name__


def _take_slots(document: dict[str, Any], nested: Mapping[str, Any]) -> dict[str, Any]:
    """The training states by slot, taken out of `document`."""
    slots: dict[str, Any] = {}
    for slot, keys in _SLOT_KEYS.items():
        key = next((key for key in keys if _is_state(key, document, nested)), None)
        if key is not None:
            slots[slot] = document.pop(key)
    return slots


def _is_state(key: str, document: Mapping[str, Any], nested: Mapping[str, Any]) -> bool:
    """Whether the value is a state, not a mere remark such as `optimizer="adamw"`.

    Metadata is repeated at the top, so a value that stands in both places is metadata.
    """
    value = document.get(key)
    if key not in document:
        return False
    if key in STATE_SLOTS or value is None:
        return True
    return isinstance(value, Mapping) and not (key in nested and nested[key] is value)


def _conflicts(rest: Mapping[str, Any], nested: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Metadata whose copy at the top is another value: the file was edited after it was saved."""
    both = {key: (rest[key], nested[key]) for key in nested if key in rest}
    return {key: values for key, values in both.items() if _differ(*values)}


def _differ(a: Any, b: Any) -> bool:
    """Whether two plain values are unequal; of tensors and containers nothing is said."""
    plain = (bool, int, float, str, bytes, type(None))
    if a is b or not (isinstance(a, plain) and isinstance(b, plain)):
        return False
    return a != b and not (a != a and b != b)


def _payload(
    dialect: Dialect,
    weights: Mapping[str, Any],
    slots: Mapping[str, Any],
    metadata: Mapping[str, Any],
    *,
    where: str,
) -> Payload:
    names, stored_names = plain_weights(weights, where=where)
    absent = {slot for slot in STATE_SLOTS if slot not in slots}
    absent |= {key for key in ("epoch", "loss", "best_loss") if key not in metadata}
    if not any(key in metadata for key in _CONFIG_KEYS):
        absent.add("model_config")
    return Payload(
        model_state=names,
        **slots,
        **described({key: plain_records(value) for key, value in metadata.items()}),
        dialect=dialect,
        stored_names=stored_names,
        defaulted=frozenset(absent),
    )


def described(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Payload` that come from its metadata, and the metadata."""
    epoch, step = whole(metadata.get("epoch")), _first(metadata, _STEP_KEYS)
    best_loss = number(metadata.get("best_loss"))
    return {
        "model_config": _first(metadata, _CONFIG_KEYS),
        "epoch": 0 if epoch is None else epoch,
        "step": whole(step),
        "loss": number(metadata.get("loss")),
        "best_loss": math.inf if best_loss is None else best_loss,
        "metrics": _metrics(metadata),
        "format_version": metadata.get("format_version"),
        "quantization": metadata.get("quantization"),
        "metadata": metadata,
    }


def plain_weights(
    weights: Mapping[str, Any], *, where: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """The state dict without `_orig_mod` segments, and the stored name of each changed one.

    `FormatError` when two names become one.
    """
    for name in weights:
        if not isinstance(name, str):
            raise FormatError(
                f"{where}: the state dict has the key {name!r:.50}, expected names", path=where
            )
    try:
        stripped = strip_compile_prefix(weights)
    except InvalidInputError as error:
        raise FormatError(f"{where}: {error}", path=where) from error
    return stripped, stored_names(weights)


def stored_names(names: Iterable[str]) -> dict[str, str]:
    """From the plain name to the one in the file, where the two differ."""
    plain = {strip_compile_segments(name): name for name in names}
    return {new: old for new, old in plain.items() if new != old}


def plain_records(value: Any) -> Any:
    """`value` with the fields of inert instances (`Opaque`) as dicts."""
    match value:
        case Opaque():
            return {key: plain_records(item) for key, item in value.fields().items()}
        case dict() if type(value) is dict:
            return {key: plain_records(item) for key, item in value.items()}
        case list():
            return [plain_records(item) for item in value]
        case tuple() if type(value) is tuple:
            return tuple(plain_records(item) for item in value)
        case _:
            return value


def _first(values: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _metrics(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded `metrics`, or else the numbers that are named like one."""
    recorded = metadata.get("metrics")
    if isinstance(recorded, Mapping):
        return dict(recorded)
    named = {key: number(value) for key, value in metadata.items() if _METRIC.fullmatch(str(key))}
    return {key: value for key, value in named.items() if value is not None}


def number(value: Any) -> float | None:
    """A float of what stands for a number: an int, a tensor of one element, `"tensor(0.5)"`.

    None for what does not, or is a tensor that was not read.
    """
    if isinstance(value, str):
        value = _TENSOR_TEXT.sub(r"\1", value)
    elif is_tensor(value):
        value = None if isinstance(value, LazyTensor) or value.numel() != 1 else value.item()
    if isinstance(value, bool | complex) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def whole(value: Any) -> int | None:
    """The whole part of a number, None where there is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = number(value)
    return int(found) if found is not None and math.isfinite(found) else None
