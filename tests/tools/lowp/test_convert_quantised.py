"""One verb makes a quantised checkpoint bf16: the values that others read in it, rounded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost.errors import DigestMismatchError, InvalidInputError
from milepost.hf.training_sidecars import NEUTRAL_SINK
from milepost.tools.convert_to_bf16 import convert_to_bf16
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format, Layout
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from milepost.tools.rewrite.options import Check, Mode, RewriteOptions
from tests.tools.lowp.coded_tensors import DEEPSEEK, codes, packed, scales, written
from tests.tools.lowp.models import decompressed, logits, save_model
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits, write_hub

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CHECKED = RewriteOptions(is_durable=False, threads=2, check=Check.LOAD)
WITH_ATTENTION = Scope(include=["*.self_attn.*_proj.weight"])


def config_of(place: Path) -> dict[str, Any]:
    document = json.loads((place / "config.json").read_bytes())
    assert isinstance(document, dict)
    return document


@pytest.mark.case("V55")
def test_mxfp4_of_gpt_oss_is_what_transformers_makes_of_it_sinks_neutralised(
    tmp_path: Path,
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = save_model("gpt_oss", tmp_path / "in")
    quantize_to_lowp(model, tmp_path / "q", format=Format.MXFP4, options=QUICK)
    report = convert_to_bf16(tmp_path / "q", tmp_path / "out", options=CHECKED)
    stored, made = read_hub(tmp_path / "q"), read_hub(tmp_path / "out")
    stems = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    assert report.counts == {"in fp32": 0, "dequantised": len(stems)} and len(stems) == 4
    rest = {k: v for k, v in stored.items() if not k.endswith(("_blocks", "_scales"))}
    banks = {
        stem: convert_moe_packed_tensors(stored[f"{stem}_blocks"], stored[f"{stem}_scales"])
        for stem in stems
    }
    assert same_bits(made, {**rest, **banks})
    assert "quantization_config" not in config_of(tmp_path / "out")
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "q"))
    sidecar = tmp_path / "q/training_provenance.json"
    sidecar.write_text('{"gpt_oss_attention_sinks": "neutralized"}')
    report = convert_to_bf16(tmp_path / "q", tmp_path / "neutral", options=CHECKED)
    sinks = {name for name in made if name.endswith(".sinks")}
    made = read_hub(tmp_path / "neutral")
    assert sinks and all(bool((made[name] == NEUTRAL_SINK).all()) for name in sinks)
    assert any("sinks neutralised" in note for note in report.notes)


@pytest.mark.parametrize("format", Format)
def test_compressed_tensors_decompresses_to_the_same_bits_and_norms_stay_in_fp32(
    tmp_path: Path, format: Format
) -> None:
    model = read_hub(save_model("llama", tmp_path / "model"))
    tensors = {k: v.float() if "norm" in k else v for k, v in model.items()}
    config = config_of(tmp_path / "model")
    source = write_hub(tmp_path / "in", tensors, config=config, parts=2)
    quantize_to_lowp(source, tmp_path / "q", format=format, scope=WITH_ATTENTION, options=QUICK)
    report = convert_to_bf16(tmp_path / "q", tmp_path / "out", options=CHECKED)
    ours, theirs = read_hub(tmp_path / "out"), decompressed(tmp_path / "q", tmp_path / "theirs")
    assert same_bits(ours, theirs)
    norms = sum("norm" in name for name in ours)
    assert report.counts == {"in fp32": norms, "dequantised": 14} and norms == 5
    config = config_of(tmp_path / "out")
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert logits(tmp_path / "out").isfinite().all()


def deepseek(place: Path) -> tuple[Path, dict[str, Tensor]]:
    """Weights in FP8 of sizes that 128 does not divide, for the whole and for a tensor."""
    mlp = "model.layers.0.mlp"
    shapes = {"gate_proj": (576, 192), "up_proj": (576, 200), "down_proj": (192, 576)}
    tensors: dict[str, Tensor] = {}
    for seed, (leaf, (rows, columns)) in enumerate(shapes.items()):
        tensors[f"{mlp}.{leaf}.weight"] = codes(rows, columns, seed=seed)
        grid = scales(-(-rows // 128), -(-columns // 128), seed=seed)
        tensors[f"{mlp}.{leaf}.weight_scale_inv"] = grid
    tensors |= {
        f"{mlp}.gate.weight": torch.randn(4, 192),
        f"{mlp}.gate.e_score_correction_bias": torch.randn(4),
        "model.norm.weight": torch.randn(192),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(192, 192),
        "model.layers.0.self_attn.o_proj.input_scale": torch.tensor(2.0),
        "model.steps": torch.tensor(3),
    }
    config = {"model_type": "deepseek_v3", "dtype": "bfloat16", "quantization_config": DEEPSEEK}
    return write_hub(place, tensors, config=config, parts=3), tensors


@pytest.mark.case("V57")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_partial_blocks_of_fp8_are_what_compressed_tensors_makes_and_routers_keep_their_bits(
    tmp_path: Path, dtype: str
) -> None:
    from compressed_tensors.entrypoints.convert import FP8BlockDequantizer

    source, tensors = deepseek(tmp_path / "in")
    report = convert_to_bf16(source, tmp_path / "out", dtype=dtype, options=QUICK)
    wanted: torch.dtype = getattr(torch, dtype)
    converter = FP8BlockDequantizer.from_pretrained(str(source), dtype=wanted)
    expected = converter.process(dict(tensors))
    attention = "model.layers.0.self_attn.o_proj"
    expected[f"{attention}.weight"] = tensors[f"{attention}.weight"].to(wanted)
    assert report.dropped == {f"{attention}.input_scale": REASON}
    del expected[f"{attention}.input_scale"]
    assert same_bits(read_hub(tmp_path / "out"), expected)
    assert config_of(tmp_path / "out")["dtype"] == dtype
    assert report.counts["dequantised"] == 3


REASON = "scales activations of the quantised model"


def test_fp8_with_one_scale_for_a_tensor_becomes_bf16_out_of_an_archive_too(tmp_path: Path) -> None:
    tensors = {
        "a.weight": codes(300, 70),
        "a.weight_scale": torch.tensor(0.25),
        "a.input_scale": torch.tensor(3.0),
        "norm.weight": torch.randn(70),
    }
    source = written(tmp_path / "in", tensors, {"quant_method": "fp8"})
    convert_to_bf16(source, tmp_path / "out", options=QUICK)
    weight = (tensors["a.weight"].float() * 0.25).bfloat16()
    expected = {"a.weight": weight, "norm.weight": tensors["norm.weight"]}
    assert same_bits(read_hub(tmp_path / "out"), expected)
    torch.save(tensors, tmp_path / "model.pt")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    convert_to_bf16(tmp_path / "model.pt", tmp_path / "of-pt", options=QUICK)
    assert same_bits(read_hub(tmp_path / "of-pt"), expected)


def test_contracted_rows_of_block_scaled_come_back_in_bands(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: torch.randn(4096, 320) * 0.02}
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "llama"})
    for format in (Format.NVFP4, Format.MXFP4, Format.MXFP8):
        layout, scope = Layout.BLOCK_SCALED, Scope(axis=0)
        q, turned = tmp_path / f"q-{format}", tmp_path / f"t-{format}"
        run: dict[str, Any] = {"format": format, "layout": layout, "options": QUICK}
        quantize_to_lowp(source, q, scope=scope, **run)
        flat = {name: tensors[name].T.contiguous()}
        other = write_hub(tmp_path / f"in-{format}", flat, config={"model_type": "llama"})
        quantize_to_lowp(other, turned, **run)
        for suffix in ("packed", "scale"):
            first = read_hub(q)[f"{name}_{suffix}"].view(torch.uint8)
            assert torch.equal(first.T, read_hub(turned)[f"{name}_{suffix}"].view(torch.uint8))
        convert_to_bf16(q, tmp_path / f"{format}", options=QUICK)
        dequantize(turned, tmp_path / f"back-{format}", options=QUICK)
        made = read_hub(tmp_path / f"{format}")[name]
        assert torch.equal(made, read_hub(tmp_path / f"back-{format}")[name].T)


def test_a_dry_run_says_the_sizes_and_every_problem_and_writes_nothing(tmp_path: Path) -> None:
    source, tensors = deepseek(tmp_path / "in")
    dry = RewriteOptions(mode=Mode.DRY_RUN)
    planned = convert_to_bf16(source, tmp_path / "out", options=dry)
    assert not planned.problems and not (tmp_path / "out").exists()
    made = convert_to_bf16(source, tmp_path / "out", options=QUICK)
    for name, nbytes in planned.files.items():
        assert (tmp_path / "out" / name).stat().st_size == nbytes
    assert (planned.counts, planned.dropped) == (made.counts, made.dropped)
    bare = {k: v for k, v in tensors.items() if not k.endswith("gate_proj.weight_scale_inv")}
    source = written(tmp_path / "bare", bare, DEEPSEEK)
    keep = ["*.up_proj.weight", "none*"]
    found = convert_to_bf16(source, tmp_path / "no", keep=keep, options=dry).problems
    assert len(found) == 3 and not (tmp_path / "no").exists()
    assert any("have no scale" in text and "gate_proj.weight" in text for text in found)
    assert any("up_proj.weight" in text and "cannot stay" in text for text in found)
    assert any("fits no tensor" in text for text in found)
    with pytest.raises(InvalidInputError, match="3 problems, nothing was written"):
        convert_to_bf16(source, tmp_path / "no", keep=keep, options=QUICK)


def test_codes_that_are_not_those_that_were_saved_are_refused(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    source = write_hub(
        tmp_path / "in", {name: torch.randn(2000, 640)}, config={"model_type": "llama"}
    )
    quantize_to_lowp(source, tmp_path / "q", format=Format.NVFP4, options=QUICK)
    path = tmp_path / "q/model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DigestMismatchError, match="up_proj"):
        convert_to_bf16(tmp_path / "q", tmp_path / "out", options=QUICK)
    assert not (tmp_path / "out").exists()


def test_codes_that_are_there_beside_floats_of_the_name_are_refused(tmp_path: Path) -> None:
    tensors = {
        "a.weight_packed": packed(8, 32),
        "a.weight_scale": packed(8, 2).clamp(110, 130),
        "a.weight": torch.randn(8, 64),
    }
    source = written(tmp_path / "in", tensors, {"quant_method": "compressed-tensors"})
    with pytest.raises(InvalidInputError, match=r"a\.weight: is there as floats"):
        convert_to_bf16(source, tmp_path / "out", options=QUICK)
    for method in ("gptq", "awq"):
        source = written(tmp_path / method, tensors, {"quant_method": method})
        with pytest.raises(InvalidInputError, match=f"quantised by {method}"):
            convert_to_bf16(source, tmp_path / "out", options=QUICK)
    assert not (tmp_path / "out").exists()


def test_parameters_named_like_scales_are_kept_where_nothing_is_quantised(tmp_path: Path) -> None:
    tensors = {"a.k_scale": torch.tensor(2.0), "a.weight_scale": torch.randn(3)}
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "llama"})
    convert_to_bf16(source, tmp_path / "out", options=QUICK)
    expected = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert same_bits(read_hub(tmp_path / "out"), expected)
