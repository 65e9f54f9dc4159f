"""How families of mixture-of-experts models name their experts on disk: data, by `model_type`.

Two forms of one family hold the same numbers: one tensor for each expert and projection
(`experts.3.gate_proj.weight` [I, H]), and fused banks (`experts.gate_up_proj` [E, 2I, H], gate
half first, `experts.down_proj` [E, H, I]). Families without a form for each expert, or whose banks
are transposed or interleaved, are listed with the reason. Nothing here looks at shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

Rename = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Projections of one expert as hub checkpoints of a family name them.

    `gate` is None for experts without a gate, whose banks are `experts.up_proj` [E, I, H] and
    `experts.down_proj`. `renames` lead from the names that modules of transformers have to those of
    the hub, for the tensors of a layer whose banks have module names: (text in the name, its
    replacement).
    """

    gate: str | None
    up: str
    down: str
    renames: tuple[Rename, ...] = ()

    @property
    def leaves(self) -> tuple[str, ...]:
        """The projections in the order gate, up, down."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


_PROJ = ExpertNames(gate="gate_proj", up="up_proj", down="down_proj")
_W = ExpertNames(gate="w1", up="w3", down="w2")
_SPARSE = ExpertNames(gate="w1", up="w3", down="w2", renames=((".mlp.", ".block_sparse_moe."),))


def _proj(*renames: Rename) -> ExpertNames:
    return ExpertNames(gate="gate_proj", up="up_proj", down="down_proj", renames=renames)


EXPERT_NAMES: dict[str, ExpertNames] = {
    **dict.fromkeys(
        (
            "afmoe", "axk1", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "cohere2_moe",
            "cohere2_vision", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "flex_olmo",
            "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "glm5_next",
            "glm5_next_text", "glm_moe_dsa", "hunyuan_v1_moe", "jamba", "longcat_flash",
            "mimo_v2_flash", "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe",
            "qwen3_next", "qwen3_omni_moe", "solar_open",
        ),
        _PROJ,
    ),
    **dict.fromkeys(("deepseek_v4", "lfm2_moe", "lfm2_vl"), _W),
    **dict.fromkeys(("kimi_linear", "minimax", "minimax_m2", "minimax_m3_vl", "mixtral"), _SPARSE),
    "phimoe": ExpertNames(
        gate="w1",
        up="w3",
        down="w2",
        renames=((".mlp.router.", ".mlp.gate."), (".mlp.", ".block_sparse_moe.")),
    ),
    "ernie4_5_moe": _proj((".mlp.gate.moe_statics.", ".mlp.moe_statics.")),
    "exaone_moe": _proj((".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias")),
    "hy_v3": _proj(
        (".mlp.gate.weight", ".mlp.router.gate.weight"),
        (".mlp.e_score_correction_bias", ".mlp.expert_bias"),
        (".mlp.shared_experts.", ".mlp.shared_mlp."),
    ),
    "laguna": _proj(
        (".mlp.gate.e_score_correction_bias", ".mlp.experts.e_score_correction_bias"),
        (".mlp.shared_experts.", ".mlp.shared_expert."),
    ),
    "nemotron_h": ExpertNames(gate=None, up="up_proj", down="down_proj"),
}  # fmt: skip

_TRANSPOSED = "its banks are fused on the hub, and transposed"
_FUSED = "its hub checkpoints have fused banks, and no names for single experts"
NO_EXPERT_NAMES: dict[str, str] = {
    "gpt_oss": "its banks are fused on the hub, transposed, gate and up interleaved, with biases",
    **dict.fromkeys(
        ("aria", "aria_text", "llama4", "llama4_text", "qwen3_vl_moe", "qwen3_vl_moe_text"),
        _TRANSPOSED,
    ),
    **dict.fromkeys(
        (
            "dbrx", "gemma4", "gemma4_text", "granitemoe", "granitemoehybrid", "granitemoeshared",
            "jetmoe", "mistral3", "mistral4", "zaya",
        ),
        _FUSED,
    ),
    **dict.fromkeys(("inkling_mm_model", "inkling_text"), "its banks interleave gate and up"),
    **dict.fromkeys(
        ("step3p5", "step3p7"), "its experts are stacks of a layer, gate and up apart (moe.*)"
    ),
}  # fmt: skip
"""Families whose experts have no names of their own on the hub, and what they have."""

BANK = re.compile(
    r"(?P<prefix>(?:.*\.)?(?:experts|routed_experts))\.(?P<leaf>[a-z_0-9]+?)"
    r"(?P<bias>_bias)?(?:\.(?P<suffix>weight|bias))?"
)
"""A name of a bank: `<prefix>.gate_up_proj`, with `_bias`, or with a last part `.weight`."""

EXPERT = re.compile(
    r"(?P<prefix>(?:.*\.)?(?:experts|routed_experts))\.(?P<number>\d+)\.(?P<leaf>\w+)\.(?P<kind>\w+)"
)
"""A name of one expert's tensor."""

GATE_UP = "gate_up_proj"
DOWN = "down_proj"
UP = "up_proj"


def expert_names(model_types: Iterable[str]) -> ExpertNames | None:
    """The names of the first model type that has any."""
    return next((EXPERT_NAMES[kind] for kind in model_types if kind in EXPERT_NAMES), None)


# Readers that know one form of a family only (vLLM 0.33, SGLang 0.5.23).
_SINGLE_ONLY: dict[str, frozenset[str]] = {
    "vLLM": frozenset(
        {
            "axk1", "bailing_moe_linear", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "hy_v3",
            "longcat_flash", "mimo_v2_flash", "nemotron_h",
        }
    ),
    "SGLang": frozenset(
        {
            "ernie4_5_moe", "exaone_moe", "hunyuan_v1_moe", "kimi_linear", "longcat_flash",
            "minimax_m2", "mixtral", "nemotron_h", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
            "qwen3_next",
        }
    ),
}  # fmt: skip


def serving_notes(model_types: Iterable[str], names: Iterable[str]) -> list[str]:
    """What servers that read experts in one spelling only will not find among `names`."""
    kinds = list(model_types)
    known = list(names)
    banks = [name for name in known if _is_bank(name)]
    notes = []
    for server, families in _SINGLE_ONLY.items():
        hit = [kind for kind in kinds if kind in families]
        if banks and hit:
            notes.append(
                f"{server} reads experts of {hit[0]} one by one only, and {banks[0]} is fused: "
                "serve the output of milepost unfuse-moe-experts"
            )
    names_of = expert_names(kinds)
    if names_of is not None and names_of.renames and ".block_sparse_moe." in names_of.renames[-1]:
        wrong = [name for name in known if ".mlp.experts." in name]
        if wrong:
            notes.append(
                f"servers look for .block_sparse_moe.experts. in a {kinds[0]} model, and "
                f"{wrong[0]} has the name that transformers uses in memory"
            )
    return notes


def _is_bank(name: str) -> bool:
    found = BANK.fullmatch(name)
    return found is not None and found["leaf"] in (GATE_UP, DOWN)
