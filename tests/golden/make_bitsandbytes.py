"""Make bitsandbytes.safetensors: small weights that bitsandbytes quantised, and what it makes of
them (`expected.*`). Run in the environment of `make test-8bit`; the committed file is of 0.50.2."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

CASES = {
    "nf4_nested": ("nf4", True, torch.bfloat16, 64, (9, 30)),
    "fp4_nested": ("fp4", True, torch.float16, 64, (9, 30)),
    "nf4": ("nf4", False, torch.float32, 64, (5, 13)),
    "fp4": ("fp4", False, torch.bfloat16, 128, (8, 34)),
}


def main() -> None:
    functional = import_module("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(20)
    tensors: dict[str, Tensor] = {}
    for module, (kind, is_nested, dtype, block, shape) in CASES.items():
        weight = (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        weight[0, :4] = torch.tensor([-0.0, 0.0, -1e-6, 1e-6])
        codes, state = functional.quantize_4bit(
            weight, blocksize=block, compress_statistics=is_nested, quant_type=kind
        )
        name = f"{module}.weight"
        parts = state.as_dict(packed=True).items()
        tensors |= {name: codes, **{f"{name}.{part}": tensor for part, tensor in parts}}
        tensors[f"expected.{name}"] = functional.dequantize_4bit(codes, state)
    weight = torch.randn(5, 12, generator=generator).half()
    codes, scale, _ = functional.int8_vectorwise_quant(weight)
    tensors |= {
        "int8.weight": codes,
        "int8.SCB": scale,
        "int8.weight_format": torch.tensor(0, dtype=torch.uint8),
        "expected.int8.weight": functional.int8_vectorwise_dequant(codes, scale),
    }
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        Path(__file__).with_name("bitsandbytes.safetensors"),
        metadata={"bitsandbytes": version("bitsandbytes")},
    )


if __name__ == "__main__":
    main()
