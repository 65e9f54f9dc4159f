"""Weights as bitsandbytes stores them, of random codes, and their values one by one.

Written from the published tables (QLoRA, appendix E; the FP4 of bitsandbytes) and the names of
`QuantState.as_dict(packed=True)`, in Python's own arithmetic: a product of two fp32 is exact in it.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from torch import Tensor

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022833234, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
]  # fmt: skip
SIZES = [0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
FP4 = [*SIZES, *(-size for size in SIZES)]
METHOD = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def fp32(value: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


def blob(document: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8)


def quantised(
    name: str,
    shape: tuple[int, ...],
    *,
    kind: str = "nf4",
    block: int = 64,
    nested: int | None = None,
    dtype: str = "bfloat16",
    storage: torch.dtype = torch.uint8,
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one weight, and what it is in `dtype`. `nested` scales share a scale."""
    generator = torch.Generator().manual_seed(len(name) + block)
    numel = torch.Size(shape).numel()
    codes = torch.randint(0, 256, (-(-numel // 2),), generator=generator, dtype=torch.uint8)
    scales = -(-numel // block)
    document = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": list(shape)}
    table = [fp32(value) for value in (NF4 if kind == "nf4" else FP4)]
    tensors = {name: codes.view(storage)[:, None], f"{name}.quant_map": torch.tensor(table)}
    if nested is None:
        absmax = torch.rand(scales, generator=generator) * 0.1
        tensors[f"{name}.absmax"] = absmax
        largest: list[float] = absmax.tolist()
    else:
        inner = torch.randint(0, 256, (scales,), generator=generator, dtype=torch.uint8)
        steps = torch.linspace(-1, 1, 256) ** 3
        outer = torch.rand(-(-scales // nested), generator=generator) * 0.05
        offset = fp32(0.0625 + 1e-4)
        tensors |= {
            f"{name}.absmax": inner,
            f"{name}.nested_quant_map": steps,
            f"{name}.nested_absmax": outer,
        }
        document |= {
            "nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset,
        }  # fmt: skip
        largest = [
            fp32(fp32(steps[code].item() * outer[i // nested].item()) + offset)
            for i, code in enumerate(inner.tolist())
        ]
    tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = blob(document)
    halves = [half for byte in codes.tolist() for half in (byte >> 4, byte & 15)]
    values = [table[code] * largest[i // block] for i, code in enumerate(halves[:numel])]
    wide = torch.tensor(values, dtype=torch.float64).float()
    return tensors, wide.reshape(shape).to(getattr(torch, dtype))


def eight_bits(module: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """A weight of LLM.int8(), and what it is in fp32."""
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, generator=generator)
    step = fp32(1 / 127)
    values = [
        [fp32(fp32(code * largest) * step) for code in row]
        for row, largest in zip(codes.tolist(), scale.tolist(), strict=True)
    ]
    tensors = {
        f"{module}.weight": codes,
        f"{module}.SCB": scale,
        f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, torch.tensor(values)
