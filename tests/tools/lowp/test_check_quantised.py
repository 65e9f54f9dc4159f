"""`--check` of quantised outputs: codes and scales belong together, and stand for the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.lowp.targets import Format, Layout
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from milepost.tools.rename import rename
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.check import look_at
from milepost.tools.rewrite.options import Check
from tests.tools.lowp.models import save_model
from tests.tools.rewrite.hub import QUICK, read_hub, write_hub

CHECKED = replace(QUICK, check=Check.LOAD)
MLP = "model.layers.0.mlp.experts"


class Kind(NamedTuple):
    """A layout, and the codes and scales that it has for a projection, or a bank of them."""

    family: str
    format: Format
    layout: Layout
    codes: str
    scale: str

    @property
    def is_bank(self) -> bool:
        return self.layout.has_banks


UP = f"{MLP}.1.up_proj.weight"
BANK = f"{MLP}.gate_up_proj"
KINDS = {
    "mxfp8": Kind("qwen3_moe", Format.MXFP8, Layout.COMPRESSED_TENSORS, UP, f"{UP}_scale"),
    "mxfp4": Kind(
        "qwen3_moe", Format.MXFP4, Layout.COMPRESSED_TENSORS, f"{UP}_packed", f"{UP}_scale"
    ),
    "nvfp4": Kind(
        "qwen3_moe", Format.NVFP4, Layout.COMPRESSED_TENSORS, f"{UP}_packed", f"{UP}_scale"
    ),
    "fp8": Kind("qwen3_moe", Format.FP8, Layout.COMPRESSED_TENSORS, UP, f"{UP}_scale"),
    "fp8 in squares": Kind("qwen3_moe", Format.FP8, Layout.DEEPSEEK_FP8, UP, f"{UP}_scale_inv"),
    "mxfp8-inv": Kind("qwen3_moe", Format.MXFP8, Layout.MXFP8_INV, UP, f"{UP}_scale_inv"),
    "block-scaled mxfp4": Kind(
        "qwen3_moe", Format.MXFP4, Layout.BLOCK_SCALED, f"{UP}_packed", f"{UP}_scale"
    ),
    "block-scaled nvfp4": Kind(
        "qwen3_moe", Format.NVFP4, Layout.BLOCK_SCALED, f"{UP}_packed", f"{UP}_scale"
    ),
    "gpt-oss": Kind("gpt_oss", Format.MXFP4, Layout.GPT_OSS, f"{BANK}_blocks", f"{BANK}_scales"),
    "block-scaled banks": Kind(
        "gpt_oss",
        Format.MXFP8,
        Layout.BLOCK_SCALED,
        f"{BANK}.weight_packed",
        f"{BANK}.weight_scale",
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A layout, the directory of its output, and the parameters of the dense model."""
    kind = KINDS[request.param]
    place = tmp_path_factory.mktemp("made")
    model = save_model(kind.family, place / "in")
    numel = sum(tensor.numel() for tensor in read_hub(model).values())
    report = quantize_to_lowp(
        model, place / "q", format=kind.format, layout=kind.layout, options=CHECKED
    )
    return kind, place / "q", numel, report.check


def test_the_floats_that_codes_stand_for_are_compared_with_the_class_and_counted(made: Any) -> None:
    kind, place, numel, check = made
    assert check.problems == () and check.parameters == numel
    assert check.model_class == {"qwen3_moe": "Qwen3MoeForCausalLM"}.get(
        kind.family, "GptOssForCausalLM"
    )
    assert not [note for note in check.notes if "not compared" in note]
    assert look_at(place) == check


Tensors = dict[str, Tensor]


def scale_dropped(kind: Kind, tensors: Tensors) -> None:
    del tensors[kind.scale]


def row_short(kind: Kind, tensors: Tensors) -> None:
    dim = 1 if kind.is_bank and tensors[kind.codes].dim() > 2 else 0
    rows = tensors[kind.codes].shape[dim] - 1
    tensors[kind.codes] = tensors[kind.codes].narrow(dim, 0, rows).contiguous()


def expert_missing(kind: Kind, tensors: Tensors) -> None:
    if BANK in kind.codes:
        for name in (kind.codes, kind.scale):
            tensors[name] = tensors[name][:-1].contiguous()
        return
    for name in [name for name in tensors if name.startswith(f"{MLP}.1.")]:
        del tensors[name]


def scales_of_another_shape(kind: Kind, tensors: Tensors) -> None:
    tensors[kind.scale] = tensors[kind.scale][..., :0].contiguous()


def codes_dropped(kind: Kind, tensors: Tensors) -> None:
    del tensors[kind.codes]


MUTATIONS: dict[Callable[[Kind, Tensors], None], Callable[[Kind], str]] = {
    scale_dropped: lambda kind: kind.scale if "packed" in kind.codes else kind.codes,
    row_short: lambda kind: (
        "experts.gate_up_proj: " if kind.layout is Layout.DEEPSEEK_FP8 else kind.scale
    ),
    expert_missing: lambda kind: "experts.gate_up_proj: ",
    scales_of_another_shape: lambda kind: kind.scale,
    codes_dropped: lambda kind: kind.scale,
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_one_line_says_what_is_wrong_with_codes_and_scales(
    tmp_path: Path, made: Any, mutate: Callable[[Kind, Tensors], None]
) -> None:
    kind, place, _, _ = made
    tensors = read_hub(place)
    mutate(kind, tensors)
    config = json.loads((place / "config.json").read_bytes())
    found = look_at(write_hub(tmp_path / "bad", tensors, config=config)).problems
    assert len(found) == 1 and MUTATIONS[mutate](kind) in found[0], found


def test_a_scale_that_a_verb_would_lose_keeps_its_output_from_being_kept(tmp_path: Path) -> None:
    model = save_model("llama", tmp_path / "in")
    quantize_to_lowp(model, tmp_path / "q", format=Format.NVFP4, options=QUICK)
    rules = [(r"0\.mlp\.up_proj\.weight_global_scale", "0.mlp.up_proj.weight_globle_scale")]
    with pytest.raises(
        InvalidInputError, match=r"not kept.*without .*up_proj\.weight_global_scale"
    ):
        rename(tmp_path / "q", tmp_path / "out", rules=rules, options=CHECKED)
    assert not (tmp_path / "out").exists()


def test_one_scale_for_all_where_the_config_states_one_for_each_row_is_wrong(
    tmp_path: Path,
) -> None:
    model = save_model("llama", tmp_path / "in")
    quantize_to_lowp(model, tmp_path / "q", format=Format.FP8, options=QUICK)
    tensors, name = read_hub(tmp_path / "q"), "model.layers.1.mlp.up_proj.weight_scale"
    tensors[name] = tensors[name][:1].clone()
    save_file(tensors, tmp_path / "q/model.safetensors", {"format": "pt"})
    (tmp_path / "q/milepost.json").unlink()
    (problem,) = look_at(tmp_path / "q").problems
    assert problem.startswith(name) and "one for each row: expected (96, 1)" in problem


def test_a_method_that_is_not_known_here_is_no_problem_and_is_said(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}
    codes = {"model.layers.0.mlp.up_proj.qweight": torch.zeros(4, 4, dtype=torch.int32)}
    source = write_hub(tmp_path / "in", codes, config=config)
    check = reshard(source, tmp_path / "out", options=CHECKED).check
    assert check is not None and not check.problems
    (note,) = [note for note in check.notes if "not compared" in note]
    assert "quantised by gptq, which is not known here" in note
    up = "model.layers.0.mlp.up_proj"
    sparse = {"format": "float-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}}
    for method, more, name in (
        ("modelopt", {}, f"{up}.pre_quant_scale"),
        ("compressed-tensors", sparse, f"{up}.compressed"),
    ):
        config["quantization_config"] = {"quant_method": method, **more}
        found = look_at(write_hub(tmp_path / method, codes | {name: torch.ones(4)}, config=config))
        assert not found.problems and any(name in note for note in found.notes)
