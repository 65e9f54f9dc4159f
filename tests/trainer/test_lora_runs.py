"""Adapter runs, killed and resumed on every mode, and what other programs make of their saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import milepost as mp
from milepost_trainer.balancing import SIDECAR
from milepost_trainer.training import train
from tests.marks import slow
from tests.states import same
from tests.trainer.lora_runs import (
    EXPERT_LORA,
    LORA,
    MIXED,
    BaseOf,
    adapter_config,
    adapter_of,
    live_logits,
    logits_of,
    on_base,
)
from tests.trainer.yaml_runs import (
    END,
    SAVED,
    config_of,
    contents,
    look,
    losses,
    run,
    run_and_kill,
)

MERGED: dict[str, Any] = {"merge_expert_lora_on_save": True}


# ---- exact resume


@pytest.mark.parametrize(
    ("mesh", "family", "lora", "saves"),
    [
        ("", "llama", LORA, {}),
        ("dp_shard2 ep2", "moe", MIXED, MERGED),
        slow("", "llama", LORA, MERGED),
        slow("", "llama", {**LORA, "use_dora": True}, {}),
        slow("", "llama", {**LORA, "modules_to_save": ["lm_head"], "use_rslora": True}, {}),
        slow("", "moe", EXPERT_LORA, {}),
        slow("ddp2", "llama", LORA, {}),
        slow("dp_shard2", "llama", LORA, {}),
        slow("dp_shard2", "llama", LORA, MERGED),
        slow("tp2", "llama", LORA, {}),
        slow("tp2", "llama", LORA, MERGED),
        slow("dp_shard2 tp2", "llama", LORA, {}),
        slow("dp_shard2 tp2", "llama", LORA, MERGED),
        slow("cp2", "llama", LORA, {}),
        slow("cp2", "llama", LORA, MERGED),
        slow("dp_shard2 cp2", "llama", LORA, {}),
        slow("dp_shard2 ep2", "moe", EXPERT_LORA, {}),
        slow("dp_shard2 ep2", "moe", MIXED, {}),
        slow("dp_shard2 ep2", "moe", EXPERT_LORA, MERGED),
        slow("tp2 ep2", "moe", MIXED, {}),
        slow("cp2 ep2", "moe", MIXED, MERGED),
        slow("pp2", "llama", LORA, {}),
    ],
)
def test_a_killed_adapter_run_ends_like_one_that_never_stopped(
    mesh: str,
    family: str,
    lora: dict[str, Any],
    saves: dict[str, Any],
    base_of: BaseOf,
    text: Path,
    tmp_path: Path,
) -> None:
    pieces = {"microbatches": 2} if "pp" in mesh else {}
    changes = on_base(base_of(family), lora=lora, **saves, **pieces)
    end = run(tmp_path / "whole", text, mesh, **changes)
    run_and_kill(tmp_path / "killed", text, mesh, **changes)
    resumed = run(tmp_path / "killed", text, mesh, **changes)
    assert same(contents(resumed), contents(end))
    assert len(losses(resumed)) == END
    first, last = adapter_of(tmp_path / "killed" / f"checkpoint-{SAVED}"), adapter_of(resumed)
    assert same(last, adapter_of(end))
    assert first.keys() == last.keys()
    assert not any(torch.equal(first[name], last[name]) for name in first)
    assert (end / "resume_adapter.json").is_file() == bool(saves)


# ---- other meshes


@pytest.mark.parametrize(
    ("before", "after", "family", "lora", "saves"),
    [
        ("dp_shard2 tp2", "", "llama-plain", LORA, {}),
        slow("", "dp_shard2 tp2", "llama-plain", LORA, MERGED),
        slow("tp2", "dp_shard2", "llama-plain", LORA, {}),
        slow("dp_shard2", "cp2", "llama-plain", LORA, {}),
        slow("cp2", "tp2", "llama-plain", LORA, MERGED),
        slow("dp_shard2 ep2", "", "moe", MIXED, {}),
        slow("", "dp_shard2 ep2", "moe", EXPERT_LORA, MERGED),
        slow("dp_shard2 ep2", "dp_shard4 ep2", "moe", MIXED, MERGED),
        slow("tp2 ep2", "cp2 ep2", "moe", MIXED, {}),
        slow("tp2", "dp_shard2 ep2", "moe", MIXED, MERGED),
        slow("dp_shard2 ep2", "dp_shard2 tp2", "moe", MIXED, {}),
    ],
)
def test_another_mesh_takes_an_adapter_run_over(
    before: str,
    after: str,
    family: str,
    lora: dict[str, Any],
    saves: dict[str, Any],
    base_of: BaseOf,
    text: Path,
    tmp_path: Path,
) -> None:
    changes = on_base(base_of(family), lora={**lora, "lora_dropout": 0.0}, **saves)
    undisturbed = losses(run(tmp_path / "whole", text, **changes))
    run_and_kill(tmp_path / "killed", text, before, **changes)
    saved = adapter_of(tmp_path / "killed" / f"checkpoint-{SAVED}")
    moments = contents(tmp_path / "killed" / f"checkpoint-{SAVED}")["state"]["optimizer"]["tensors"]
    base = mp.Checkpoint.open(base_of(family)).read_weights()
    level = "exact-state" if (before, after) == ("dp_shard2", "cp2") else "resharded"  # same cuts
    for found in look(tmp_path / "killed", text, after, **changes):
        assert found["step"] == SAVED and found["level"] == level, found["notes"]
        learning = {n: value for n, value in found["weights"].items() if "lora_" in n}
        assert len(learning) == len(saved)
        assert same(sorted_by_bits(learning), sorted_by_bits(saved))
        frozen = found["weights"]["model.layers.1.self_attn.k_proj.weight"]
        assert torch.equal(frozen, base["model.layers.1.self_attn.k_proj.weight"])
        names = {n.removesuffix(".exp_avg") for n in found["moments"] if n.endswith(".exp_avg")}
        assert names == learning.keys()
        for name in names:
            assert torch.equal(found["moments"][f"{name}.exp_avg"], moments[f"{name}.exp_avg"])
    end = run(tmp_path / "killed", text, after, **changes)
    assert losses(end) == pytest.approx(undisturbed, rel=1e-4)


def sorted_by_bits(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in an order that does not depend on how they are called."""
    return sorted(
        tensors.values(), key=lambda value: (tuple(value.shape), value.flatten().tolist())
    )


# ---- what other programs make of it


@pytest.mark.parametrize(
    ("mesh", "lora"),
    [
        ("", {**LORA, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "use_dora": True}),
        slow("", {**LORA, "modules_to_save": ["lm_head"]}),
        slow("", {**LORA, "target_modules": ["q_proj", "embed_tokens"]}),
        slow("dp_shard2 tp2", LORA),
        slow("cp2", LORA),
    ],
)
def test_stock_peft_loads_an_adapter_and_computes_the_same(
    mesh: str, lora: dict[str, Any], base_of: BaseOf, text: Path, tmp_path: Path
) -> None:
    changes = on_base(base_of("llama"), lora=lora, max_steps=3)
    checkpoint = run(tmp_path, text, mesh, **changes)
    assert not list(checkpoint.glob("model*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(base_of("llama"))
    before = logits_of(base)
    logits = logits_of(PeftModel.from_pretrained(base, checkpoint))
    assert adapter_config(checkpoint)["base_model_name_or_path"] == str(base_of("llama"))
    assert torch.equal(logits, live_logits(tmp_path, text, **changes))
    assert not torch.allclose(logits, before, atol=1e-3)


@pytest.mark.slow
def test_stock_peft_loads_adapters_of_parameters(
    base_of: BaseOf, text: Path, tmp_path: Path
) -> None:
    lora = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
    changes = on_base(base_of("moe"), lora=lora, max_steps=3)
    checkpoint = run(tmp_path, text, **changes)
    base = AutoModelForCausalLM.from_pretrained(base_of("moe"))
    logits = logits_of(PeftModel.from_pretrained(base, checkpoint))
    assert torch.allclose(logits, live_logits(tmp_path, text, **changes), atol=1e-5)


@pytest.mark.parametrize(
    ("lora", "kind"),
    [(EXPERT_LORA, "EXPERT_LORA"), slow(MIXED, "LORA_WITH_EP_EXPERT_LORA")],
)
def test_stock_peft_refuses_what_it_would_load_by_half(
    lora: dict[str, Any], kind: str, base_of: BaseOf, text: Path, tmp_path: Path
) -> None:
    checkpoint = run(tmp_path, text, **on_base(base_of("moe"), lora=lora, max_steps=1))
    assert adapter_config(checkpoint)["peft_type"] == kind
    shapes = {name: tuple(value.shape) for name, value in adapter_of(checkpoint).items()}
    assert shapes["model.layers.0.mlp.experts.gate_up_proj.lora_A"] == (4, 16, 4)
    assert shapes["model.layers.0.mlp.experts.down_proj.lora_B"] == (4, 4, 16)
    with pytest.raises((ValueError, KeyError), match=kind):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_of("moe")), checkpoint)


@pytest.mark.parametrize(
    ("mesh", "family", "lora"),
    [
        slow("", "llama", {**LORA, "use_dora": True, "alpha_pattern": {"q_proj": 64}}),
        slow("dp_shard2 tp2", "llama", LORA),
        slow("cp2", "llama", LORA),
        slow("", "moe", MIXED),
        slow("dp_shard2 tp2", "moe", MIXED),
        ("dp_shard2 ep2", "moe", MIXED),
    ],
)
def test_a_merged_checkpoint_is_a_model_with_the_logits_of_the_live_one(
    mesh: str, family: str, lora: dict[str, Any], base_of: BaseOf, text: Path, tmp_path: Path
) -> None:
    changes = on_base(base_of(family), lora=lora, max_steps=3, **MERGED)
    checkpoint = run(tmp_path, text, mesh, **changes)
    assert not (checkpoint / "adapter_config.json").exists()
    logits = logits_of(AutoModelForCausalLM.from_pretrained(checkpoint))
    live = live_logits(tmp_path, text, **changes)
    assert torch.allclose(logits, live, rtol=1e-4, atol=1e-4)
    base = logits_of(AutoModelForCausalLM.from_pretrained(base_of(family)))
    assert not torch.allclose(logits, base, atol=1e-2)


# ---- refusals and companions


@pytest.mark.parametrize("saves", [{}, MERGED], ids=["alone", "merged"])
def test_a_resume_with_another_scaling_is_refused(
    saves: dict[str, Any], base_of: BaseOf, text: Path, tmp_path: Path
) -> None:
    changes = on_base(base_of("llama"), **saves)
    train(config_of(tmp_path, text, max_steps=1, lora=LORA, **changes))
    for other in ({"lora_alpha": 16}, {"use_rslora": True}):
        with pytest.raises(mp.errors.MismatchError, match="scal"):
            train(config_of(tmp_path, text, lora={**LORA, **other}, **changes))


def test_router_biases_lie_beside_an_adapter_and_come_back(
    base_of: BaseOf, text: Path, tmp_path: Path
) -> None:
    changes = on_base(
        base_of("moe"), lora=LORA, moe_balancing="bias_update_transient", moe_bias_update_rate=0.01
    )
    checkpoint = run(tmp_path, text, max_steps=2, **changes)
    saved = torch.load(checkpoint / SIDECAR, weights_only=True)
    assert sorted(saved) == [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
    assert all(bias.abs().sum() > 0 for bias in saved.values())
    (found,) = look(tmp_path, text, **changes)
    assert same(found["biases"], saved)
