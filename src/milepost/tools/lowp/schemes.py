"""What config.json says about quantised weights: the method, and the blocks of each module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milepost.errors import InvalidInputError
from milepost.tools.rewrite.source import Source

KEY = "quantization_config"
_KEYS = (KEY, "compression_config")
"""The second is what compressed-tensors called it at first."""
BITSANDBYTES = "bitsandbytes"
BITSANDBYTES_STATE = f".quant_state.{BITSANDBYTES}__"
"""Between the name of a weight of 4 bits and its type, in the name of its state."""
_KNOWN = frozenset(
    {"fp8", "mxfp8", "mxfp4", "compressed-tensors", "block_scaled", "modelopt", BITSANDBYTES}
)

_CODES = ("F8_", "F6_", "F4", "U8", "I8")
_PACKED = (".qweight", ".weight_packed")

Block = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """`document` is the quantization_config, empty for a checkpoint that states none."""

    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str | None:
        return _method_of(self.document)

    def block_of(self, module: str) -> Block | None:
        """Rows and columns that share a scale in the weight of `module`; None where the config
        states no blocks: then one scale is for a row or for all."""
        stated = self.document.get("weight_block_size")
        if stated is None:
            weights = self._weights_of(module)
            stated = weights.get("block_structure")
            group = weights.get("group_size")
            if stated is None and isinstance(group, int) and group > 0:
                stated = (1, group)
        if isinstance(stated, str):  # an old spelling: "128x128"
            stated = [int(part) for part in stated.split("x")]
        if stated is None:
            return None
        rows, columns = (int(part) for part in stated)
        return rows, columns

    def is_by_row(self, module: str) -> bool:
        """Whether the config states one scale for each row of the weight of `module`."""
        return self._weights_of(module).get("strategy") == "channel"

    def _weights_of(self, module: str) -> Mapping[str, Any]:
        """`weights` of the config group that is for a module: by its name first, then by class."""
        groups = self.document.get("config_groups")
        found = list(groups.values()) if isinstance(groups, Mapping) else []
        by_name = [g for g in found if any(_fits(module, t) for t in g.get("targets") or ())]
        by_class = [g for g in found if any(_is_class(t) for t in g.get("targets") or ())]
        for group in [*by_name, *by_class]:
            weights = group.get("weights")
            if isinstance(weights, Mapping):
                return weights
        return {}


def _method_of(document: Mapping[str, Any]) -> str | None:
    found = document.get("quant_method")
    if found is None and (document.get("load_in_4bit") or document.get("load_in_8bit")):
        return BITSANDBYTES  # the one method that transformers had when it stated none
    return found if isinstance(found, str) else None


def _fits(module: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _is_class(target: str) -> bool:
    return not target.startswith("re:") and "." not in target


def scheme_of(source: Source) -> Scheme:
    """The scheme that config.json states, at the top or for the language model.

    `InvalidInputError` for a method whose weights are no floats with scales.
    """
    document = stated_scheme(source)
    scheme = Scheme(document=document if isinstance(document, Mapping) else {})
    _check(scheme, source)
    return scheme


def stated_scheme(source: Source) -> Any:
    """What config.json has about quantised weights, whatever it is; None where it has nothing."""
    stated = (config.get(key) for config in (source.config, source.text_config) for key in _KEYS)
    return next((found for found in stated if found is not None), None)


def quantised_by(source: Source) -> str | None:
    """The method by which weights are quantised, or what codes with scales there are; else None.

    A model that was read from GGUF says so ever after, and has floats.
    """
    stated = stated_scheme(source)
    method = _method_of(stated) if isinstance(stated, Mapping) else stated
    if stated is not None and method != "gguf":
        return str(method)
    for name, tensor in source.tensors.items():
        if tensor.dtype.startswith(_CODES) and not source.tensors.keys().isdisjoint(
            scales_of(name)
        ):
            return tensor.dtype
        if name.endswith(_PACKED):
            return name.rpartition(".")[2]
        if is_of_bitsandbytes(name):
            return BITSANDBYTES
    return None


def is_of_bitsandbytes(name: str) -> bool:
    """Whether a tensor of this name says that weights were quantised by bitsandbytes."""
    return BITSANDBYTES_STATE in name or name.endswith(".SCB")


def scales_of(name: str) -> list[str]:
    """The names that the scale of the 8-bit weight `name` can have."""
    stem = name.removesuffix(".weight")
    found = [f"{name}_scale_inv", f"{name}_scale"]
    return found if stem == name else [*found, f"{stem}.scale", f"{stem}.qscale_weight"]


def _check(scheme: Scheme, source: Source) -> None:
    if scheme.method is not None and scheme.method not in _KNOWN:
        raise InvalidInputError(
            f"{source.path}: quantised by {scheme.method}, which is not known here; known are "
            f"{', '.join(sorted(_KNOWN))}",
            path=source.path,
        )
    if scheme.document.get("transform_config"):
        raise InvalidInputError(
            f"{source.path}: quantised behind transforms (transform_config), which its readers "
            "apply as they compute and floats would be without; dequantise it with the library "
            "that made it",
            path=source.path,
        )


def without_scheme(document: dict[str, Any]) -> list[str]:
    """Take what says that weights are quantised out of the content of a config.json."""
    told = []
    for place in (document, document.get("text_config")):
        if isinstance(place, dict):
            gone = [key for key in (*_KEYS, "expert_dtype") if key in place]
            told += [f"config.json: {key} is gone" for key in gone]
            for key in gone:
                del place[key]
    return told
