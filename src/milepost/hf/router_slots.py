"""Where each family keeps the balancing bias of its routers: data, and how names are matched.

A slot is a tensor of the model that holds one bias for each expert, added to the scores when
experts are chosen. Sidecars name router modules of the model in training, files name tensors as the
hub does, and both may carry wrappers in their names; a router is recognised by its layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from milepost.errors import InvalidInputError

Path: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSlot:
    """The slot of a family, as a path below its layer: in a live model, and in a file of the hub.

    `switch` is a configuration key without which the model has no slot; `router` is then the router
    module, which every layer that could have the slot has. `is_operand`: the router's own product
    adds it, so in a live model it has the dtype of the router's weight.
    """

    runtime: str
    stored: str
    switch: str | None = None
    router: str | None = None
    is_operand: bool = False


def _slot(runtime: str, stored: str | None = None) -> RouterSlot:
    return RouterSlot(runtime=runtime, stored=runtime if stored is None else stored)


_GATE = "mlp.gate.e_score_correction_bias"
_LFM2 = RouterSlot(
    runtime="feed_forward.expert_bias",
    stored="feed_forward.expert_bias",
    switch="use_expert_bias",
    router="feed_forward.gate",
)
_IN_GATE = (
    "axk1", "axk2", "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe", "glm4v_moe_text", "glm5_next", "glm5_next_text", "glm_moe_dsa", "mimo_v2_flash",
    "solar_open",
)  # fmt: skip
ROUTER_SLOTS: Mapping[str, RouterSlot] = {
    **{family: _slot(_GATE) for family in _IN_GATE},
    "afmoe": _slot("mlp.expert_bias"),
    "bailing_hybrid": _slot(_GATE, "mlp.gate.expert_bias"),
    "bailing_moe": _slot("mlp.gate.expert_bias"),
    "bailing_moe_linear": _slot("mlp.gate.expert_bias"),
    "deepseek_v4": _slot(_GATE, "ffn.gate.bias"),
    "ernie4_5_moe": _slot(
        "mlp.gate.moe_statics.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias"
    ),
    "exaone_moe": _slot(_GATE, "mlp.e_score_correction_bias"),
    "gpt_oss": RouterSlot(runtime="mlp.router.bias", stored="mlp.router.bias", is_operand=True),
    "hy_v3": _slot("mlp.e_score_correction_bias", "mlp.expert_bias"),
    "inkling_mm_model": _slot(_GATE, "mlp.gate.bias"),
    "inkling_text": _slot(_GATE, "mlp.gate.bias"),
    "kolibri1": _slot(_GATE, "moe.router.expert_bias"),
    "laguna": _slot(_GATE, "mlp.experts.e_score_correction_bias"),
    "lfm2_moe": _LFM2,
    "lfm2_vl": _LFM2,
    "longcat_flash": _slot("mlp.router.e_score_correction_bias"),
    "minimax_m2": _slot("mlp.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias"),
    "minimax_m3_vl": _slot(_GATE, "block_sparse_moe.e_score_correction_bias"),
    "nemotron_h": _slot("mixer.gate.e_score_correction_bias"),
    "step3p5": _slot(_GATE, "moe.router_bias"),
    "step3p7": _slot(_GATE, "moe.router_bias"),
    "zaya": _slot("mlp.gate.balancing_biases"),
}
"""By `model_type`; families that are not listed have no slot, or one of `SLOT_NAMES`."""

SLOT_NAMES = frozenset({"e_score_correction_bias", "expert_bias", "balancing_biases"})
"""Names that mean a slot in every family."""

SINKS = "sinks"
"""The last part of the name of attention sinks."""

SINK_FAMILIES = frozenset({"gpt_oss"})

# Segments that wrappers put into names, and containers that one model has and another has not:
# with heads or without, text alone or within a model of several kinds of input.
_NEUTRAL = frozenset(
    {
        "_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module",
        "original_attention", "base_model", "base_layer", "modules_to_save", "default",
        "original_module", "model", "language_model", "text_model", "backbone", "decoder",
    }
)  # fmt: skip


class Spelling(Enum):
    """Whose names are looked at."""

    RUNTIME = "runtime"
    STORED = "stored"


def bare(name: str) -> Path:
    """The segments of a name that tell where in a model it is, without wrappers and containers.

    >>> bare("base_model.model.model.layers.3.mlp.gate")
    ('layers', '3', 'mlp', 'gate')
    """
    return tuple(part for part in name.split(".") if part not in _NEUTRAL)


def layer_of(path: Path) -> Path:
    """The part of `path` up to its last number, `("layers", "3")`; empty when it has none."""
    numbers = [index for index, part in enumerate(path) if part.isdecimal()]
    return path[: numbers[-1] + 1] if numbers else ()


def find_slots(names: Iterable[str], model_type: str | None, spelling: Spelling) -> list[str]:
    """Those of `names` that are balancing slots of the family, in their order.

    A file may also spell them as the module does; exports of some families do.
    """
    row = ROUTER_SLOTS.get(model_type or "")
    ends: set[str] = set()
    if row is not None:
        ends = {row.runtime} if spelling is Spelling.RUNTIME else {row.runtime, row.stored}
    return [
        name
        for name in names
        if name.rpartition(".")[2] in SLOT_NAMES
        or any(name == end or name.endswith(f".{end}") for end in ends)
    ]


class SlotIndex:
    """Slots by the router that they belong to, whatever either is called."""

    def __init__(self, slots: Sequence[str]) -> None:
        self._by_path: dict[Path, list[str]] = {}
        self._by_layer: dict[Path, list[str]] = {}
        for name in slots:
            path = bare(name)
            self._by_path.setdefault(path, []).append(name)
            self._by_layer.setdefault(layer_of(path), []).append(name)

    def of_slot(self, name: str) -> list[str]:
        """The slots that are the one called `name` elsewhere: all copies of it, or none."""
        path = bare(name)
        return self._by_path.get(path) or self._unique(name, self._by_layer.get(layer_of(path), []))

    def of_router(self, router: str) -> list[str]:
        """The slot of the router module `router`, every copy of it; empty when it has none."""
        path = bare(router)
        inside = [
            name
            for name in self._by_layer.get(layer_of(path), [])
            if bare(name)[: len(path)] == path
        ]
        found = inside or self._by_layer.get(layer_of(path), [])
        return self._unique(router, found)

    def _unique(self, asked: str, found: list[str]) -> list[str]:
        if len({bare(name) for name in found}) > 1:
            raise InvalidInputError(
                f"balancing bias of {asked}: {', '.join(found[:3])} could all be meant; name the "
                "router by its module in the model"
            )
        return found
