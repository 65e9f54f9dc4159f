"""Families whose experts can be saved one slice for each rank: data, by `model_type`.

Only for these is it known how slices are put together again. A family that is exported in a
namespace of its own, which no slice can have, is listed as such.
"""

from __future__ import annotations

from enum import Enum


class EpSave(Enum):
    """What a family allows."""

    SLICES = "slices"
    HUB_NAMESPACE_ONLY = "hub-namespace-only"
    """Its checkpoints have names that only whole tensors can have."""


_SLICES = (
    "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "cohere2_moe", "cohere2_vision",
    "deepseek_v3", "deepseek_v4", "gemma4", "gemma4_text", "glm4_moe", "glm4_moe_lite",
    "glm5_next", "glm5_next_text", "gpt_oss", "inkling_mm_model", "inkling_text", "laguna",
    "lfm2_moe", "lfm2_vl", "mistral3", "mistral4", "mixtral", "qwen2_moe", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_moe", "zaya",
)  # fmt: skip
EP_FAMILIES: dict[str, EpSave] = {
    **dict.fromkeys(_SLICES, EpSave.SLICES),
    "step3p5": EpSave.HUB_NAMESPACE_ONLY,
    "step3p7": EpSave.HUB_NAMESPACE_ONLY,
}

FUSED_ON_HUB = frozenset(
    {
        "cohere2_moe", "cohere2_vision", "deepseek_v4", "gemma4", "gemma4_text", "glm5_next",
        "glm5_next_text", "gpt_oss", "inkling_mm_model", "inkling_text", "mistral3", "mistral4",
        "qwen3_5_moe", "qwen3_5_moe_text", "zaya",
    }
)  # fmt: skip
"""Families whose merged experts are banks; those of all others are single tensors."""


def supported_ep_merge_model_types() -> tuple[str, ...]:
    """The model types whose per-rank slices can be saved, and merged again."""
    return tuple(sorted(name for name, save in EP_FAMILIES.items() if save is EpSave.SLICES))
