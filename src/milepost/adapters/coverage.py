"""Which modules an adapter is for, as its configuration says by the rules of peft."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from milepost.adapters.config import AdapterConfig
from milepost.errors import FormatError
from milepost.format.places import shown

_ANY_LAYER = r".*?\.[^.]*"


def covers(config: AdapterConfig, module: str) -> bool:
    """Whether `module`, a dotted path, is one that `config` says to adapt.

    A configuration that names no modules covers none. `FormatError` for an expression that cannot
    be read.

    >>> document = {"target_modules": ["q_proj"], "layers_to_transform": [0]}
    >>> config = AdapterConfig(
    ...     peft_type="LORA", base=None, lora=None, experts=None, document=document
    ... )
    >>> covers(config, "model.layers.0.self_attn.q_proj")
    True
    >>> covers(config, "model.layers.1.self_attn.q_proj")
    False
    """
    document = config.document
    if _named(document.get("exclude_modules"), module, "exclude_modules"):
        return False
    if any(_fits(rf"(?:.*\.)?{n}(?:\..*)?", module) for n in _texts(document, "modules_to_save")):
        return False
    targets = document.get("target_modules")
    if not _named(targets, module, "target_modules"):
        return False
    layers = document.get("layers_to_transform")
    if isinstance(targets, str) or layers is None or layers == []:
        return True
    number = _layer(module, _texts(document, "layers_pattern"))
    return number is not None and number in (layers if isinstance(layers, list) else [layers])


def _named(names: object, module: str, field: str) -> bool:
    """A text is an expression for whole paths, a list has the ends of paths."""
    if isinstance(names, str):
        return _fits(names, module, field)
    given = names if isinstance(names, Iterable) else ()
    return any(f".{module}".endswith(f".{name}") for name in given)


def _layer(module: str, patterns: Iterable[str]) -> int | None:
    """The number of the layer that a module lies in: the first in its path."""
    befores = [rf"(?:.*?\.)?{pattern}" for pattern in patterns] or [_ANY_LAYER]
    for before in befores:
        found = re.match(rf"{before}\.(?P<number>\d+)\.", module)
        if found is not None:
            return int(found["number"])
    return None


def _texts(document: Any, field: str) -> Iterator[str]:
    value = document.get(field)
    given = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return (item for item in given if isinstance(item, str))


def _fits(pattern: str, module: str, field: str = "modules_to_save") -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise FormatError(
            f"adapter_config.json: {field}: {shown(pattern)} is no regular expression: {error}"
        ) from error
