"""Tiny random models of the families whose hub checkpoints differ from the model in memory."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from typing import Any

import torch

_DENSE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {
    **_DENSE,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

# Class name without ForCausalLM, and what its configuration gets.
TEXT: dict[str, dict[str, Any]] = {
    "Llama": _DENSE,
    "Qwen3": _DENSE,
    "Qwen2Moe": {**_EXPERTS, "shared_expert_intermediate_size": 12},
    "Qwen3Moe": {**_EXPERTS, "head_dim": 4},
    "Qwen3Next": {
        **_EXPERTS,
        "shared_expert_intermediate_size": 12,
        "head_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
    },
    "Mixtral": _EXPERTS,
    "MiniMaxM2": {**_EXPERTS, "head_dim": 4, "rotary_dim": 4},
    "Phimoe": _EXPERTS,
    "Olmoe": _EXPERTS,
    "FlexOlmo": _EXPERTS,
    "DeepseekV2": {**_LATENT, "topk_method": "greedy", "n_group": 1},
    "DeepseekV3": _LATENT,
    "Glm4Moe": {**_LATENT, "num_key_value_heads": 2, "head_dim": 4},
    "Glm4MoeLite": _LATENT,
    "Dots1": _LATENT,
    "Ernie4_5_Moe": {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "HunYuanMoEV1": {**_EXPERTS, "moe_topk": 2, "head_dim": 4},
    "GraniteMoe": _EXPERTS,
    "GraniteMoeShared": {**_EXPERTS, "shared_intermediate_size": 12},
    "GptOss": {**_EXPERTS, "head_dim": 4},
    "Lfm2Moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Jamba": {
        **_EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
}


_QWEN_VISION = {**_VISION, "depth": 2, "num_heads": 2, "out_hidden_size": 16}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 1e4}
_NO_TOKENS = {"image_token_id": 40, "video_token_id": 41, "vision_start_token_id": 42}

# Class name without ForConditionalGeneration, and what its configuration gets.
MULTIMODAL: dict[str, dict[str, Any]] = {
    "Qwen2_5_VL": {
        "text_config": {**_DENSE, "rope_parameters": _ROPE},
        "vision_config": _QWEN_VISION,
        **_NO_TOKENS,
    },
    "Qwen3VLMoe": {
        "text_config": {
            **_EXPERTS,
            "head_dim": 8,
            "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]},
        **_NO_TOKENS,
    },
    "Gemma3": {
        "text_config": {**_DENSE, "head_dim": 4},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 4,
    },
    "Llava": {
        "text_config": {**_DENSE, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": 40,
    },
}


def make_model(family: str, **overrides: Any) -> Any:
    """A tiny model of `family`, a key of `TEXT` or `MULTIMODAL`."""
    import transformers

    kind = "ForCausalLM" if family in TEXT else "ForConditionalGeneration"
    settings = {**(TEXT | MULTIMODAL)[family], **overrides}
    config = getattr(transformers, f"{family}Config")(**settings)
    return random_model(getattr(transformers, f"{family}{kind}"), config)


def random_model(kind: Any, config: Any) -> Any:
    """A model of random elements, those of norms and biases too, so that no two tensors agree."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.01 * torch.rand_like(tensor))
    return model
