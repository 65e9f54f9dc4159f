"""Families whose experts can be saved one slice for each rank: data, by `model_type`.

They are the families whose experts have known names (`hf/expert_layouts.py`): only for these is it
known how slices are put together again. A family that is exported in a namespace of its own, which
no slice can have, is listed as such.
"""

from __future__ import annotations

from enum import Enum

from milepost.hf.expert_layouts import EXPERT_NAMES, NO_EXPERT_NAMES


class EpSave(Enum):
    """What a family allows."""

    SLICES = "slices"
    HUB_NAMESPACE_ONLY = "hub-namespace-only"
    """Its checkpoints have names that only whole tensors can have."""


_OWN_NAMESPACE = frozenset({"step3p5", "step3p7"})
EP_FAMILIES: dict[str, EpSave] = {
    kind: EpSave.HUB_NAMESPACE_ONLY if kind in _OWN_NAMESPACE else EpSave.SLICES
    for kind in sorted(EXPERT_NAMES.keys() | NO_EXPERT_NAMES.keys())
}

FUSED_ON_HUB = frozenset(
    {
        "cohere2_moe", "cohere2_vision", "deepseek_v4", "glm5_next", "glm5_next_text",
        "qwen3_5_moe", "qwen3_5_moe_text",
    }
    | {kind for kind in NO_EXPERT_NAMES if EP_FAMILIES.get(kind) is EpSave.SLICES}
)  # fmt: skip
"""Families whose merged experts are banks; those of all others are single tensors."""


def supported_ep_merge_model_types() -> tuple[str, ...]:
    """The model types whose per-rank slices can be saved, and merged again."""
    return tuple(sorted(name for name, save in EP_FAMILIES.items() if save is EpSave.SLICES))
