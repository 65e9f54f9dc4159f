"""Tensors that stay in fp32 when a model is cast to a narrower float: data, by name and family."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ROUTER_FAMILIES = frozenset(
    {
        "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe",
        "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "kimi_linear",
        "mimo_v2_flash", "nemotron_h", "solar_open",
    }
)  # fmt: skip
_ROUTER = re.compile(r"(?:.*\.)?(?:gate|router|router\.gate)\.weight")
_ALWAYS = re.compile(r"(?:.*\.)?(?:e_score_correction_bias|expert_bias|balancing_biases)")
_OF_FAMILY = {"kimi_linear": re.compile(r"(?:.*\.)?(?:dt_bias|A_log)")}
_NORM = re.compile(r"(?:.*\.)?(?:\w*norm\w*|ln_\w+)\.(?:weight|bias)", re.IGNORECASE)


def is_norm(name: str) -> bool:
    """Whether a name is that of a weight or bias of a normalisation.

    >>> is_norm("model.layers.0.self_attn.q_norm.weight"), is_norm("model.norm_head.proj.weight")
    (True, False)
    """
    return _NORM.fullmatch(name) is not None


def stays_fp32(name: str, model_types: Iterable[str]) -> bool:
    """Whether models of these types route or normalise otherwise when the tensor is narrowed.

    Norms and balancing biases in every family; weights of routers where transformers keeps them.
    """
    if is_norm(name) or _ALWAYS.fullmatch(name):
        return True
    for kind in model_types:
        own = _OF_FAMILY.get(kind)
        if own is not None and own.fullmatch(name):
            return True
        if kind in _ROUTER_FAMILIES and _ROUTER.fullmatch(name):
            return True
    return False
