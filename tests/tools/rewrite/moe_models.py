"""Tiny models with experts of every family that transformers can build."""

from __future__ import annotations

from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
PLAIN: dict[str, Any] = {}
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "shared_expert_intermediate_size": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
LFM2 = {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1}
GEMMA4: dict[str, Any] = {
    "enable_moe_block": True,
    "head_dim": 4,
    "global_head_dim": 4,
    "num_global_key_value_heads": 4,
    "top_k_experts": 2,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
DEEPSEEK_V4: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": [
        "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
    ],
    "q_lora_rank": 8,
    "head_dim": 8,
    "o_lora_rank": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
}  # fmt: skip
DBRX: dict[str, Any] = {
    "d_model": 16,
    "n_heads": 4,
    "n_layers": 2,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    "ffn_config": {
        "ffn_hidden_size": 24,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "hidden_size": 16,
    },
}
# Sizes that a family derives from others.
DERIVED = {
    "dbrx": {"hidden_size", "num_hidden_layers", "num_attention_heads"},
    "jetmoe": {"num_attention_heads"},
}
# By model type: what its configuration has besides.
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "afmoe", "cohere2_moe", "dots1", "exaone_moe", "flex_olmo", "glm4_moe",
            "laguna", "minimax", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe",
            "qwen3_moe", "solar_open",
        ),
        PLAIN,
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v3"),
        LATENT,
    ),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), LINEAR),
    "ernie4_5_moe": ERNIE,
    "hunyuan_v1_moe": {"moe_topk": 2, "head_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0, "use_mamba_kernels": False},
    "lfm2_moe": LFM2,
    "aria_text": {"moe_num_experts": 4},
    "axk1": LATENT,
    "bailing_hybrid": {**LATENT, "layer_types": ["linear_attention", "full_attention"]},
    "dbrx": DBRX,
    "deepseek_v4": DEEPSEEK_V4,
    "gemma4_text": GEMMA4,
    "granitemoe": PLAIN,
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "layer_types": ["mamba", "attention"],
    },
    "granitemoeshared": PLAIN,
    "jetmoe": {"kv_channels": 4, "num_key_value_heads": 2},
    # transformers renames dense layers like those with experts, which hub checkpoints do not.
    "kimi_linear": {
        **LATENT,
        "first_k_dense_replace": 0,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "llama4_text": PLAIN,
    # Without the experts that compute nothing, for which transformers keeps rows in one bank only.
    "longcat_flash": {**LATENT, "head_dim": 4, "zero_expert_num": 0},
    "mimo_v2_flash": {"num_attention_heads": 8},
    "nemotron_h": PLAIN,
    "gpt_oss": {"head_dim": 4, "layer_types": ["full_attention"] * 2},
}  # fmt: skip


VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_attention_heads": 2,
    "depth": 1,
    "num_hidden_layers": 1,
    "out_hidden_size": 16,
    "patch_size": 4,
    "image_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "rope_head_dim": 4,
}
ROPE: dict[str, Any] = {
    "head_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
}
# By model type: what the configuration of the text model has besides.
MULTIMODAL: dict[str, dict[str, Any]] = {
    "glm4v_moe": ROPE,
    "llama4": PLAIN,
    "minimax_m3_vl": PLAIN,
    "qwen3_vl_moe": ROPE,
}


def build(kind: str) -> Any:
    """A model of which no two tensors agree."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {key: value for key, value in SIZES.items() if key not in DERIVED.get(kind, ())}
    config: Any = CONFIG_MAPPING[kind](**{**sizes, **FAMILIES[kind]})
    return _filled(transformers.AutoModelForCausalLM, config)


def build_multimodal(kind: str) -> Any:
    """The same with a tower of its own for images."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING[kind](
        text_config={**SIZES, **MULTIMODAL[kind]}, vision_config=VISION, pad_token_id=0
    )
    return _filled(transformers.AutoModelForImageTextToText, config)


def _filled(auto: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = auto.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.01 * torch.rand_like(tensor))
    return model
