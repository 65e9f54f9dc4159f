"""What is quantised here, others read: compressed-tensors and transformers are the judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.blocks import Scales, quantise_fp8_squares
from milepost.tools.lowp.elements import decode_e2m1, unpack_nibbles
from milepost.tools.lowp.selection import Apply, Scope
from milepost.tools.lowp.targets import Format, Layout
from milepost.tools.quantize_to_lowp import Measure, quantize_to_lowp
from milepost.tools.rewrite.options import RewriteOptions
from tests.tools.lowp.models import decompressed, loaded, logits, save_model
from tests.tools.rewrite.hub import QUICK, content, read_hub, same_bits, write_hub

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WITH_ATTENTION = Scope(include=["*.self_attn.*_proj.weight"])
LIMITS = {Format.MXFP8: 0.03, Format.MXFP4: 0.12, Format.NVFP4: 0.09, Format.FP8: 0.03}
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("llama", tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("qwen3_moe", tmp_path_factory.mktemp("models") / "moe")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("gpt_oss", tmp_path_factory.mktemp("models") / "gpt_oss")


def weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02


def config_of(place: Path) -> dict[str, Any]:
    document = json.loads((place / "config.json").read_bytes())["quantization_config"]
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("format", Format)
def test_compressed_tensors_and_transformers_make_the_same_floats_of_a_dense_model(
    tmp_path: Path, llama: Path, format: Format
) -> None:
    report = quantize_to_lowp(
        llama,
        tmp_path / "q",
        format=format,
        scope=WITH_ATTENTION,
        measure=Measure.ERRORS,
        options=QUICK,
    )
    assert report.counts["quantised"] == len(report.errors) == 14
    assert max(report.errors.values()) < LIMITS[format]
    dequantize(tmp_path / "q", tmp_path / "back", options=QUICK)
    ours = read_hub(tmp_path / "back")
    assert same_bits(decompressed(tmp_path / "q", tmp_path / "theirs"), ours)
    if format is Format.FP8:  # transformers quantises activations there, so only weights are equal
        state = loaded(tmp_path / "q")
        assert all(torch.equal(state[name].bfloat16(), tensor) for name, tensor in ours.items())
    else:
        assert torch.equal(logits(tmp_path / "q"), logits(tmp_path / "back"))
    before = read_hub(llama)
    for name, tensor in ours.items():
        error = float((tensor.float() - before[name].float()).norm() / before[name].float().norm())
        assert error == 0 if name not in report.errors else abs(error - report.errors[name]) < 2e-3


@pytest.mark.case("V54")
@pytest.mark.parametrize("format", Format)
def test_fused_experts_are_written_one_by_one_as_compressed_tensors_reads_them(
    tmp_path: Path, moe: Path, format: Format
) -> None:
    before = read_hub(moe)
    parts = [before.pop(f"{EXPERTS}.{e}.{leaf}.weight") for e in range(3) for leaf in LEAVES]
    gate_up = torch.stack([torch.cat(parts[3 * e : 3 * e + 2]) for e in range(3)])
    before[f"{EXPERTS}.gate_up_proj"] = gate_up
    before[f"{EXPERTS}.down_proj"] = torch.stack(parts[2::3])
    config = json.loads((moe / "config.json").read_bytes())
    fused = write_hub(tmp_path / "fused", before, config=config, parts=2)
    quantize_to_lowp(moe, tmp_path / "q", format=format, options=QUICK)
    quantize_to_lowp(fused, tmp_path / "of-fused", format=format, options=QUICK)
    assert same_bits(read_hub(tmp_path / "of-fused"), read_hub(tmp_path / "q"))
    dequantize(tmp_path / "q", tmp_path / "back", options=QUICK)
    ours = read_hub(tmp_path / "back")
    assert ours.keys() == read_hub(moe).keys()
    assert same_bits(decompressed(tmp_path / "q", tmp_path / "theirs"), ours)
    torch.save(before, tmp_path / "fused.pt")
    (tmp_path / "config.json").write_text(json.dumps(config))
    quantize_to_lowp(tmp_path / "fused.pt", tmp_path / "of-pt", format=format, options=QUICK)
    assert same_bits(read_hub(tmp_path / "of-pt"), read_hub(tmp_path / "q"))


LEAVES = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.case("V58")
def test_what_servers_fuse_shares_one_global_scale_and_codes_are_made_for_it(
    tmp_path: Path, moe: Path
) -> None:
    tensors = {k: v.float() for k, v in read_hub(moe).items()}
    for expert in range(3):
        tensors[f"{EXPERTS}.{expert}.up_proj.weight"] *= 1.3 + expert
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 5
    tensors[f"{EXPERTS}.2.down_proj.weight"] *= 0
    config = json.loads((moe / "config.json").read_bytes())
    source = write_hub(tmp_path / "in", tensors, config=config)
    quantize_to_lowp(
        source, tmp_path / "q", format=Format.NVFP4, scope=WITH_ATTENTION, options=QUICK
    )
    made = read_hub(tmp_path / "q")
    groups = [[f"{EXPERTS}.{e}.{leaf}" for leaf in ("gate_proj", "up_proj")] for e in range(3)]
    groups.append([f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"])
    for group in groups:
        divisor = made[f"{group[0]}.weight_global_scale"]
        assert divisor.shape == (1,)
        for module in group:
            assert torch.equal(made[f"{module}.weight_global_scale"], divisor)
            levels = decode_e2m1(unpack_nibbles(made[f"{module}.weight_packed"]))
            scale = made[f"{module}.weight_scale"].float() / divisor
            served = levels * scale.repeat_interleave(16, -1)
            weight = tensors[f"{module}.weight"]
            assert float((served - weight).norm() / weight.norm()) < 0.1, module
    alone = {float(made[f"{EXPERTS}.{e}.gate_proj.weight_global_scale"]) for e in range(3)}
    assert len(alone) == 3
    assert made[f"{EXPERTS}.2.down_proj.weight_global_scale"].item() == 1.0
    known = ("weight", "weight_packed", "weight_scale", "weight_global_scale")
    assert {name.rpartition(".")[2] for name in made} == set(known)


@pytest.mark.case("V55")
def test_experts_of_gpt_oss_in_its_own_layout_are_exact_through_transformers(
    tmp_path: Path, gpt_oss: Path
) -> None:
    from transformers import Mxfp4Config

    report = quantize_to_lowp(
        gpt_oss, tmp_path / "q", format=Format.MXFP4, measure=Measure.ERRORS, options=QUICK
    )
    assert report.counts["quantised"] == 4
    made = read_hub(tmp_path / "q")
    assert made[f"{EXPERTS}.gate_up_proj_blocks"].shape == (3, 64, 2, 16)
    assert made[f"{EXPERTS}.down_proj_scales"].shape == (3, 64, 1)
    dequantize(tmp_path / "q", tmp_path / "back", options=QUICK)
    ours, before = read_hub(tmp_path / "back"), read_hub(gpt_oss)
    assert ours.keys() == before.keys()
    quantised = {f"model.layers.{n}.mlp.experts.{leaf}" for n in range(2) for leaf in BANKS}
    assert quantised == {n for n in ours if not torch.equal(ours[n], before[n])}
    theirs = logits(tmp_path / "q", quantization_config=Mxfp4Config(dequantize=True))
    assert torch.equal(theirs, logits(tmp_path / "back"))
    quantize_to_lowp(tmp_path / "back", tmp_path / "again", format=Format.MXFP4, options=QUICK)
    dequantize(tmp_path / "again", tmp_path / "twice", options=QUICK)
    assert same_bits(read_hub(tmp_path / "twice"), ours)


BANKS = ("gate_up_proj", "down_proj")


def test_mxfp8_with_inverse_scales_is_exact_through_transformers_experts_too(
    tmp_path: Path, moe: Path
) -> None:
    layout = Layout.MXFP8_INV
    quantize_to_lowp(moe, tmp_path / "q", format=Format.MXFP8, layout=layout, options=QUICK)
    made = read_hub(tmp_path / "q")
    assert made[f"{EXPERTS}.0.up_proj.weight_scale_inv"].dtype == torch.uint8
    dequantize(tmp_path / "q", tmp_path / "back", options=QUICK)
    assert config_of(tmp_path / "q")["weight_block_size"] == [1, 32]
    assert torch.equal(logits(tmp_path / "q"), logits(tmp_path / "back"))


@pytest.mark.case("V57")
def test_squares_of_fp8_end_in_partial_blocks_and_come_back(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.gate_proj.weight": weights(192, 576),
        "model.layers.0.mlp.down_proj.weight": weights(576, 192, seed=1),
    }
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "llama"})
    layout = Layout.DEEPSEEK_FP8
    report = quantize_to_lowp(
        source, tmp_path / "q", format=Format.FP8, layout=layout, options=QUICK
    )
    assert any("partial blocks" in note for note in report.notes)
    made = read_hub(tmp_path / "q")
    scale = made["model.layers.0.mlp.gate_proj.weight_scale_inv"]
    assert scale.dtype == torch.float32 and scale.shape == (2, 5)
    corner = tensors["model.layers.0.mlp.gate_proj.weight"][128:, 512:]
    assert scale[1, 4] == corner.abs().max() / 448
    dequantize(tmp_path / "q", tmp_path / "back", dtype="float32", options=QUICK)
    for name, tensor in read_hub(tmp_path / "back").items():
        assert float((tensor - tensors[name]).norm() / tensors[name].norm()) < 0.03


@pytest.mark.case("V57")
def test_squares_in_bands_and_tiles_are_those_of_the_whole_matrix(tmp_path: Path) -> None:
    """Larger than a band, wider than a tile, and 128 divides neither dim."""
    name = "model.layers.0.mlp.gate_proj.weight"
    weight = weights(1000, 4500)
    source = write_hub(tmp_path / "in", {name: weight}, config={"model_type": "llama"})
    layout = Layout.DEEPSEEK_FP8
    quantize_to_lowp(source, tmp_path / "q", format=Format.FP8, layout=layout, options=QUICK)
    whole = quantise_fp8_squares(weight)
    made = read_hub(tmp_path / "q")
    assert same_bits(made, {name: whole.data, f"{name}_scale_inv": whole.scale})
    dequantize(tmp_path / "q", tmp_path / "back", dtype="float32", options=QUICK)
    row, column = torch.meshgrid(
        torch.arange(1000) // 128, torch.arange(4500) // 128, indexing="ij"
    )
    expected = whole.data.float() * whole.scale[row, column]
    assert same_bits(read_hub(tmp_path / "back"), {name: expected})


@pytest.mark.case("V56")
@pytest.mark.parametrize("format", [Format.MXFP8, Format.MXFP4, Format.NVFP4])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_block_scaled_has_the_documented_tensors_and_comes_back_the_same_when_done_twice(
    tmp_path: Path, format: Format, family: str
) -> None:
    bank, matrix = f"{EXPERTS}.gate_up_proj", "model.layers.1.mlp.up_proj.weight"
    tensors = {bank: weights(2, 64, 96), matrix: weights(64, 96, seed=1).bfloat16()}
    source = write_hub(tmp_path / "in", tensors, config={"model_type": family})
    run: dict[str, Any] = {"format": format, "layout": Layout.BLOCK_SCALED, "options": QUICK}
    run["scales"] = Scales.MAXIMUM
    quantize_to_lowp(source, tmp_path / "q", **run)
    axis = 1 if family == "gpt_oss" else 2
    made, document = read_hub(tmp_path / "q"), config_of(tmp_path / "q")
    assert json.loads((tmp_path / "q/quantization_config.json").read_bytes()) == document
    assert document["quant_method"] == "block_scaled" and document["format"] == format.value
    assert document["weight_axes"] == {bank: axis, matrix: 1}
    assert document["quantized_weights"] == [bank, matrix]
    assert made[f"{bank}.weight_shape"].tolist() == [2, 64, 96]
    shape = [2, 64, 96]
    shape[axis] //= 2 if format.is_packed else 1
    assert list(made[f"{bank}.weight_packed"].shape) == shape
    shape[axis] = (2, 64, 96)[axis] // format.multiple
    scale = made[f"{bank}.weight_scale"]
    assert list(scale.shape) == shape and "model.layers.1.mlp.up_proj.weight_packed" in made
    turned = tensors[bank].movedim(axis, -1)
    block = turned.reshape(*turned.shape[:-1], -1, format.multiple).abs().amax(-1)
    stored = scale.movedim(axis, -1)
    if format is Format.NVFP4:
        multiplier = made[f"{bank}.weight_global_scale"]
        wanted = 2.0 ** torch.log2(tensors[bank].abs().max() / 2688).ceil()
        assert multiplier.shape == () and multiplier == wanted
        assert torch.equal(stored.float(), (block / 6 / wanted).to(torch.float8_e4m3fn).float())
    else:
        largest = 6 if format is Format.MXFP4 else 448
        assert torch.equal(stored.float() - 127, torch.log2(block / largest).ceil())
    dequantize(tmp_path / "q", tmp_path / "back", options=QUICK)
    quantize_to_lowp(tmp_path / "back", tmp_path / "again", **run)
    dequantize(tmp_path / "again", tmp_path / "twice", options=QUICK)
    assert same_bits(read_hub(tmp_path / "twice"), read_hub(tmp_path / "back"))


def test_windows_patterns_and_switches_choose_and_the_rest_is_listed(
    tmp_path: Path, llama: Path
) -> None:
    scope = Scope(include=["*.o_proj.weight"], exclude=["re:.*up_proj.*"], keep_first_blocks=1)
    report = quantize_to_lowp(
        llama, tmp_path / "q", format=Format.MXFP8, scope=scope, options=QUICK
    )
    quantised = {name for name in read_hub(tmp_path / "q") if name.endswith("weight_scale")}
    leaves = ("mlp.gate_proj", "mlp.down_proj", "self_attn.o_proj")
    assert quantised == {f"model.layers.1.{leaf}.weight_scale" for leaf in leaves}
    ignored = config_of(tmp_path / "q")["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate_proj", "model.layers.1.mlp.up_proj"} <= {*ignored}
    assert not any(name.removesuffix(".weight_scale") in ignored for name in quantised)
    assert report.left["model.layers.0.mlp.gate_proj.weight"] == "block 0 is kept"
    assert report.left["model.layers.1.mlp.up_proj.weight"] == "excluded"
    assert report.left["model.layers.1.self_attn.q_proj.weight"] == "not chosen by default"
    assert any("need all quantised or none" in note for note in report.notes)


def test_matrices_that_blocks_do_not_divide_stay_and_are_listed(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.weight": weights(8, 48),
        "model.layers.0.mlp.down_proj.weight": weights(48, 64),
        "model.layers.0.feed_forward.w1.weight": weights(8, 64),
    }
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "llama"})
    report = quantize_to_lowp(source, tmp_path / "q", format=Format.MXFP4, options=QUICK)
    made = read_hub(tmp_path / "q")
    kept = [name for name in tensors if name in made]
    assert kept == ["model.layers.0.mlp.up_proj.weight", "model.layers.0.feed_forward.w1.weight"]
    assert report.left[kept[0]] == "48 contracted elements are no multiple of 32"
    assert "model.layers.0.mlp.up_proj" in config_of(tmp_path / "q")["ignore"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("format", Format)
def test_values_that_no_scale_can_express_are_refused_with_their_name(
    tmp_path: Path, format: Format, value: float
) -> None:
    tensors = {f"model.layers.0.mlp.{leaf}.weight": weights(64, 64) for leaf in LEAVES}
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name][3, 5] = value
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "llama"})
    with pytest.raises(InvalidInputError, match=f"{name}: holds infinite values or NaN"):
        quantize_to_lowp(source, tmp_path / "q", format=format, options=QUICK)
    assert not (tmp_path / "q").exists()


def test_what_cannot_be_right_is_refused_before_anything_is_written(
    tmp_path: Path, llama: Path, gpt_oss: Path
) -> None:
    def refused(source: Path, message: str, **arguments: Any) -> None:
        with pytest.raises(InvalidInputError, match=message):
            quantize_to_lowp(source, tmp_path / "q", options=QUICK, **arguments)
        assert not (tmp_path / "q").exists()

    refused(llama, "holds mxfp8, not nvfp4", format=Format.NVFP4, layout=Layout.MXFP8_INV)
    refused(llama, "gpt-oss is for models", format=Format.MXFP4, layout=Layout.GPT_OSS)
    refused(gpt_oss, "--no-lowp-apply-moe-experts", format=Format.NVFP4)
    refused(llama, "no search for scales", format=Format.FP8, scales=Scales.LEAST_SQUARES)
    refused(llama, "contract the last dim", format=Format.MXFP8, scope=Scope(axis=0))
    refused(llama, "fits no tensor", format=Format.MXFP8, scope=Scope(exclude=["nothing*"]))
    refused(llama, "no tensor is chosen", format=Format.MXFP8, scope=Scope(apply=()))
    bank = {"model.layers.0.moe.gate_proj.weight": weights(2, 32, 32)}
    for kind, message in (("step3p5", "no family declares"), ("qwen3_moe", "looks like experts")):
        source = write_hub(tmp_path / kind, bank, config={"model_type": kind})
        refused(source, message, format=Format.MXFP8)
    dense = {"model.layers.0.mlp.up_proj.weight": weights(32, 32)}
    source = write_hub(tmp_path / "moe", dense, config={"model_type": "mixtral"})
    refused(source, "no tensor is named as one", format=Format.MXFP8)
    both = {**dense, "mtp.layers.0.mlp.up_proj.weight": weights(32, 32)}
    source = write_hub(tmp_path / "mtp", both, config={"model_type": "llama"})
    refused(source, "each have their own", format=Format.MXFP8, scope=Scope(keep_first_blocks=1))


def test_an_error_above_the_limit_keeps_the_output_from_being_published(tmp_path: Path) -> None:
    """A gate that is too small for the range of the up projection whose scale it shares."""
    gate = "model.layers.0.mlp.gate_proj.weight"
    tensors = {gate: weights(64, 64) * 1e-6, gate.replace("gate", "up"): weights(64, 64)}
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "llama"})
    run: dict[str, Any] = {"format": Format.NVFP4, "measure": Measure.ERRORS, "options": QUICK}
    with pytest.raises(InvalidInputError, match=rf"{gate}: the relative error .* above 0\.25"):
        quantize_to_lowp(source, tmp_path / "q", **run)
    assert not (tmp_path / "q").exists()
    report = quantize_to_lowp(source, tmp_path / "q", layout=Layout.BLOCK_SCALED, **run)
    assert len(report.errors) == 2 and max(report.errors.values()) < 0.1


@pytest.mark.parametrize("layout", [Layout.COMPRESSED_TENSORS, Layout.BLOCK_SCALED])
def test_bytes_do_not_depend_on_threads_or_on_bands(tmp_path: Path, layout: Layout) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: weights(3000, 512), "model.layers.0.mlp.gate_proj.weight": weights(64, 32)}
    source = write_hub(tmp_path / "in", tensors, config={"model_type": "llama"})
    for threads in (1, 3):
        options = RewriteOptions(is_durable=False, threads=threads)
        place = tmp_path / str(threads)
        quantize_to_lowp(source, place, format=Format.NVFP4, layout=layout, options=options)
    first, second = (content(tmp_path / threads) for threads in ("1", "3"))
    assert first["model.safetensors"] == second["model.safetensors"]


def test_experts_and_dense_layers_can_be_left_out(tmp_path: Path, moe: Path) -> None:
    scope = Scope(apply=[Apply.DENSE_MLP], include=["*.o_proj.weight"])
    quantize_to_lowp(moe, tmp_path / "q", format=Format.MXFP8, scope=scope, options=QUICK)
    made = read_hub(tmp_path / "q")
    assert not any("experts" in name for name in made if name.endswith("_scale"))
    assert f"{EXPERTS}.0.gate_proj" in config_of(tmp_path / "q")["ignore"]
