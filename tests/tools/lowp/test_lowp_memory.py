"""Quantising and dequantising take the same memory whatever the size of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.rewrite.hub import write_hub
from tests.tools.rewrite.memory import peak_anon_nbytes

MIB = 2**20
IMPORTS = """
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.targets import Format, Layout
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from milepost.tools.rewrite.options import RewriteOptions
options = RewriteOptions(is_durable=False, threads=2)
"""
QUANTISE = """
layout = Layout(sys.argv[4])
quantize_to_lowp(
    sys.argv[1], sys.argv[2], format=Format(sys.argv[3]), layout=layout, options=options
)
"""
DEQUANTISE = "dequantize(sys.argv[2], sys.argv[1] + '-back', options=options)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "layout"), [("nvfp4", "compressed-tensors"), ("fp8", "deepseek-fp8")]
)
def test_memory_does_not_grow_with_the_number_of_layers(
    tmp_path: Path, format: str, layout: str
) -> None:
    torch.manual_seed(0)
    one = (torch.randn(4096, 2048) * 0.02).bfloat16()  # 16 MiB
    peaks: dict[int, list[int]] = {}
    for layers in (4, 16):
        names = [
            f"model.layers.{n}.mlp.{leaf}.weight"
            for n in range(layers)
            for leaf in ("gate_proj", "up_proj")
        ]
        source = tmp_path / f"in{layers}"
        write_hub(source, {name: one.clone() for name in names}, config={"model_type": "llama"})
        arguments = (source, tmp_path / f"q{layers}", format, layout)
        peaks[layers] = [
            peak_anon_nbytes(IMPORTS, work, *arguments) for work in (QUANTISE, DEQUANTISE)
        ]
    for few, many in zip(*peaks.values(), strict=True):
        assert many <= few + 32 * MIB, peaks
        if format == "nvfp4":  # rows go through one band after the other
            assert many <= 2 * 16 * MIB + 64 * MIB, peaks
