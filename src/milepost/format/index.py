"""The index of Hugging Face, `model.safetensors.index.json`: which part holds which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milepost.errors import FormatError, InvalidInputError
from milepost.format import strictjson
from milepost.format.places import place, printable, shown

MAX_TOTAL_NBYTES = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """`total_size` is the sum of the bytes of all tensors, headers not counted.

    `metadata` holds the other entries of the document's `metadata`, `other` its other keys;
    both are written back as they were.
    """

    weight_map: dict[str, str]
    total_size: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)


def encode_index(index: Index) -> bytes:
    """The document as transformers writes it: sorted keys, indent 2, a newline at the end.

    `metadata` is always there, since `from_pretrained` fails without it.
    """
    for name, part in index.weight_map.items():
        problem = _name_problem(part)
        if problem is not None:
            raise InvalidInputError(f"{_place(name)}: {problem}")
    metadata = dict(index.metadata)
    if index.total_size is not None:
        metadata["total_size"] = index.total_size
    document = {**index.other, "metadata": metadata, "weight_map": index.weight_map}
    return strictjson.dumps(document, indent=2, sort_keys=True) + b"\n"


def parse_index(raw: bytes, where: str) -> Index:
    """The index in `raw`; FormatError names the place of whatever cannot be right."""
    document = strictjson.loads(raw, where)
    _expect_object(document, where)
    if "weight_map" not in document:
        raise FormatError(f"{where}: weight_map is missing")
    weight_map = document.pop("weight_map")
    _expect_object(weight_map, f"{where}: weight_map")
    for name, part in weight_map.items():
        problem = _name_problem(part)
        if problem is not None:
            raise FormatError(f"{where}: {_place(name)}: {problem}")
    metadata = document.pop("metadata", None)
    if metadata is None:
        metadata = {}
    _expect_object(metadata, f"{where}: metadata")
    total_size = _total_size(metadata.pop("total_size", None), where)
    return Index(weight_map=weight_map, total_size=total_size, metadata=metadata, other=document)


def part_names(stem: str, count: int) -> list[str]:
    """File names of `count` parts.

    >>> part_names("model", 1), part_names("model", 2)[1]
    (['model.safetensors'], 'model-00002-of-00002.safetensors')
    """
    if count < 1:
        raise InvalidInputError(f"{stem}: a model has at least one part, found count={count}")
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _expect_object(value: object, where: str) -> None:
    if not isinstance(value, Mapping):
        raise FormatError(f"{where}: expected an object, found {shown(value)}")


def _place(name: str) -> str:
    return printable(place(["weight_map", name]))


def _name_problem(part: object) -> str | None:
    """Why `part` cannot be the name of a file beside the index, or None."""
    if not isinstance(part, str):
        return f"expected the name of a part, found {shown(part)}"
    if not part or part in (".", "..") or any(c in part for c in "/\\\0"):
        return f"{shown(part)} is no plain file name; parts lie beside their index"
    return None


def _total_size(value: object, where: str) -> int | None:
    """`value` as an integer: older writers left a float there."""
    if value is None:
        return None
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int):
        number = -1
    if not 0 <= number <= MAX_TOTAL_NBYTES:
        raise FormatError(
            f"{where}: metadata.total_size: expected a number of bytes, found {shown(value)}"
        )
    return number
