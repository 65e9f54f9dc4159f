"""Tensors that stay in fp32 when a model is cast to a narrower float: data, by name and family."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ROUTER_FAMILIES = frozenset(
    {
        "axk1", "axk2", "bailing_hybrid", "beam", "deepseek_v2", "deepseek_v3", "deepseek_v32",
        "dots1", "dots3_note", "dots3_note_text", "ernie4_5_moe", "ernie4_5_vl_moe", "exaone_moe",
        "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "glm5_next", "glm5_next_text",
        "glm_moe_dsa", "hy_v3", "kimi_linear", "mimo_v2_flash", "nemotron_h", "sarvam_mla",
        "sarvam_moe", "solar_open",
    }
)  # fmt: skip
_ROUTER = re.compile(r"(?:.*\.)?(?:gate|router|router\.gate)\.weight")
_ALWAYS = re.compile(r"(?:.*\.)?(?:e_score_correction_bias|expert_bias|balancing_biases)")
_INDEXER = r"indexer\.weights_proj\.weight"
_STATE = r"dt_bias|A_log|(?:[qkv]_)?conv1d\.weight"
_CONVOLUTIONS = r"(?:attn|mlp|k|v)_sconv\.(?:conv1d\.)?weight|gate\.(?:global_scale|bias)"
_OF_FAMILY = {
    kind: re.compile(rf"(?:.*\.)?(?:{names})")
    for kind, names in {
        "axk2": _INDEXER,
        "bailing_hybrid": _STATE,
        "deepseek_v32": _INDEXER,
        "deepseek_v4": (
            r"sinks|attn_sink|position_bias|ape|(?:attn_hc|ffn_hc|hc_head)\.\w+"
            r"|hc_(?:attn|ffn|head)_(?:fn|base|scale)|gate\.bias"
        ),
        "glm5_next": rf"{_STATE}|(?:attn|ffn)_hc\.(?:base|scale)|hc_(?:attn|ffn)_(?:base|scale)",
        "glm_moe_dsa": _INDEXER,
        "inkling_mm_model": _CONVOLUTIONS,
        "inkling_text": _CONVOLUTIONS,
        "kimi_linear": r"dt_bias|A_log",
        "longcat_flash": r"router\.classifier\.weight",
    }.items()
}
"""What else a family keeps, under the names of modules and of the hub."""
_OF_FAMILY["glm5_next_text"] = _OF_FAMILY["glm5_next"]
_NORM = re.compile(r"(?:.*\.)?(?:\w*norm\w*|ln_\w+)\.(?:weight|bias)", re.IGNORECASE)


def is_norm(name: str) -> bool:
    """Whether a name is that of a weight or bias of a normalisation.

    >>> is_norm("model.layers.0.self_attn.q_norm.weight"), is_norm("model.norm_head.proj.weight")
    (True, False)
    """
    return _NORM.fullmatch(name) is not None


def stays_fp32(name: str, model_types: Iterable[str]) -> bool:
    """Whether models of these types route or normalise otherwise when the tensor is narrowed.

    Norms and balancing biases in every family; else what transformers keeps in fp32: weights of
    routers, states and convolutions of linear attention, sinks and hyper-connections.
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
