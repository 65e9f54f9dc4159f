"""Adapters of quantised bases merge onto the floats that `dequantize` makes of them, and say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from tests.tools.adapters.peft_oracle import PLAIN, QUICK, write_adapter
from tests.tools.lowp.four_bits import METHOD, eight_bits
from tests.tools.lowp.four_bits import quantised as four_bits
from tests.tools.lowp.models import save_model
from tests.tools.rewrite.hub import read_hub, same_bits, write_hub

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice

KINDS = ["nf4 of bf16", "nf4 of fp16", "int8 of bf16", "int8 of fp16", "fp8"]


def base_of(kind: str, plain: Path, place: Path) -> Path:
    """The model in `plain`, its linear layers quantised: codes at random, but for fp8."""
    if kind == "fp8":
        scope = Scope(include=["*.self_attn.*_proj.weight"])
        quantize_to_lowp(plain, place, format=Format.FP8, scope=scope, options=QUICK)
        return place
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_hub(plain).items():
        rows, columns = (*tensor.shape, 1)[:2]
        if "proj" not in name:
            made = {name: tensor}
        elif kind.startswith("int8"):
            made, _ = eight_bits(name.removesuffix(".weight"), rows, columns)
        else:
            dtype = float_type_of(kind)
            made, _ = four_bits(name, (rows, columns), dtype=dtype, nested=256)
        tensors |= made
    config = json.loads((plain / "config.json").read_bytes())
    config |= {"dtype": float_type_of(kind), "quantization_config": METHOD}
    return write_hub(place, tensors, config=config, parts=2)


def float_type_of(kind: str) -> str:
    return "float16" if kind.endswith("fp16") else "bfloat16"


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save_model("llama", tmp_path / "plain")


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", plain, **PLAIN)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_is_that_onto_the_output_of_dequantize(
    kind: str, plain: Path, adapter: Path, tmp_path: Path
) -> None:
    base = base_of(kind, plain, tmp_path / "base")
    floats = float_type_of(kind)
    merged: dict[str, Any] = {"options": QUICK}
    report = merge_peft_adapters([adapter], tmp_path / "out", base=base, **merged)
    dequantize(base, tmp_path / "floats", dtype=floats, options=QUICK)
    merge_peft_adapters([adapter], tmp_path / "two", base=tmp_path / "floats", **merged)
    assert same_bits(read_hub(tmp_path / "out"), read_hub(tmp_path / "two"))
    config = json.loads((tmp_path / "out/config.json").read_bytes())
    assert "quantization_config" not in config and config["dtype"] == floats
    method = "compressed-tensors" if kind == "fp8" else "bitsandbytes"
    assert any(
        f"merged onto the dequantised base {base}: 14 weights were quantised ({method})" in note
        for note in report.notes
    )
    manifest = json.loads((tmp_path / "out/milepost.json").read_bytes())
    assert method in json.dumps(manifest["provenance"]["dequantised"])
    wide = {"dtype": "float32", **merged}
    merge_peft_adapters([adapter], tmp_path / "wide", base=base, **wide)
    dequantize(base, tmp_path / "exact", dtype="float32", options=QUICK)
    merge_peft_adapters([adapter], tmp_path / "both", base=tmp_path / "exact", **wide)
    assert same_bits(read_hub(tmp_path / "wide"), read_hub(tmp_path / "both"))


def test_an_output_that_is_not_quantised_says_that_its_base_was_not(
    plain: Path, adapter: Path, tmp_path: Path
) -> None:
    report = merge_peft_adapters([adapter], tmp_path / "out", base=plain, options=QUICK)
    assert f"merged onto {plain} (BF16)" in report.notes


def test_bases_that_cannot_be_dequantised_are_refused(
    plain: Path, adapter: Path, tmp_path: Path
) -> None:
    base = base_of("nf4 of bf16", plain, tmp_path / "base")
    config = json.loads((plain / "config.json").read_bytes())
    tensors = {name: t for name, t in read_hub(base).items() if not name.endswith(".absmax")}
    config["quantization_config"] = METHOD
    torn = write_hub(tmp_path / "torn", tensors, config=config)
    with pytest.raises(InvalidInputError, match=r"without .*q_proj.*\.absmax.*16-bit model"):
        merge_peft_adapters([adapter], tmp_path / "out", base=torn, options=QUICK)
    config["quantization_config"] = {"quant_method": "gptq"}
    other = write_hub(tmp_path / "gptq", {"a.qweight": torch.ones(2, 2)}, config=config)
    with pytest.raises(InvalidInputError, match=r"quantised \(gptq\).*16-bit model"):
        merge_peft_adapters([adapter], tmp_path / "out", base=other, options=QUICK)
    assert not (tmp_path / "out").exists()
