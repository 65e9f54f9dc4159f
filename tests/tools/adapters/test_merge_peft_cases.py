"""`merge-peft-adapters` on reported faults: types, layers that are missing, quantised bases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from milepost.adapters.config import LoraSettings
from milepost.errors import InvalidInputError
from milepost.tools.dequantize import dequantize
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format
from milepost.tools.merge_peft import Compare, merge_peft_adapters
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from tests.tools.adapters.peft_oracle import (
    ALL_LINEAR,
    EXPERTS,
    PLAIN,
    QUICK,
    llama,
    load,
    outputs,
    tensors_of,
    write_adapter,
    write_base,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # peft advises on each choice
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.mark.case("V08")
@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
def test_a_bf16_base_with_an_fp32_adapter_stays_bf16_unless_asked_otherwise(
    dtype: str | None, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", llama(hidden_size=64, vocab_size=400), torch.bfloat16)
    adapter = write_adapter(tmp_path / "a", base, **PLAIN)
    factors = load_file(adapter / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in factors.values()} == {torch.float32}
    merge_peft_adapters([adapter], tmp_path / "out", dtype=dtype, options=QUICK)
    wanted = getattr(torch, dtype or "bfloat16")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "out").values()} == {wanted}
    config = json.loads((tmp_path / "out/config.json").read_bytes())
    assert config["dtype"] == (dtype or "bfloat16")
    if dtype is not None:
        assert config["torch_dtype"] == dtype
    before = (base / "model.safetensors").stat().st_size
    after = (tmp_path / "out/model.safetensors").stat().st_size
    assert after == pytest.approx(before * (2 if dtype == "float32" else 1), rel=0.05)


@pytest.mark.case("V50")
def test_an_adapter_of_which_nothing_fits_is_refused(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", bases["llama"], **PLAIN)
    file = adapter / "adapter_model.safetensors"
    factors = load_file(file)
    save_file({n.replace("model.layers", "encoder.block"): t for n, t in factors.items()}, file)
    with pytest.raises(InvalidInputError, match="8 of its 8 tensors") as caught:
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    assert "encoder.block" in str(caught.value) and "model.layers" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.case("V47")
def test_magnitudes_of_grouped_experts_are_refused_by_name(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    settings = {**PLAIN, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    adapter = write_adapter(tmp_path / "a", bases["qwen3_moe"], **settings)
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_bytes()), "use_dora": True}))
    with pytest.raises(InvalidInputError, match="DoRA") as caught:
        merge_peft_adapters([adapter], tmp_path / "out", options=QUICK)
    assert "mlp.experts" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", [Format.NVFP4, Format.FP8])
def test_an_adapter_of_a_quantised_base_merges_onto_its_values_or_its_original_and_says_which(
    format: Format, tmp_path: Path
) -> None:
    base = write_base(
        tmp_path / "base", llama(hidden_size=64, intermediate_size=64), torch.bfloat16
    )
    scope = Scope(include=["*.self_attn.*_proj.weight"])
    quantize_to_lowp(base, tmp_path / "coded", format=format, scope=scope, options=QUICK)
    dequantize(tmp_path / "coded", tmp_path / "values", dtype="float32", options=QUICK)
    adapter = write_adapter(
        tmp_path / "a", tmp_path / "values", **{**PLAIN, "target_modules": ALL_LINEAR}
    )
    trained = PeftModel.from_pretrained(load(tmp_path / "values"), str(adapter))
    told, off = {}, {}
    for name, dtype in (("coded", "float32"), ("values", None), ("base", None)):
        out, onto = tmp_path / f"onto-{name}", tmp_path / name
        report = merge_peft_adapters([adapter], out, base=onto, dtype=dtype, options=QUICK)
        (told[name],) = [note for note in report.notes if note.startswith("merged onto")]
        assert str(tmp_path / name) in told[name]
        off[name] = float((outputs(load(out)) - outputs(trained)).norm())
    assert "dequantised base" in told["coded"] and "compressed-tensors" in told["coded"]
    assert "F32" in told["values"] and "BF16" in told["base"]
    assert off["coded"] == off["values"] < 1e-3 * float(outputs(trained).norm()) < off["base"]


def test_outputs_that_are_compared_find_a_merge_that_is_wrong(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "a", bases["llama"], **PLAIN)
    right = LoraSettings.scaling
    monkeypatch.setattr(LoraSettings, "scaling", lambda self, path: 1.5 * right(self, path))
    with pytest.raises(InvalidInputError, match="more than rounding explains"):
        merge_peft_adapters([adapter], tmp_path / "x", compare=Compare.OUTPUTS, options=QUICK)
    assert not (tmp_path / "x").exists()
    monkeypatch.undo()
    merge_peft_adapters([adapter], tmp_path / "x", compare=Compare.OUTPUTS, options=QUICK)


def settings_of(name: str) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "rslora": {"use_rslora": True},
        "dora": {"use_dora": True},
        "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
        "modules to save": {"modules_to_save": ["lm_head"]},
    }
    return {**PLAIN, **kinds[name]}


@pytest.mark.parametrize("kind", ["rslora", "dora", "embedding", "modules to save"])
def test_verify_runs_each_kind_of_adapter(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", bases["llama"], **settings_of(kind))
    report = merge_peft_adapters(
        [adapter], tmp_path / "out", compare=Compare.OUTPUTS, options=QUICK
    )
    assert any(note.startswith("verified on 24 tokens") for note in report.notes)
