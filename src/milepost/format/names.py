"""Names inside a state dict, without the segments that `torch.compile` puts into them.

A compiled module sits under the attribute `_orig_mod` of its wrapper, so its names carry that
segment: leading when the whole model was compiled, in the middle when a block was. It says nothing
about the tensor, and a name with it fits no plain model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.errors import InvalidInputError

COMPILE_SEGMENT = "_orig_mod"


def strip_compile_segments(name: str) -> str:
    """`name` without its `_orig_mod` segments, wherever they stand.

    >>> strip_compile_segments("layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    if not isinstance(name, str) or COMPILE_SEGMENT not in name:
        return name
    return ".".join(part for part in name.split(".") if part != COMPILE_SEGMENT)


def strip_compile_prefix(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """`state_dict` without the `_orig_mod` segments of its names, wherever they stand.

    `module.` is kept: from a dict alone it cannot be told from a real submodule. The type
    (`OrderedDict`) and `_metadata` are kept. Two names that become one are refused, naming both.

    >>> strip_compile_prefix({"layers.0._orig_mod.weight": 1, "_orig_mod.bias": 2})
    {'layers.0.weight': 1, 'bias': 2}
    """
    stripped: dict[str, Any] = type(state_dict)() if isinstance(state_dict, dict) else {}
    sources: dict[str, str] = {}
    for key, value in state_dict.items():
        name = strip_compile_segments(key)
        if name in sources:
            raise InvalidInputError(
                f"{sources[name]} and {key} both become {name} without {COMPILE_SEGMENT}; "
                f"remove one of them"
            )
        sources[name] = key
        stripped[name] = value
    metadata = getattr(state_dict, "_metadata", None)
    if isinstance(metadata, Mapping):
        stripped._metadata = _strip_metadata(metadata)  # type: ignore[attr-defined]
    return stripped


def _strip_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The versions of the modules under their plain names."""
    renamed: dict[str, Any] = type(metadata)() if isinstance(metadata, dict) else {}
    for key, value in metadata.items():
        name = strip_compile_segments(key)
        if name == key:
            renamed.setdefault(name, value)
        else:  # the inner module's entry counts, not that of its wrapper
            renamed[name] = value
    return renamed
