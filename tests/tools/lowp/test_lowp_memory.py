"""One matrix that is larger than all the memory that a verb takes: rows go through in bands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.lowp.coded_tensors import DEEPSEEK
from tests.tools.rewrite.hub import write_hub
from tests.tools.rewrite.memory import peak_anon_nbytes

MIB = 2**20
NAME = "model.layers.0.mlp.up_proj.weight"
ROWS, COLUMNS = 8192 + 64, 8192  # 129 MiB in bf16
IMPORTS = """
from milepost.tools.cast import cast
from milepost.tools.convert_to_bf16 import convert_to_bf16
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format, Layout
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from milepost.tools.rewrite.options import RewriteOptions
options = RewriteOptions(is_durable=False, threads=2)
"""
QUANTISE = """
layout, scope = Layout(sys.argv[4]), Scope(axis=int(sys.argv[5]))
quantize_to_lowp(
    sys.argv[1], sys.argv[2], format=Format(sys.argv[3]), layout=layout, scope=scope,
    options=options,
)
"""
CONVERT = "convert_to_bf16(sys.argv[1], sys.argv[2], options=options)"
CAST = "cast(sys.argv[1], sys.argv[2], dtype='float16', options=options)"
BOUND = 64 * MIB


def matrix() -> torch.Tensor:
    one = (torch.randn(64, COLUMNS, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    return one.repeat(ROWS // 64, 1)


@pytest.mark.parametrize(
    ("format", "layout", "axis"), [("fp8", "deepseek-fp8", -1), ("nvfp4", "block-scaled", 0)]
)
def test_blocks_that_span_rows_are_quantised_in_bands(
    tmp_path: Path, format: str, layout: str, axis: int
) -> None:
    source = write_hub(tmp_path / "in", {NAME: matrix()}, config={"model_type": "llama"})
    arguments = (source, tmp_path / "out", format, layout, axis)
    assert peak_anon_nbytes(IMPORTS, QUANTISE, *arguments) < BOUND


def test_squares_of_fp8_are_read_in_bands_and_tensors_of_an_archive_by_rows(tmp_path: Path) -> None:
    grid = torch.rand(-(-ROWS // 128), COLUMNS // 128) * 0.01
    tensors = {NAME: matrix().to(torch.float8_e4m3fn), f"{NAME}_scale_inv": grid}
    config = {"model_type": "llama", "quantization_config": DEEPSEEK}
    source = write_hub(tmp_path / "in", tensors, config=config)
    assert peak_anon_nbytes(IMPORTS, CONVERT, source, tmp_path / "out") < BOUND
    torch.save({NAME: matrix()}, tmp_path / "model.pt")
    assert peak_anon_nbytes(IMPORTS, CAST, tmp_path / "model.pt", tmp_path / "cast") < BOUND
