"""One matrix that is larger than all the memory that a verb takes, in every format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tools.lowp.test_lowp_memory import (
    BOUND,
    COLUMNS,
    CONVERT,
    IMPORTS,
    NAME,
    QUANTISE,
    matrix,
)
from tests.tools.rewrite.hub import write_hub
from tests.tools.rewrite.memory import peak_anon_nbytes

pytestmark = pytest.mark.slow
BANK = "model.layers.0.mlp.experts.gate_up_proj"
CASES = [
    *(("llama", format, "compressed-tensors") for format in ("mxfp8", "mxfp4", "nvfp4", "fp8")),
    ("llama", "mxfp8", "mxfp8-inv"),
    ("llama", "mxfp8", "block-scaled"),
    ("gpt_oss", "mxfp4", "gpt-oss"),
]


@pytest.mark.parametrize(("kind", "format", "layout"), CASES)
def test_a_matrix_is_quantised_and_made_bf16_again_in_bands(
    tmp_path: Path, kind: str, format: str, layout: str
) -> None:
    weight = matrix()
    tensors = {NAME: weight} if kind == "llama" else {BANK: bank(weight)}
    source = write_hub(tmp_path / "in", tensors, config={"model_type": kind})
    arguments = (source, tmp_path / "q", format, layout, -1)
    assert peak_anon_nbytes(IMPORTS, QUANTISE, *arguments) < BOUND
    assert peak_anon_nbytes(IMPORTS, CONVERT, tmp_path / "q", tmp_path / "out") < BOUND


def bank(weight: torch.Tensor) -> torch.Tensor:
    """The same numbers as 32 experts, which GPT-OSS contracts along the rows."""
    return weight[:8192].reshape(32, 256, COLUMNS)
