"""Codes and scales of known values, and hub directories that have them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from milepost.tools.lowp.elements import encode_e4m3
from tests.tools.rewrite.hub import write_hub

DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def codes(*shape: int, seed: int = 0) -> Tensor:
    return encode_e4m3(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 60)


def scales(*shape: int, seed: int = 1) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 0.01 + 1e-4


def packed(*shape: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def written(
    place: Path, tensors: Mapping[str, Tensor], method: Mapping[str, Any] | None, parts: int = 1
) -> Path:
    config: dict[str, Any] = {"model_type": "llama", "torch_dtype": "bfloat16"}
    if method is not None:
        config["quantization_config"] = dict(method)
    return write_hub(place, tensors, config=config, parts=parts)
