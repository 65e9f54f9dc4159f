"""Models of several parts: adapters and lists of modules go by the names that loaders give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from milepost.tools.dequantize import dequantize
from milepost.tools.extract_lora import extract_lora
from milepost.tools.lowp.targets import Format
from milepost.tools.merge_peft import merge_peft_adapters
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from tests.tools.rewrite.hub import QUICK
from tests.tools.vision import load_vision, save_gemma3, seen

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gemma3(tmp_path_factory.mktemp("vision") / "base")


def adapted(base: Path, adapter: Path) -> torch.Tensor:
    return seen(PeftModel.from_pretrained(load_vision(base), str(adapter)))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj", "fc1"]},
        {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    ],
    ids=["text and vision", "embedding and head"],
)
def test_an_adapter_that_peft_saved_is_merged_into_both_parts(
    settings: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    model = get_peft_model(load_vision(base), LoraConfig(r=2, lora_alpha=8, **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path / "a")
    merge_peft_adapters(
        [tmp_path / "a"], tmp_path / "out", base=base, dtype="float32", options=QUICK
    )
    wanted = adapted(base, tmp_path / "a")
    assert torch.allclose(seen(load_vision(tmp_path / "out")), wanted, atol=1e-4)
    assert not torch.allclose(seen(load_vision(base)), wanted, atol=1e-2)


def test_an_extracted_adapter_moves_both_parts_in_peft(base: Path, tmp_path: Path) -> None:
    tuned = load_vision(base)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if name.endswith(("q_proj.weight", "fc1.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tuned.save_pretrained(tmp_path / "tuned")
    extract_lora(tmp_path / "tuned", base, tmp_path / "a", rank=64, dtype="f32", options=QUICK)
    wanted = seen(load_vision(tmp_path / "tuned"))
    assert torch.allclose(adapted(base, tmp_path / "a"), wanted, atol=1e-3)
    assert not torch.allclose(seen(load_vision(base)), wanted, atol=1e-2)


def test_readers_find_the_modules_that_were_left_as_they_are(base: Path, tmp_path: Path) -> None:
    quantize_to_lowp(base, tmp_path / "q", format=Format.FP8, options=QUICK)
    dequantize(tmp_path / "q", tmp_path / "d", dtype="float32", options=QUICK)
    wanted, found = (seen(load_vision(tmp_path / name)) for name in ("d", "q"))
    assert (found - wanted).norm() < 0.1 * wanted.norm()  # activations are rounded, too
    config = json.loads((tmp_path / "q/config.json").read_bytes())
    ignored = config["quantization_config"]["ignore"]
    attention = "layers.0.self_attn.q_proj"
    assert f"language_model.model.{attention}" in ignored
    assert f"model.language_model.{attention}" in ignored
