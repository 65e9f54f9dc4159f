"""`--verify` of several adapters, of weights, of experts and of quantised bases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.adapters.arithmetic import grouped_experts, linear
from milepost.errors import InvalidInputError
from milepost.tools import merge_peft_plan
from milepost.tools.lowp.selection import Scope
from milepost.tools.lowp.targets import Format
from milepost.tools.merge_peft import Compare, merge_peft_adapters
from milepost.tools.moe_experts import fuse_moe_experts
from milepost.tools.quantize_to_lowp import quantize_to_lowp
from milepost.tools.rewrite.options import Mode, RewriteOptions
from tests.tools.adapters.peft_oracle import (
    EXPERTS,
    PLAIN,
    QUICK,
    llama,
    write_adapter,
    write_base,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # peft advises on each choice

VERIFIED: dict[str, Any] = {"compare": Compare.OUTPUTS, "options": QUICK}
OTHER = {**PLAIN, "r": 2, "target_modules": ["q_proj", "up_proj"]}
PAIRS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", PLAIN, {**OTHER, "use_rslora": True}),
    "of a Conv1D": ("gpt2", {"r": 4, "target_modules": ["c_attn"]}, {"target_modules": ["c_fc"]}),
    "two of DoRA": ("llama", {**PLAIN, "use_dora": True}, {**OTHER, "use_dora": True}),
    "embeddings": ("llama", {**PLAIN, "target_modules": ["embed_tokens"]}, OTHER),
    "modules to save": ("llama", {**PLAIN, "modules_to_save": ["lm_head"]}, OTHER),
    "rows": (
        "llama",
        {**PLAIN, "trainable_token_indices": [3, 7]},
        {**OTHER, "trainable_token_indices": [7, 9, 11]},
    ),
    "parameters": (
        "qwen3_moe",
        {**PLAIN, "target_modules": ["q_proj"], "target_parameters": EXPERTS},
        {**OTHER, "target_modules": ["v_proj"], "target_parameters": EXPERTS},
    ),
}


def told(notes: tuple[str, ...]) -> str:
    (note,) = [note for note in notes if note.startswith("verified on 24 tokens")]
    return note


@pytest.mark.parametrize("kind", PAIRS)
def test_several_adapters_compute_the_sum_of_their_weighted_differences(
    kind: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    family, *settings = PAIRS[kind]
    adapters = [
        write_adapter(tmp_path / name, bases[family], seed=seed, **each)
        for name, seed, each in zip("ab", (2, 3), settings, strict=True)
    ]
    given = [f"{adapters[0]}:0.5", f"{adapters[1]}:-1.5"]
    report = merge_peft_adapters(given, tmp_path / "out", **VERIFIED)
    assert "those of the adapters" in told(report.notes)
    merge_peft_adapters([f"{adapters[0]}:0.25"], tmp_path / "one", **VERIFIED)


def test_a_weight_that_a_merge_would_take_wrongly_is_found(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = [
        write_adapter(tmp_path / name, bases["llama"], seed=seed, **PLAIN)
        for name, seed in (("a", 2), ("b", 3))
    ]
    monkeypatch.setattr(merge_peft_plan, "linear", lambda a, b, s, **k: linear(a, b, 1.2 * s, **k))
    with pytest.raises(InvalidInputError, match="more than rounding explains"):
        merge_peft_adapters([f"{adapters[0]}:0.5", adapters[1]], tmp_path / "x", **VERIFIED)
    assert not (tmp_path / "x").exists()


def test_what_peft_cannot_run_together_is_refused_before_anything_is_merged(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases["gpt2"]
    settings: dict[str, Any] = {"target_modules": ["c_attn"]}
    biased = write_adapter(tmp_path / "a", base, bias="all", **settings)
    merge_peft_adapters([biased], tmp_path / "out", **VERIFIED)
    rows = write_adapter(tmp_path / "b", base, trainable_token_indices={"wte": [3]}, **settings)
    dry = RewriteOptions(mode=Mode.DRY_RUN)
    given: list[str | Path] = [f"{biased}:0.5", rows]
    report = merge_peft_adapters(given, tmp_path / "x", compare=Compare.OUTPUTS, options=dry)
    assert len(report.problems) == 2
    assert "bias is 'all'" in report.problems[0] and "alone, at weight 1" in report.problems[0]
    assert "trainable_token_indices are of other parts" in report.problems[1]


# ---- experts


def write_expert_adapter(place: Path, base: Path, *, inner: int, seed: int = 5) -> Path:
    """Factors of all banks, as expert-parallel runs save them."""
    place.mkdir()
    torch.manual_seed(seed)
    shapes = {
        "gate_up_proj.lora_A": (16, 2),
        "gate_up_proj.lora_B": (2, 2 * inner),
        "down_proj.lora_A": (inner, 2),
        "down_proj.lora_B": (2, 16),
    }
    factors = {
        f"model.layers.{layer}.mlp.experts.{name}": torch.randn(4, *shape)
        for layer in range(2)
        for name, shape in shapes.items()
    }
    save_file(factors, place / "adapter_model.safetensors")
    config = {"peft_type": "EXPERT_LORA", "base_model_name_or_path": str(base), **SETTINGS}
    (place / "adapter_config.json").write_text(json.dumps(config))
    return place


SETTINGS = {"r": 2, "lora_alpha": 1.0, "expert_projections": ["gate_up_proj", "down_proj"]}


def mixed(place: Path, base: Path, experts: Path) -> Path:
    """Factors of attention and of experts in one adapter, as a run that trains both saves them."""
    write_adapter(place, base, **{**PLAIN, "target_modules": ["q_proj"]})
    config, file = place / "adapter_config.json", place / "adapter_model.safetensors"
    both = {"peft_type": "LORA_WITH_EP_EXPERT_LORA", "ep_expert_lora": SETTINGS}
    config.write_text(json.dumps({**json.loads(config.read_bytes()), **both}))
    save_file({**load_file(file), **load_file(experts / file.name)}, file)
    return place


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_factors_of_experts_compute_in_the_banks_of_a_live_model(
    family: str, bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, inner = bases[family], 12 if family == "qwen3_moe" else 16
    experts = write_expert_adapter(tmp_path / "experts", base, inner=inner)
    again = write_expert_adapter(tmp_path / "again", base, inner=inner, seed=6)
    both = mixed(tmp_path / "both", base, experts)
    merge_peft_adapters([experts], tmp_path / "one", **VERIFIED)
    merge_peft_adapters([both], tmp_path / "two", **VERIFIED)
    others = {**PLAIN, "target_modules": ["k_proj", "o_proj"]}
    plain = write_adapter(tmp_path / "plain", base, seed=3, **others)
    given = [f"{both}:0.5", f"{plain}:2", f"{again}:-1"]
    merge_peft_adapters(given, tmp_path / "three", **VERIFIED)
    if family == "qwen3_moe":
        fuse_moe_experts(base, tmp_path / "fused", options=QUICK)
        merge_peft_adapters([experts], tmp_path / "four", base=tmp_path / "fused", **VERIFIED)
    monkeypatch.setattr(
        merge_peft_plan, "grouped_experts", lambda a, b, s, lay: grouped_experts(a, -b, s, lay)
    )
    with pytest.raises(InvalidInputError, match="more than rounding explains"):
        merge_peft_adapters([both], tmp_path / "x", **VERIFIED)


# ---- quantised bases


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_quantised_base_runs_as_the_floats_that_were_merged_onto(
    dtype: str | None, tmp_path: Path
) -> None:
    config = llama(hidden_size=64, intermediate_size=64)
    base = write_base(tmp_path / "base", config, torch.bfloat16)
    scope = Scope(include=["*.self_attn.*_proj.weight"])
    quantize_to_lowp(base, tmp_path / "coded", format=Format.MXFP4, scope=scope, options=QUICK)
    adapter = write_adapter(tmp_path / "a", base, **PLAIN)
    report = merge_peft_adapters(
        [adapter], tmp_path / "out", base=tmp_path / "coded", dtype=dtype, **VERIFIED
    )
    assert "of the adapter" in told(report.notes)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "base", "coded", "out"]
    assert not list((tmp_path / "out").glob(".*"))
    if dtype is not None:  # 4 bits are far from the weights that they were made of
        with pytest.raises(InvalidInputError, match="more than rounding explains"):
            wrong_base(tmp_path, adapter)


def wrong_base(tmp_path: Path, adapter: Path) -> None:
    from milepost.tools.merge_peft_adapter import open_adapter
    from milepost.tools.merge_peft_config import MergeTask
    from milepost.tools.merge_peft_verify import verify_outputs

    opened = [open_adapter(adapter)]
    verify_outputs(tmp_path / "base", opened, tmp_path / "out", MergeTask.CAUSAL_LM)
