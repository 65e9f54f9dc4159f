"""GGUF files of tiny models, read by transformers and by the package gguf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import milepost as mp
from milepost.tools.rewrite.options import Check, RewriteOptions
from milepost.tools.to_gguf import to_gguf
from tests.tools.gguf.gguf_models import (
    CONFIGS,
    keys_of,
    logits_of,
    qwen_tokenizer,
    tensors_of,
    tiny,
    values_of,
    write,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(directory / "model.safetensors"))


def store(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_computes_the_same_logits_from_the_file(family: str, tmp_path: Path) -> None:
    model = tiny(family, tmp_path / "model")
    output = tmp_path / "out" / "model.gguf"
    report = write(tmp_path / "model", output, "f32")
    assert report.files == {"model.gguf": output.stat().st_size}
    assert [place.name for place in output.parent.iterdir()] == ["model.gguf"]
    assert report.parameters == sum(tensor.numel() for tensor in model.parameters())
    # transformers does not read the sizes of experts, and takes those of a published model
    options = {"config": model.config} if family.endswith("moe") else {}
    again = AutoModelForCausalLM.from_pretrained(
        output.parent, gguf_file=output.name, dtype=torch.float32, **options
    )
    torch.testing.assert_close(logits_of(again.eval()), logits_of(model), rtol=0, atol=0)


def test_each_type_holds_the_values_as_well_as_it_can(tmp_path: Path) -> None:
    tiny("llama", tmp_path / "model")
    weights = {name: tensor.bfloat16() for name, tensor in stored(tmp_path / "model").items()}
    store(tmp_path / "model", weights)
    pairs = {
        "blk.1.ffn_down.weight": weights["model.layers.1.mlp.down_proj.weight"].float(),
        "blk.0.attn_v.weight": weights["model.layers.0.self_attn.v_proj.weight"].float(),
        "token_embd.weight": weights["model.embed_tokens.weight"].float(),
        "output.weight": weights["lm_head.weight"].float(),
    }
    for dtype, kind in (("f32", "F32"), ("bf16", "BF16"), ("f16", "F16"), ("q8_0", "Q8_0")):
        output = tmp_path / f"{dtype}.gguf"
        write(tmp_path / "model", output, dtype)
        found = tensors_of(output)
        assert found["blk.0.attn_norm.weight"].tensor_type.name == "F32"
        for name, wanted in pairs.items():
            assert found[name].tensor_type.name == kind
            values = values_of(found[name])
            step = wanted.reshape(-1, 32).abs().amax(dim=1, keepdim=True) / 127
            error = (values - wanted).reshape(-1, 32).abs()
            if dtype == "q8_0":  # half a step, and what the float16 scale is off by, 127 times
                assert bool((error <= step * 0.57).all()) and bool((error > 0).any())
            else:
                assert torch.equal(values, wanted if dtype != "f16" else wanted.half().float())
    keys = keys_of(tmp_path / "q8_0.gguf")
    assert keys["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q8_0
    assert keys["llama.attention.key_length"] == keys["llama.attention.value_length"] == 16


def test_rows_that_q8_0_cannot_divide_are_f16_and_told(tmp_path: Path) -> None:
    tiny("qwen2", tmp_path / "model", hidden_size=48, intermediate_size=64)
    report = write(tmp_path / "model", tmp_path / "m.gguf", "q8_0")
    found = tensors_of(tmp_path / "m.gguf")
    assert found["blk.0.ffn_down.weight"].tensor_type.name == "Q8_0"
    assert found["blk.0.ffn_up.weight"].tensor_type.name == "F16"
    assert any("matrices are F16" in note for note in report.notes)


def test_rows_of_q_and_k_change_places_for_llama_and_for_no_other(tmp_path: Path) -> None:
    for family in ("llama", "qwen2"):
        tiny(family, tmp_path / family)
        weight = stored(tmp_path / family)["model.layers.0.self_attn.k_proj.weight"]
        write(tmp_path / family, tmp_path / f"{family}.gguf", "f32")
        found = values_of(tensors_of(tmp_path / f"{family}.gguf")["blk.0.attn_k.weight"])
        rows = list(range(32))
        if family == "llama":  # heads of 16 rows: 0, 8, 1, 9, ...
            rows = [head + half + row for head in (0, 16) for row in range(8) for half in (0, 8)]
        assert torch.equal(found, weight[rows])


def test_biases_of_a_llama_go_along(tmp_path: Path) -> None:
    tiny("llama", tmp_path / "model", attention_bias=True, mlp_bias=True)
    write(tmp_path / "model", tmp_path / "m.gguf", "bf16")
    found, weights = tensors_of(tmp_path / "m.gguf"), stored(tmp_path / "model")
    bias = weights["model.layers.1.self_attn.q_proj.bias"]
    paired = bias.reshape(4, 2, 8).transpose(1, 2).reshape(-1)
    assert torch.equal(values_of(found["blk.1.attn_q.bias"]), paired)
    assert torch.equal(
        values_of(found["blk.1.ffn_down.bias"]), weights["model.layers.1.mlp.down_proj.bias"]
    )


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_experts_in_banks_and_one_by_one_make_the_same_file(family: str, tmp_path: Path) -> None:
    model = tiny(family, tmp_path / "one")
    single = stored(tmp_path / "one")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in single
    tiny(family, tmp_path / "two")
    store(tmp_path / "two", {n: t.contiguous() for n, t in model.state_dict().items()})
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored(tmp_path / "two")
    for name in ("one", "two"):
        write(tmp_path / name, tmp_path / f"{name}.gguf", "f32")
    one, two = (tensors_of(tmp_path / f"{name}.gguf") for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(bytes(one[name].data) == bytes(two[name].data) for name in one)
    stack = values_of(one["blk.1.ffn_up_exps.weight"])
    assert torch.equal(stack[2], single["model.layers.1.mlp.experts.2.up_proj.weight"])
    assert one["blk.0.ffn_gate_inp.weight"].tensor_type.name == "F32"


def test_llama3_scaling_becomes_the_factors_that_transformers_computes(tmp_path: Path) -> None:
    model = tiny("llama", tmp_path / "model", rope_parameters=LLAMA3)
    write(tmp_path / "model", tmp_path / "m.gguf", "f32")
    factors = values_of(tensors_of(tmp_path / "m.gguf")["rope_freqs.weight"])
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(factors, plain / scaled, rtol=1e-5, atol=0)
    assert len(set(factors.tolist())) > 2
    assert keys_of(tmp_path / "m.gguf")["llama.rope.freq_base"] == 500000.0


def test_linear_and_yarn_scaling_become_keys(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16.0}
    yarn["original_max_position_embeddings"] = 32
    tiny("qwen3", tmp_path / "yarn", rope_parameters=yarn)
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    tiny("llama", tmp_path / "linear", rope_parameters=linear)
    for name in ("yarn", "linear"):
        write(tmp_path / name, tmp_path / f"{name}.gguf", "bf16")
    keys = keys_of(tmp_path / "yarn.gguf")
    assert keys["qwen3.rope.scaling.type"] == "yarn"
    assert keys["qwen3.rope.scaling.factor"] == 4.0
    assert keys["qwen3.rope.scaling.original_context_length"] == 32
    assert keys["qwen3.rope.scaling.yarn_beta_fast"] == 16.0
    keys = keys_of(tmp_path / "linear.gguf")
    assert (keys["llama.rope.scaling.type"], keys["llama.rope.scaling.factor"]) == ("linear", 2.0)


def test_the_file_says_what_the_model_is_and_nothing_else(tmp_path: Path) -> None:
    tiny("qwen2", tmp_path / "My-Model")
    config = tmp_path / "My-Model/config.json"
    document = {**json.loads(config.read_bytes()), "_name_or_path": "acme/base-model"}
    config.write_text(json.dumps(document))
    write(tmp_path / "My-Model", tmp_path / "m.gguf", "f32")
    general = {k: v for k, v in keys_of(tmp_path / "m.gguf").items() if k.startswith("general.")}
    assert general == {
        "general.architecture": "qwen2",
        "general.type": "model",
        "general.file_type": 0,
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "general.name": "My-Model",
        "general.base_model.count": 1,
        "general.base_model.0.name": "base-model",
        "general.base_model.0.organization": "acme",
        "general.base_model.0.repo_url": "https://huggingface.co/acme/base-model",
    }


def test_a_training_checkpoint_makes_the_same_tensors_and_the_same_tokenizer(
    tmp_path: Path,
) -> None:
    model = tiny("qwen3", tmp_path / "hub")
    tokenizer = qwen_tokenizer()
    mp.save(tmp_path / "run" / "step-1", {"model": model}, step=1, processing_class=tokenizer)
    checked = RewriteOptions(is_durable=False, check=Check.LOAD)
    for name in ("hub", "run/step-1"):
        output = tmp_path / f"{Path(name).name}.gguf"
        report = to_gguf(tmp_path / name, output, dtype="q8_0", options=checked)
        assert report.check is not None and report.check.parameters == report.parameters
    ours, theirs = tensors_of(tmp_path / "step-1.gguf"), tensors_of(tmp_path / "hub.gguf")
    assert all(bytes(ours[name].data) == bytes(theirs[name].data) for name in theirs)
    keys: list[dict[str, Any]] = [keys_of(tmp_path / f"{n}.gguf") for n in ("hub", "step-1")]
    for found in keys:
        del found["general.name"]
    assert keys[0] == keys[1]
