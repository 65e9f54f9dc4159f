"""The state that the benchmarks save and load: the shapes of a Llama, bf16, of a given size.

Filled with random bytes, not initialised: that takes seconds less, and no file system or disk can
make anything of them. Bit patterns that are NaN are left out.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import torch

from milepost.engine.source import memory_of

LAYERS = 24
HEAD = 64


def _sizes(nbytes: int) -> tuple[int, int, int]:
    """Hidden size, intermediate size and vocabulary for about `nbytes` of bf16."""
    hidden = HEAD
    while _layers_nbytes(hidden + HEAD) <= 0.94 * nbytes:
        hidden += HEAD
    rest = nbytes - _layers_nbytes(hidden)
    return hidden, _intermediate(hidden), max(256, rest // (4 * hidden))


def _intermediate(hidden: int) -> int:
    return 11 * hidden // 4


def _layers_nbytes(hidden: int) -> int:
    return 2 * LAYERS * (4 * hidden**2 + 3 * hidden * _intermediate(hidden) + 2 * hidden)


def llm_shapes(nbytes: int) -> dict[str, tuple[int, ...]]:
    """219 tensors: 9 a layer, input and output embedding, the last norm."""
    hidden, inner, vocabulary = _sizes(nbytes)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}


def llm_tensors(nbytes: int) -> dict[str, torch.Tensor]:
    """Tensors of the `llm_shapes`, filled."""
    shapes = llm_shapes(nbytes)
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    for number, tensor in enumerate(tensors.values()):
        fill(tensor, number)
    return tensors


def fill(tensor: torch.Tensor, seed: int) -> None:
    """Random finite bits, the same for the same seed."""
    generator = np.random.Generator(np.random.SFC64(seed))
    view = np.frombuffer(memory_of(tensor.detach()), dtype=np.uint8)
    view[:] = np.frombuffer(generator.bytes(view.nbytes), dtype=np.uint8)
    view[1::2] &= 0xBF  # an exponent that is not all ones


def llama(nbytes: int) -> Any:
    """A `LlamaForCausalLM` with about `nbytes` of bf16 weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging as their_logging

    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    # DCP warns that it runs in one process, which is what is measured.
    warnings.filterwarnings("ignore", module=r"torch\.distributed")
    hidden, inner, vocabulary = _sizes(nbytes)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocabulary,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    rotary = model.model.rotary_emb
    model.to_empty(device="cpu")
    # Not parameters: rebuilt, as `to_empty` leaves them as they come.
    model.model.rotary_emb = type(rotary)(config)
    for number, parameter in enumerate(model.parameters()):
        fill(parameter, number)
    return model


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW in the middle of a training: both moments of every parameter are there, as bf16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for number, parameter in enumerate(model.parameters()):
        moments = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        for offset, moment in enumerate(moments.values()):
            fill(moment, 1000 + 2 * number + offset)
        optimizer.state[parameter] = {"step": torch.tensor(1000.0), **moments}
    return optimizer


def nbytes_of(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
