"""What config.json says about quantised weights: the method, and the blocks of each module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from milepost.errors import InvalidInputError
from milepost.tools.rewrite.source import Source

KEY = "quantization_config"
_KNOWN = frozenset({"fp8", "mxfp8", "mxfp4", "compressed-tensors", "block_scaled", "modelopt"})

Block = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """`document` is the quantization_config, empty for a checkpoint that states none."""

    document: Mapping[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str | None:
        found = self.document.get("quant_method")
        return found if isinstance(found, str) else None

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
    for config in (source.config, source.text_config):
        document = config.get(KEY)
        if isinstance(document, Mapping):
            scheme = Scheme(document=document)
            _check(scheme, source)
            return scheme
    return Scheme()


def _check(scheme: Scheme, source: Source) -> None:
    if scheme.method is not None and scheme.method not in _KNOWN:
        raise InvalidInputError(
            f"{source.path}: quantised by {scheme.method}, which is not known here; known are "
            f"{', '.join(sorted(_KNOWN))}",
            path=source.path,
        )


def without_scheme(document: dict[str, Any]) -> list[str]:
    """Take what says that weights are quantised out of the content of a config.json."""
    told = []
    for place in (document, document.get("text_config")):
        if isinstance(place, dict):
            told += [f"config.json: {key} is gone" for key in (KEY, "expert_dtype") if key in place]
            place.pop(KEY, None)
            place.pop("expert_dtype", None)
    return told
