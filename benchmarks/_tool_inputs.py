"""Checkpoints of any size that after-training verbs read, all of the same few matrices.

Layers are written one after the other, so that an input of 8 GiB takes no memory to make.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from _common import MIB

PARTS_NBYTES = 128 * MIB
HIDDEN, INNER, EXPERTS, WORDS = 1024, 4096, 8, 300

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
FP8: dict[str, Any] = {
    **LLAMA,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
QWEN_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": EXPERTS,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": HIDDEN // 2,
}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_local_experts": EXPERTS,
    "quantization_config": {"quant_method": "mxfp4"},
}

SINKS: dict[str, Any] = {"model_type": "gpt_oss"}
QWEN_TEXT: dict[str, Any] = {**LLAMA, "model_type": "qwen3_5_text", "tie_word_embeddings": False}
QWEN_VISION: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": QWEN_TEXT,
    "vision_config": {},
}
EP_RANKS = 2

Named = Iterator[tuple[str, Tensor]]


def _filled(*shape: int, seed: int) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def _layers() -> Iterator[str]:
    number = 0
    while True:
        yield f"model.layers.{number}."
        number += 1


def llama(*, seed: int = 0) -> Named:
    """Layers of 32 MiB in bf16; the largest matrix has 8 MiB."""
    square, wide = _filled(HIDDEN, HIDDEN, seed=seed), _filled(INNER, HIDDEN, seed=seed + 1)
    tall = wide.T.contiguous()
    for prefix in _layers():
        for leaf in ("q", "k", "v", "o"):
            yield f"{prefix}self_attn.{leaf}_proj.weight", square
        yield f"{prefix}mlp.gate_proj.weight", wide
        yield f"{prefix}mlp.up_proj.weight", wide
        yield f"{prefix}mlp.down_proj.weight", tall
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)


def tuned_llama() -> Named:
    """As `llama`, every fourth matrix of the MLPs with other values."""
    other = _filled(INNER, HIDDEN, seed=9)
    for number, (name, tensor) in enumerate(llama()):
        yield name, other if number % 36 == 4 else tensor


def fp8_llama() -> Named:
    """The matrices in FP8, a scale for each 128 x 128; norms as they are."""
    for name, tensor in llama():
        if tensor.dim() == 1:
            yield name, tensor
            continue
        yield name, tensor.to(torch.float8_e4m3fn)
        yield f"{name}_scale_inv", torch.rand(tensor.shape[0] // 128, tensor.shape[1] // 128)


def mxfp4_experts() -> Named:
    """Banks of GPT-OSS of 16 and 8 MiB in bf16, 4 bits each."""
    for prefix in _layers():
        for leaf, rows in (("gate_up_proj", 2 * HIDDEN), ("down_proj", HIDDEN)):
            stem, blocks = f"{prefix}mlp.experts.{leaf}", HIDDEN // 2 // 32
            yield f"{stem}_blocks", torch.randint(0, 255, (EXPERTS, rows, blocks, 16)).byte()
            yield f"{stem}_scales", torch.full((EXPERTS, rows, blocks), 120, dtype=torch.uint8)


def banks() -> Named:
    """Fused banks of 16 and 8 MiB."""
    wide = _filled(EXPERTS, HIDDEN, HIDDEN, seed=3)
    narrow = _filled(EXPERTS, HIDDEN, HIDDEN // 2, seed=4)
    for prefix in _layers():
        yield f"{prefix}mlp.experts.gate_up_proj", wide
        yield f"{prefix}mlp.experts.down_proj", narrow


def single_experts() -> Named:
    """The same experts one by one."""
    one = _filled(HIDDEN // 2, HIDDEN, seed=5)
    turned = one.T.contiguous()
    for prefix in _layers():
        for expert in range(EXPERTS):
            for leaf in ("gate_proj", "up_proj"):
                yield f"{prefix}mlp.experts.{expert}.{leaf}.weight", one
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", turned


def ep_slices() -> Named:
    """The experts as the ranks of an expert-parallel run write them, input dim first."""
    count = EXPERTS // EP_RANKS
    wide = _filled(count, HIDDEN, HIDDEN, seed=3)
    narrow = _filled(count, HIDDEN // 2, HIDDEN, seed=4)
    for prefix in _layers():
        for rank in range(EP_RANKS):
            yield f"{prefix}mlp.experts.gate_up_proj.shard_{rank}", wide
            yield f"{prefix}mlp.experts.down_proj.shard_{rank}", narrow


def with_sinks() -> Named:
    """As `llama`, with attention sinks in every layer."""
    for name, tensor in llama():
        yield name, tensor
        if name.endswith("o_proj.weight"):
            stem = name.removesuffix("o_proj.weight")
            yield f"{stem}sinks", torch.ones(16, dtype=torch.bfloat16)


def with_tower() -> Named:
    """As `llama`, inside a model that has a block of a vision tower for each layer.

    Blocks are small: as many layers as `llama` has make an input of a given size.
    """
    block = _filled(HIDDEN // 32, HIDDEN, seed=8)
    for name, tensor in llama():
        inner = name.removeprefix("model.")
        if inner.endswith("q_proj.weight"):
            yield f"model.visual.blocks.{inner.split('.')[1]}.weight", block
        yield f"model.language_model.{inner}", tensor


def write_adapter(place: Path, base: Path) -> None:
    """LoRA factors of rank 8 for two matrices of every layer of a `llama`."""
    held = {}
    for layer in range(json.loads((base / "config.json").read_text())["num_hidden_layers"]):
        for leaf, rows in (("self_attn.q_proj", HIDDEN), ("mlp.up_proj", INNER)):
            stem = f"base_model.model.model.layers.{layer}.{leaf}"
            held[f"{stem}.lora_A.weight"] = _filled(8, HIDDEN, seed=10)
            held[f"{stem}.lora_B.weight"] = _filled(rows, 8, seed=11)
    place.mkdir()
    save_file(held, place / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "up_proj"],
        "base_model_name_or_path": str(base),
    }
    (place / "adapter_config.json").write_text(json.dumps(settings))


def write_input(
    place: Path,
    tensors: Named,
    config: dict[str, Any],
    nbytes: int,
    *,
    index: dict[str, Any],
) -> None:
    """A hub directory of about `nbytes`: whole layers, in parts that are written one by one.

    `index` is the metadata of its index.
    """
    place.mkdir(parents=True)
    parts = _Parts(place)
    layers = 0
    for name, tensor in tensors:
        number = next(int(piece) for piece in name.split(".") if piece.isdigit())
        if number > layers and parts.nbytes >= nbytes:
            break
        layers = number
        parts.add(name, tensor)
    if "vocab_size" in config or "vision_config" in config:
        inside = "language_model." if "vision_config" in config else ""
        parts.add(f"model.{inside}embed_tokens.weight", _filled(WORDS, HIDDEN, seed=6))
        parts.add("lm_head.weight", _filled(WORDS, HIDDEN, seed=7))
        parts.add(f"model.{inside}norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16))
        _write_tokenizer(place)
    parts.finish(index)
    document = {**config, "num_hidden_layers": layers + 1}
    (place / "config.json").write_text(json.dumps(document))


class _Parts:
    """Weight files of a hub directory, one in memory at a time."""

    def __init__(self, place: Path) -> None:
        self.nbytes = 0
        self._place = place
        self._files = 0
        self._where: dict[str, str] = {}
        self._held: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self._held[name] = tensor.clone()
        self.nbytes += tensor.nbytes
        if sum(each.nbytes for each in self._held.values()) >= PARTS_NBYTES:
            self._flush()

    def _flush(self) -> None:
        self._files += 1
        part = f"model-{self._files:05d}.safetensors"
        save_file(self._held, self._place / part, metadata={"format": "pt"})
        self._where |= dict.fromkeys(self._held, part)
        self._held.clear()

    def finish(self, metadata: dict[str, Any]) -> None:
        if self._held:
            self._flush()
        index = {"metadata": metadata, "weight_map": self._where}
        (self._place / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(place: Path) -> None:
    """Characters as bytes, and words that fill the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"<{number}>" for number in range(WORDS - len(letters)))]
    made = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(place / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[-1]}
    (place / "tokenizer_config.json").write_text(json.dumps(config))


def link(place: Path, source: Path) -> None:
    """The same checkpoint under another name."""
    place.mkdir()
    for path in source.iterdir():
        os.link(path, place / path.name)
