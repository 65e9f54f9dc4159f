"""fp32 masters become bf16, and what routes and normalises stays as exact as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from milepost.errors import InvalidInputError
from milepost.hf.training_sidecars import NEUTRAL_SINK
from milepost.tools.cast import cast
from milepost.tools.convert_to_bf16 import convert_to_bf16
from milepost.tools.rewrite.options import Check, RewriteOptions
from tests.hf.conftest import make_model
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits, write_hub


@pytest.mark.case("V08")
@pytest.mark.parametrize("verb", [cast, convert_to_bf16])
@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_a_type_that_stays_is_stated_over_a_wrong_one(
    tmp_path: Path, verb: Callable[..., object], spelling: str
) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.randn(4, 3).bfloat16()}
    config = {"model_type": "llama", spelling: "float32"}
    source = write_hub(tmp_path / "in", tensors, config=config)
    verb(source, tmp_path / "out", dtype="bfloat16", options=QUICK)
    assert same_bits(read_hub(tmp_path / "out"), tensors)
    made = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert made == {"model_type": "llama", "dtype": "bfloat16", "torch_dtype": "bfloat16"}


@pytest.mark.case("V08")
def test_masters_in_fp32_become_bf16_but_for_norms_and_transformers_loads_them(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model("qwen2")
    model.save_pretrained(tmp_path / "in")
    options = RewriteOptions(check=Check.LOAD, is_durable=False)
    report = convert_to_bf16(tmp_path / "in", tmp_path / "out", options=options)
    made = read_hub(tmp_path / "out")
    expected = {
        name: tensor if "norm" in name else tensor.bfloat16()
        for name, tensor in read_hub(tmp_path / "in").items()
    }
    assert same_bits(made, expected)
    assert report.counts == {"in fp32": sum("norm" in name for name in made)}
    config = json.loads((tmp_path / "out/config.json").read_bytes())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert same_bits(loaded.state_dict(), model.bfloat16().state_dict())
    before = sum(path.stat().st_size for path in (tmp_path / "in").glob("*.safetensors"))
    after = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert after < 0.75 * before


def test_routers_and_their_biases_keep_their_bits_where_the_family_keeps_them(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    tensors = {
        "model.layers.1.mlp.gate.weight": torch.randn(4, 8),
        "model.layers.1.mlp.gate.e_score_correction_bias": torch.randn(4),
        "model.layers.1.mlp.experts.gate_up_proj": torch.randn(4, 12, 8),
        "model.layers.1.self_attn.q_norm.weight": torch.randn(8).half(),
        "model.norm.weight": torch.randn(8).bfloat16(),
        "model.steps": torch.tensor(3),
    }
    for kind, is_kept in (("deepseek_v3", True), ("qwen3_moe", False)):
        source = write_hub(tmp_path / kind, tensors, config={"model_type": kind})
        convert_to_bf16(source, tmp_path / f"{kind}-out", options=QUICK)
        made = read_hub(tmp_path / f"{kind}-out")
        router = tensors["model.layers.1.mlp.gate.weight"]
        expected = {
            **tensors,
            "model.layers.1.mlp.gate.weight": router if is_kept else router.bfloat16(),
            "model.layers.1.mlp.experts.gate_up_proj": tensors[
                "model.layers.1.mlp.experts.gate_up_proj"
            ].bfloat16(),
            "model.layers.1.self_attn.q_norm.weight": tensors[
                "model.layers.1.self_attn.q_norm.weight"
            ].float(),
        }
        assert same_bits(made, expected), kind


def test_sinks_that_training_switched_off_are_neutralised_and_the_report_says_so(
    tmp_path: Path,
) -> None:
    name = "model.layers.0.self_attn.sinks"
    source = write_hub(
        tmp_path / "in",
        {name: torch.randn(4), "w": torch.randn(3)},
        config={"model_type": "gpt_oss"},
    )
    (source / "training_provenance.json").write_text('{"gpt_oss_attention_sinks": "neutralized"}')
    report = convert_to_bf16(source, tmp_path / "out", options=QUICK)
    assert torch.equal(read_hub(tmp_path / "out")[name], torch.full((4,), NEUTRAL_SINK))
    assert any("sinks neutralised" in note for note in report.notes)
    assert (tmp_path / "out/training_provenance.json").exists()
    manifest = json.loads((tmp_path / "out/milepost.json").read_bytes())
    assert manifest["needs"] == ["training_provenance.json"]


def test_patterns_keep_tensors_and_one_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    source = write_hub(tmp_path / "in", {"head.w": torch.randn(2), "w": torch.randn(2)})
    convert_to_bf16(source, tmp_path / "out", keep=["head.*"], options=QUICK)
    made = read_hub(tmp_path / "out")
    assert (made["head.w"].dtype, made["w"].dtype) == (torch.float32, torch.bfloat16)
    with pytest.raises(InvalidInputError, match="fits no tensor"):
        convert_to_bf16(source, tmp_path / "no", keep=["haed.*"], options=QUICK)
