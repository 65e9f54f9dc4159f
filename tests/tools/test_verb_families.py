"""Verbs on tiny models of real architectures: transformers computes the same of the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from milepost.hf.expert_layouts import EXPERT_NAMES
from milepost.hf.fp32_names import stays_fp32
from milepost.tools.average import average
from milepost.tools.cast import cast
from milepost.tools.convert_to_bf16 import convert_to_bf16
from milepost.tools.dequantize import dequantize
from milepost.tools.extract_lora import extract_lora
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format
from milepost.tools.merge_models import Tokenizers, merge_models
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.moe_experts import fuse_moe_experts, unfuse_moe_experts
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from milepost.tools.rename import rename
from milepost.tools.reset_sinks import reset_sinks
from milepost.tools.reshard import reshard
from milepost.tools.rewrite.options import Check, RewriteOptions
from tests.tools.lowp.models import decompressed
from tests.tools.merge_models.merging import command
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CHECKED = RewriteOptions(check=Check.LOAD, is_durable=False, threads=2)
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# The class without ForCausalLM, and what its configuration has besides.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "Gemma3": {"head_dim": 8, "query_pre_attn_scalar": 8, "tie_word_embeddings": True},
    "Mistral": {"head_dim": 8},
    "Mixtral": {**EXPERTS, "intermediate_size": 32},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8},
    "DeepseekV3": LATENT,
    "GptOss": {**EXPERTS, "intermediate_size": 32, "head_dim": 8},
    "Olmoe": {**EXPERTS, "intermediate_size": 32},
    "Glm4Moe": {**LATENT, "num_key_value_heads": 2, "head_dim": 8},
    "GraniteMoe": {**EXPERTS, "intermediate_size": 32},
    "Lfm2Moe": {**EXPERTS, "layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
}
TOKENS = torch.arange(3, 27).view(2, 12)


def save(family: str, place: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model of which no two tensors agree, saved by transformers."""
    import transformers

    name = "Gemma3Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **FAMILIES[family]})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.05)
    model.to(dtype).save_pretrained(place)
    return model


def loaded(place: Path, **options: Any) -> Any:
    """As a user would load it; every tensor must be found and used."""
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        place, output_loading_info=True, **{"dtype": torch.float32, **options}
    )
    assert not any(info.values()), info
    return model.eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found = model(input_ids=TOKENS).logits
    assert isinstance(found, Tensor) and bool(found.isfinite().all())
    return found


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def kind_of(place: Path) -> str:
    return str(json.loads((place / "config.json").read_bytes())["model_type"])


@pytest.fixture(scope="module")
def hub(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: str = request.param
    place = tmp_path_factory.mktemp(family) / family
    save(family, place)
    return place


WITH_SINGLE_EXPERTS = [
    name
    for name, settings in FAMILIES.items()
    if "num_experts" in settings and name not in ("GptOss", "GraniteMoe")
]
DENSE = [name for name, settings in FAMILIES.items() if "num_experts" not in settings]
each_family = pytest.mark.parametrize("hub", FAMILIES, indirect=True)


@each_family
def test_what_only_moves_bytes_computes_the_same_to_the_last_bit(hub: Path, tmp_path: Path) -> None:
    wanted = logits(loaded(hub))
    small = RewriteOptions(max_shard_size="20KB", check=Check.LOAD, is_durable=False, threads=2)
    reshard(hub, tmp_path / "reshard", options=small)
    rename(hub, tmp_path / "away", rules=[("^", "x.")], options=QUICK)
    rename(tmp_path / "away", tmp_path / "rename", rules=[(r"^x\.", "")], options=CHECKED)
    cast(hub, tmp_path / "cast", dtype="float64", options=CHECKED)
    average([hub, hub], tmp_path / "average", options=CHECKED)
    for verb in ("reshard", "rename", "cast", "average"):
        assert torch.equal(logits(loaded(tmp_path / verb)), wanted), verb
    if kind_of(hub) == "gpt_oss":
        return
    reset_sinks(hub, tmp_path / "sinks", options=CHECKED)
    assert torch.equal(logits(loaded(tmp_path / "sinks")), wanted)


@pytest.mark.parametrize("hub", WITH_SINGLE_EXPERTS, indirect=True)
def test_experts_in_the_other_form_compute_the_same_to_the_last_bit(
    hub: Path, tmp_path: Path
) -> None:
    assert kind_of(hub) in EXPERT_NAMES
    fuse_moe_experts(hub, tmp_path / "fused", options=CHECKED)
    assert not same_bits(read_hub(tmp_path / "fused"), read_hub(hub))
    unfuse_moe_experts(tmp_path / "fused", tmp_path / "single", options=CHECKED)
    assert same_bits(read_hub(tmp_path / "single"), read_hub(hub))
    wanted = logits(loaded(hub))
    for form in ("fused", "single"):
        assert torch.equal(logits(loaded(tmp_path / form)), wanted)


def is_bias(name: str) -> bool:
    """Whether a router of GPT-OSS is balanced by it."""
    return name.endswith("mlp.router.bias")


@each_family
def test_bf16_is_that_of_torch_but_for_what_the_family_keeps(hub: Path, tmp_path: Path) -> None:
    convert_to_bf16(hub, tmp_path / "out", options=CHECKED)
    kind = kind_of(hub)
    expected = {
        name: tensor if stays_fp32(name, [kind]) or is_bias(name) else tensor.bfloat16()
        for name, tensor in read_hub(hub).items()
    }
    assert same_bits(read_hub(tmp_path / "out"), expected)
    narrow = loaded(tmp_path / "out", dtype="auto")
    assert narrow.dtype == torch.bfloat16
    wanted = loaded(hub, dtype=torch.bfloat16)
    assert same_bits(narrow.state_dict(), wanted.state_dict())
    assert torch.equal(logits(narrow), logits(wanted))


@each_family
def test_a_mean_of_two_models_is_that_of_their_tensors(hub: Path, tmp_path: Path) -> None:
    family = hub.name
    other = save(family, tmp_path / "other", seed=1)
    recipe = command([Path(f"{hub}:0.25"), Path(f"{tmp_path / 'other'}:0.75")])
    out = tmp_path / "out"
    merge_models(recipe, out, tokenizers=Tokenizers.ALLOW_MISSING, options=CHECKED)
    model, one = loaded(out), loaded(hub).state_dict()
    two = other.state_dict()
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            mean = 0.25 * one[name] + 0.75 * two[name]
            torch.testing.assert_close(tensor, mean, rtol=1e-6, atol=1e-7)
    average([hub, tmp_path / "other"], tmp_path / "average", weights=[1, 3], options=CHECKED)
    assert relative(logits(loaded(tmp_path / "average")), logits(model)) < 1e-5


@each_family
def test_an_adapter_is_folded_in_as_by_peft(hub: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "out_proj", "kv_b_proj"]
    )
    adapted = get_peft_model(loaded(hub), settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(tmp_path / "adapter")
    report = merge_peft_adapters(
        [tmp_path / "adapter"], tmp_path / "out", base=hub, options=CHECKED
    )
    assert report.counts["changed"] >= 2
    merged = loaded(tmp_path / "out")
    assert relative(logits(merged), logits(adapted)) < 1e-5
    theirs = PeftModel.from_pretrained(loaded(hub), str(tmp_path / "adapter")).merge_and_unload()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(merged.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    extract_lora(tmp_path / "out", hub, tmp_path / "again", rank=4, options=QUICK)
    again = PeftModel.from_pretrained(loaded(hub), str(tmp_path / "again"))
    assert relative(logits(again.eval()), logits(adapted)) < 1e-4


@pytest.mark.parametrize("hub", [*DENSE, *WITH_SINGLE_EXPERTS], indirect=True)
@pytest.mark.parametrize("format", Format)
def test_quantised_weights_are_those_of_the_reader_and_close_to_the_original(
    hub: Path, tmp_path: Path, format: Format
) -> None:
    scope = Scope(include=["*.self_attn.*_proj.weight"])
    source = tmp_path / "bf16"
    convert_to_bf16(hub, source, options=QUICK)
    quantize_to_lowp(source, tmp_path / "q", format=format, scope=scope, options=CHECKED)
    dequantize(tmp_path / "q", tmp_path / "back", options=CHECKED)
    ours = read_hub(tmp_path / "back")
    theirs = decompressed(tmp_path / "q", tmp_path / "theirs")
    assert same_bits(theirs, ours)
    before, after = logits(loaded(source)), logits(loaded(tmp_path / "back"))
    limit = {Format.MXFP8: 0.15, Format.FP8: 0.15, Format.NVFP4: 0.6, Format.MXFP4: 0.7}[format]
    assert 0 < relative(after, before) < limit
