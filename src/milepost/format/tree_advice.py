"""What to save instead of a value that the typed tree refuses."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from milepost.format.tree_records import is_named_tuple, qualified_name

_NATIVES: tuple[type, ...] = (str, bytes, float, int, dict, list, tuple, set, frozenset)


def advice(value: Any) -> str:
    """`what it is; what to save instead`, as the end of a sentence that began with the key."""
    kind = type(value)
    problem = f"{qualified_name(kind)} cannot be stored without pickle"
    return next(f"{problem}; {text}" for applies, text in _ADVICE if applies(value)).format(
        base=next((base.__name__ for base in _NATIVES if isinstance(value, base)), "dict")
    )


def _from(module: str) -> Callable[[Any], bool]:
    return lambda value: type(value).__module__.partition(".")[0] == module


def _is(home: str, *names: str) -> Callable[[Any], bool]:
    def applies(value: Any) -> bool:
        module = sys.modules.get(home)
        classes = tuple(c for n in names if isinstance(c := getattr(module, n, None), type))
        return isinstance(value, classes)

    return applies


# The first row that applies is the advice; attributes are looked up on the class, since
# looking them up on a foreign object may run its code.
_ADVICE: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (_from("omegaconf"), "save omegaconf.OmegaConf.to_container(value)"),
    (_is("torch", "Tensor"), "tensors need a sink that stores them"),
    (_is("torch", "Generator"), "save value.get_state()"),
    (_is("random", "Random"), "save value.getstate()"),
    (_is("numpy.random", "RandomState"), "save value.get_state()"),
    (_is("numpy.random", "Generator"), "save value.bit_generator.state"),
    (_is("numpy.random", "BitGenerator"), "save value.state"),
    (
        lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type),
        "save dataclasses.asdict(value)",
    ),
    (lambda v: hasattr(type(v), "state_dict"), "save value.state_dict()"),
    (lambda v: isinstance(v, type) or callable(v), "it is code; save its name or its arguments"),
    (lambda v: is_named_tuple(type(v)), "save tuple(value)"),
    (lambda v: isinstance(v, (*_NATIVES, Mapping)), "save {base}(value)"),
    (lambda v: isinstance(v, memoryview), "save bytes(value)"),
    (lambda v: hasattr(type(v), "__next__"), "an iterator has no state to save; save list(value)"),
    (lambda v: True, "save its attributes as a dict"),
)
