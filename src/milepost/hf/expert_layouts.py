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
from typing import Any

Rename = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Projections of one expert as hub checkpoints of a family name them.

    `gate` is None for experts without a gate, whose banks are `experts.up_proj` [E, I, H] and
    `experts.down_proj`. `renames` lead from the names that modules of transformers have to those of
    the hub, for the tensors of a layer whose banks have module names: (text in the name, its
    replacement). `everywhere` does so in all layers and outside of them: (regular expression, its
    replacement). `parts` are ends of module names whose tensor the hub has in equal parts along
    dim 0, and the ends of those.
    """

    gate: str | None
    up: str
    down: str
    renames: tuple[Rename, ...] = ()
    everywhere: tuple[Rename, ...] = ()
    parts: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def leaves(self) -> tuple[str, ...]:
        """The projections in the order gate, up, down."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    def on_hub(self, name: str, *, has_experts: bool) -> tuple[str, ...]:
        """What the hub calls a tensor of a module: its parts, where it is in parts there.

        Names of the hub stay. `has_experts` says whether its layer has banks.

        >>> EXPERT_NAMES["mixtral"].on_hub("model.layers.0.mlp.gate.weight", has_experts=True)
        ('model.layers.0.block_sparse_moe.gate.weight',)
        """
        if has_experts:
            for old, new in self.renames:
                name = name.replace(old, new)
        for pattern, new in self.everywhere:
            name = re.sub(pattern, new, name)
        for end, ends in self.parts:
            if name.endswith(end):
                return tuple(name.removesuffix(end) + part for part in ends)
        return (name,)


_PROJ = ExpertNames(gate="gate_proj", up="up_proj", down="down_proj")
_W = ExpertNames(gate="w1", up="w3", down="w2")
_SPARSE = ExpertNames(gate="w1", up="w3", down="w2", renames=((".mlp.", ".block_sparse_moe."),))


def _proj(*renames: Rename, **more: Any) -> ExpertNames:
    return ExpertNames(gate="gate_proj", up="up_proj", down="down_proj", renames=renames, **more)


_CONVOLUTIONS = ((".conv1d.weight", tuple(f".{part}_conv1d.weight" for part in "qkv")),)
_DEEPSEEK_V4: tuple[Rename, ...] = (
    (r"^lm_head\.", "head."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.self_attn\.compressor\.indexer\.scorer\.", ".attn.indexer."),
    (r"\.self_attn\.compressor\.indexer\.q_b_proj\.", ".attn.indexer.wq_b."),
    (r"\.self_attn\.compressor\.indexer\.", ".attn.indexer.compressor."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.attn\.sinks$", ".attn.attn_sink"),
    (r"\.position_bias$", ".ape"),
    (r"\.kv_norm\.", ".norm."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.attn\.([qo])_([ab])_proj\.", r".attn.w\1_\2."),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
)


EXPERT_NAMES: dict[str, ExpertNames] = {
    **dict.fromkeys(
        (
            "afmoe", "bailing_moe", "bailing_moe_linear", "cohere2_moe",
            "cohere2_vision", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "flex_olmo",
            "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm4v_moe_text", "glm5_next",
            "glm5_next_text", "glm_moe_dsa", "hunyuan_v1_moe", "jamba", "longcat_flash",
            "olmoe", "qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe",
            "qwen3_next", "qwen3_omni_moe", "solar_open",
        ),
        _PROJ,
    ),
    **dict.fromkeys(("lfm2_moe", "lfm2_vl"), _W),
    **dict.fromkeys(("minimax", "minimax_m2", "minimax_m3_vl", "mixtral"), _SPARSE),
    "axk1": _proj(everywhere=((r"\.mlp\.post_mlp_layernorm\.", ".post_mlp_layernorm."),)),
    "bailing_hybrid": _proj(
        everywhere=(
            (r"^model\.embed_tokens\.", "model.word_embeddings."),
            (r"\.self_attn\.forget_gate\.", ".attention."),
            (r"\.self_attn\.o_proj\.", ".attention.dense."),
            (r"\.self_attn\.", ".attention."),
            (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.gate.expert_bias"),
        ),
        parts=_CONVOLUTIONS,
    ),
    "deepseek_v4": ExpertNames(gate="w1", up="w3", down="w2", everywhere=_DEEPSEEK_V4),
    "kimi_linear": ExpertNames(
        gate="w1",
        up="w3",
        down="w2",
        renames=((".mlp.", ".block_sparse_moe."),),
        everywhere=((r"\.self_attn\.forget_gate\.", ".self_attn."),),
        parts=_CONVOLUTIONS,
    ),
    "mimo_v2_flash": _proj(
        everywhere=((r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),)
    ),
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
    "nemotron_h": ExpertNames(
        gate=None, up="up_proj", down="down_proj", everywhere=((r"^model\.", "backbone."),)
    ),
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

INPUT_FIRST_BANKS = frozenset({"aria", "aria_text", "gpt_oss", "llama4", "llama4_text"})
"""Families whose modules hold banks as a matrix product wants them: [E, H, 2I] and [E, I, H]."""

_GRANITE = ".block_sparse_moe."
BANK_RENAMES: dict[str, tuple[Rename, ...]] = {
    **dict.fromkeys(
        ("aria", "aria_text"),
        (
            (".mlp.experts.gate_up_proj", ".mlp.experts.fc1.weight"),
            (".mlp.experts.down_proj", ".mlp.experts.fc2.weight"),
        ),
    ),
    **dict.fromkeys(
        ("granitemoe", "granitemoehybrid", "granitemoeshared"),
        (
            (f"{_GRANITE}experts.gate_up_proj", f"{_GRANITE}input_linear.weight"),
            (f"{_GRANITE}experts.down_proj", f"{_GRANITE}output_linear.weight"),
            (f"{_GRANITE}router.weight", f"{_GRANITE}router.layer.weight"),
        ),
    ),
}
"""Names of modules, and those that hub checkpoints with banks have for them."""

EXPERT_STACKS = {
    "dbrx": re.compile(r".+\.ffn\.experts\.mlp\.(?:w1|v1|w2)"),
    "jetmoe": re.compile(r".+\.(?:mlp|self_attention\.experts)\.(?:input|output)_linear\.weight"),
}
"""Names of tensors with all experts on dim 0 that are no banks; modules and the hub agree on them.

Those of DBRX have as many rows for each expert as it has inner features.
"""

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
