"""Models that transformers quantised with bitsandbytes, dequantised and merged, against both.

bitsandbytes prints warnings wherever it is imported, so it is not in the development environment;
`make test-8bit` makes one that has it and runs this file.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost.tools.dequantize import dequantize
from milepost.tools.merge_peft import merge_peft_adapters
from tests.tools.lowp.coded_tensors import written
from tests.tools.lowp.four_bits import METHOD
from tests.tools.lowp.models import logits
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes: make test-8bit"
)
STATE = ".quant_state.bitsandbytes__"
FOUR = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
SETTINGS: dict[str, dict[str, Any]] = {
    "nf4": {**FOUR, "bnb_4bit_quant_type": "nf4"},
    "nf4, absmax quantised": {
        **FOUR, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    },
    "nf4 kept in bf16": {
        **FOUR, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": torch.bfloat16,
    },
    "fp4": {**FOUR, "bnb_4bit_quant_type": "fp4"},
    "fp4, absmax quantised": {
        **FOUR, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True,
    },
    "int8": {"load_in_8bit": True},
    "some modules skipped": {
        **FOUR, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": ["lm_head", "k_proj"],
    },
}  # fmt: skip


def load(place: Path, **settings: Any) -> Any:
    import transformers

    if settings:
        settings = {"quantization_config": transformers.BitsAndBytesConfig(**settings)}
    return transformers.AutoModelForCausalLM.from_pretrained(place, device_map="cpu", **settings)


def quantised(place: Path, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Path:
    """A small model that transformers quantised and saved. Its rows are whole blocks: kernels of
    bitsandbytes for CPUs with AVX-512 misread others."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(place / "plain")
    load(place / "plain", **settings).save_pretrained(place / "quantised")
    return place / "quantised"


def read_by_bitsandbytes(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each quantised weight out of the files alone, as its own functions dequantise it."""
    functional = importlib.import_module("bitsandbytes.functional")
    found = {}
    for name in stored:
        stem, mark, _ = name.partition(STATE)
        if mark:
            parts = {n.removeprefix(f"{stem}."): t for n, t in stored.items() if f"{stem}." in n}
            state = functional.QuantState.from_dict(parts, device=torch.device("cpu"))
            found[stem] = functional.dequantize_4bit(stored[stem], state)
        elif name.endswith(".SCB"):
            weight = name.replace(".SCB", ".weight")
            found[weight] = functional.int8_vectorwise_dequant(stored[weight], stored[name])
    return found


@pytest.mark.parametrize("case", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_have_the_bits_that_bitsandbytes_makes(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = quantised(tmp_path, dtype, **SETTINGS[case])
    stored = read_hub(source)
    theirs = read_by_bitsandbytes(stored)
    report = dequantize(source, tmp_path / "out", options=QUICK)
    assert report.counts == {"dequantised": len(theirs)}
    assert len(theirs) == (12 if "skipped" in case else 14)
    made = read_hub(tmp_path / "out")
    for name, tensor in made.items():  # kernels differ in the sign of the zeros of FP4
        expected = theirs[name].bfloat16() if name in theirs else stored[name]
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name
        assert "fp4" in case or same_bits({name: tensor}, {name: expected})
    dequantize(source, tmp_path / "own", dtype=str(dtype), options=QUICK)
    own, whole = read_hub(tmp_path / "own"), load(source).dequantize().state_dict()
    assert own.keys() == whole.keys()
    assert all(torch.equal(tensor, whole[name].to(dtype)) for name, tensor in own.items())
    config = json.loads((tmp_path / "out/config.json").read_bytes())
    assert "quantization_config" not in config


@pytest.mark.parametrize("case", ["nf4, absmax quantised", "fp4", "int8"])
def test_a_dequantised_model_computes_what_the_quantised_one_does(
    case: str, tmp_path: Path
) -> None:
    source = quantised(tmp_path, **SETTINGS[case])
    dequantize(source, tmp_path / "out", options=QUICK)
    found, theirs, plain = (
        logits(place).double() for place in (tmp_path / "out", source, tmp_path / "plain")
    )
    off, of_codes = (float((other - found).norm() / found.norm()) for other in (theirs, plain))
    assert off < 0.02
    if case != "int8":  # there activations are quantised, too
        assert of_codes > 2 * off


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("block", [32, 64, 128, 4096])
@pytest.mark.parametrize("is_nested", [False, True])
def test_blocks_that_run_on_over_rows_are_read_as_its_reference_does(
    kind: str, block: int, is_nested: bool, tmp_path: Path
) -> None:
    functional = importlib.import_module("bitsandbytes.functional")
    weight = torch.randn(701, 503, generator=torch.Generator().manual_seed(block))
    codes, state = functional.quantize_4bit(
        weight, blocksize=block, compress_statistics=is_nested, quant_type=kind
    )
    parts = {f"a.weight.{n}": t.clone() for n, t in state.as_dict(packed=True).items()}
    source = written(tmp_path / "in", {"a.weight": codes, **parts}, METHOD)
    dequantize(source, tmp_path / "out", dtype="float32", options=QUICK)
    found = read_hub(tmp_path / "out")["a.weight"]
    assert torch.equal(found, functional.dequantize_4bit(codes, state))  # odd rows: in torch


def test_an_adapter_merges_onto_the_base_that_it_was_trained_on(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    source = quantised(tmp_path, **SETTINGS["nf4, absmax quantised"])
    torch.manual_seed(3)
    wanted = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(load(source), wanted)
    assert "4bit" in type(model.base_model.model.model.layers[0].self_attn.q_proj).__name__
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    report = merge_peft_adapters([tmp_path / "adapter"], tmp_path / "out", options=QUICK)
    assert any("merged onto the dequantised base" in note for note in report.notes)
    dequantised = load(source).dequantize().float()
    merged = PeftModel.from_pretrained(dequantised, str(tmp_path / "adapter")).merge_and_unload()
    expected, made = merged.state_dict(), read_hub(tmp_path / "out")
    assert made.keys() == expected.keys()
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, expected[name].bfloat16(), rtol=2**-7, atol=1e-6)
    merge_peft_adapters([tmp_path / "adapter"], tmp_path / "w", dtype="float32", options=QUICK)
    for name, tensor in read_hub(tmp_path / "w").items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        trained = model.eval()(ids).logits.double()
    off = (logits(tmp_path / "out").double() - trained).norm() / trained.norm()
    assert off < 0.02


def test_conv1d_layers_are_stored_transposed_and_refused(tmp_path: Path) -> None:
    import transformers

    from milepost.errors import InvalidInputError

    config = transformers.GPT2Config(
        vocab_size=40, n_embd=16, n_layer=1, n_head=4, n_positions=32, n_inner=24
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "plain")
    model = load(tmp_path / "plain", **SETTINGS["nf4"])
    model.save_pretrained(tmp_path / "in")
    (state,) = [t for n, t in read_hub(tmp_path / "in").items() if f"c_fc.weight{STATE}" in n]
    assert json.loads(bytes(state.tolist()))["shape"] == [24, 16]
    with pytest.raises(InvalidInputError, match="stored transposed"):
        dequantize(tmp_path / "in", tmp_path / "out", options=QUICK)
