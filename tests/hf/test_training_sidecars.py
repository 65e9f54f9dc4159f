"""Sidecars of training are put to use: on real models, and as what a tool on files has to write."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import milepost as mp
from milepost.errors import (
    CheckpointIncompleteError,
    CheckpointWarning,
    DigestMismatchError,
    FormatError,
    InvalidInputError,
    ShapeMismatchError,
    UnsafePickleError,
)
from milepost.hf.router_slots import ROUTER_SLOTS, Spelling, find_slots
from milepost.hf.training_sidecars import (
    ActionKind,
    SidecarAction,
    apply_training_sidecars,
    sidecar_actions,
)
from milepost.layouts.checkpoint import TensorInfo
from tests.hf.hub_families import make_model

BIASES = "router_balancing_biases.pt"
PROVENANCE = "training_provenance.json"
BIAS = torch.tensor([0.25, -0.5, 1.0, 0.125])


def adapter(path: Path, biases: dict[str, Tensor] | None = None, **provenance: str) -> Path:
    """A directory as an adapter save leaves it: no weights of the model, sidecars beside."""
    path.mkdir(parents=True, exist_ok=True)
    if biases is not None:
        torch.save(biases, path / BIASES)
    if provenance:
        (path / PROVENANCE).write_text(json.dumps(provenance))
    return path


def kinds(actions: tuple[SidecarAction, ...]) -> dict[ActionKind, tuple[str, ...]]:
    return {action.kind: action.names for action in actions}


def headers(model: Any, path: Path) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """What a tool sees of `model` once it is saved by transformers, at `path`."""
    model.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    return dict(mp.Checkpoint.open(path).tensors()), config


def router(model: Any, layer: int = 1) -> Any:
    return model.model.layers[layer].mlp.gate


def test_an_adapter_fills_the_slots_of_its_base_and_keeps_the_bits(tmp_path: Path) -> None:
    model = make_model("DeepseekV3", moe_intermediate_size=16).to(torch.bfloat16)
    gate = router(model)
    gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16()
    bias = BIAS + 1e-6  # more digits than bf16 has
    source = adapter(tmp_path / "a", {"model.layers.1.mlp.gate": bias})
    actions = apply_training_sidecars(model, source)
    slot = gate.e_score_correction_bias
    assert slot.dtype is torch.float32 and torch.equal(slot, bias)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert kinds(actions) == {ActionKind.BIASES_FROM_SIDECAR: (name,)}
    assert str(actions[0]) == f"1 balancing biases taken from {BIASES}: {name}"
    model(input_ids=torch.arange(6)[None])


@pytest.mark.parametrize(
    "spelled",
    [
        "module.model.layers.1.mlp.gate",
        "_orig_mod.model.layers.1._checkpoint_wrapped_module.mlp.gate",
        "base_model.model.model.layers.1.mlp.gate",
        "layers.1.mlp.gate",
        "model.language_model.layers.1.mlp.gate",
        "model.layers.1._fsdp_wrapped_module.mlp.gate.modules_to_save.default",
    ],
)
def test_a_router_is_found_under_the_names_that_wrappers_give_it(
    spelled: str, tmp_path: Path
) -> None:
    model = make_model("Glm4Moe")
    apply_training_sidecars(model, adapter(tmp_path / "a", {spelled: BIAS}))
    assert torch.equal(router(model).e_score_correction_bias, BIAS)


def test_a_model_inside_peft_gets_its_biases_too(tmp_path: Path) -> None:
    import peft

    model = make_model("Glm4Moe")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp.gate"])
    wrapped: nn.Module = peft.get_peft_model(model, config)
    apply_training_sidecars(wrapped, adapter(tmp_path / "a", {"model.layers.1.mlp.gate": BIAS}))
    slots = [t for n, t in wrapped.named_buffers() if n.endswith("e_score_correction_bias")]
    assert slots and all(torch.equal(slot, BIAS) for slot in slots)


def test_slots_without_an_entry_stay_and_are_held_in_fp32(tmp_path: Path) -> None:
    model = make_model("DeepseekV3", num_hidden_layers=3)
    for layer in (1, 2):
        gate = router(model, layer)
        gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16()
    before = router(model, 2).e_score_correction_bias.clone()
    actions = apply_training_sidecars(
        model, adapter(tmp_path / "a", {"model.layers.1.mlp.gate": BIAS})
    )
    slot = router(model, 2).e_score_correction_bias
    assert slot.dtype is torch.float32 and torch.equal(slot, before.float())
    found = kinds(actions)[ActionKind.BIASES_IN_FP32]
    assert found == ("model.layers.2.mlp.gate.e_score_correction_bias",)


def test_a_full_checkpoint_gives_its_own_biases_at_the_dtype_of_training(tmp_path: Path) -> None:
    trained = make_model("DeepseekV3")
    trained.save_pretrained(tmp_path / "full")
    adapter(tmp_path / "full", {"model.layers.1.mlp.gate": torch.full((4,), 7.0)})
    cast = make_model("DeepseekV3").to(torch.bfloat16)
    gate = router(cast)
    gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16()
    actions = apply_training_sidecars(cast, tmp_path / "full")
    slot = gate.e_score_correction_bias
    assert slot.dtype is torch.float32
    assert torch.equal(slot, router(trained).e_score_correction_bias)
    assert list(kinds(actions)) == [ActionKind.BIASES_FROM_WEIGHTS]


def test_a_gated_slot_is_made_and_the_model_then_uses_it(tmp_path: Path) -> None:
    base = make_model("Lfm2Moe", use_expert_bias=False, num_hidden_layers=3,
                      layer_types=["conv", "full_attention", "conv"])  # fmt: skip
    trained = make_model("Lfm2Moe", use_expert_bias=True, num_hidden_layers=3,
                         layer_types=["conv", "full_attention", "conv"])  # fmt: skip
    with torch.no_grad():
        trained.load_state_dict(base.state_dict(), strict=False)
        trained.model.layers[1].feed_forward.expert_bias.copy_(50 * BIAS)
        trained.model.layers[2].feed_forward.expert_bias.zero_()
    source = adapter(tmp_path / "a", {"model.layers.1.feed_forward.gate": 50 * BIAS})
    actions = apply_training_sidecars(base, source)
    assert base.config.use_expert_bias is True
    assert len(kinds(actions)[ActionKind.SLOTS_ADDED]) == 2
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(base(tokens).logits, trained(tokens).logits)
    base.save_pretrained(tmp_path / "out")
    assert "model.layers.1.feed_forward.expert_bias" in load_file(
        tmp_path / "out" / "model.safetensors"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_neutralised_sinks_take_no_attention_and_stay_finite_in_every_cast(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_model("GptOss").to(dtype)
    actions = apply_training_sidecars(
        model, adapter(tmp_path / "a", gpt_oss_attention_sinks="neutralized")
    )
    assert len(kinds(actions)[ActionKind.SINKS_NEUTRALISED]) == 2
    sinks = model.model.layers[0].self_attn.sinks
    for other in (torch.bfloat16, torch.float16, torch.float32):
        assert torch.isfinite(sinks.to(other)).all()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        ours = model(tokens).logits
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
        assert torch.equal(ours, model(tokens).logits)


@pytest.mark.parametrize("policy", ["live", "trainable"])
def test_sinks_that_were_trained_are_left_alone(policy: str, tmp_path: Path) -> None:
    model = make_model("GptOss")
    before = model.model.layers[0].self_attn.sinks.clone()
    source = adapter(tmp_path / "a", gpt_oss_attention_sinks=policy)
    assert apply_training_sidecars(model, source) == ()
    assert torch.equal(model.model.layers[0].self_attn.sinks, before)


def test_the_bias_of_gpt_oss_goes_into_its_router_unless_it_was_transient(tmp_path: Path) -> None:
    model = make_model("GptOss").to(torch.bfloat16)
    biases = {"model.layers.0.mlp.router": BIAS}
    apply_training_sidecars(model, adapter(tmp_path / "a", biases))
    slot = model.model.layers[0].mlp.router.bias
    assert slot.dtype is torch.bfloat16 and torch.equal(slot, BIAS.bfloat16())
    model(input_ids=torch.arange(4)[None])
    with torch.no_grad():
        slot.zero_()
    transient = adapter(tmp_path / "b", biases, router_balancing="bias_update_transient")
    with pytest.warns(CheckpointWarning, match="has the only copy"):
        actions = apply_training_sidecars(model, transient)
    assert kinds(actions) == {ActionKind.NO_SLOT: ("model.layers.0.mlp.router",)}
    assert not slot.any()


def test_routers_without_a_slot_are_reported_and_nothing_changes(tmp_path: Path) -> None:
    model = make_model("Qwen3Moe")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = adapter(tmp_path / "a", {"model.layers.0.mlp.gate": BIAS})
    with pytest.warns(CheckpointWarning, match="routes tokens differently"):
        actions = apply_training_sidecars(model, source)
    assert kinds(actions) == {ActionKind.NO_SLOT: ("model.layers.0.mlp.gate",)}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_is_wrong_is_refused_before_the_model_changes(tmp_path: Path) -> None:
    model = make_model("DeepseekV3", num_hidden_layers=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    good = {"model.layers.1.mlp.gate": BIAS}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model.layers.2.mlp.gate": BIAS[:3]}, ShapeMismatchError, "other experts"),
        ({"model.layers.9.mlp.gate": BIAS}, InvalidInputError, "of another model"),
        ({"model.layers.2.mlp.gait": BIAS}, InvalidInputError, "of another model"),
        ({"model.layers.2.mlp.gate": BIAS[None]}, FormatError, "one row of biases"),
        ({"model.layers.2.mlp.gate": [0.0]}, FormatError, "one row of biases"),
        ({"model.layers.2.mlp.gate": torch.arange(4)}, FormatError, "expected floats"),
    ]
    for number, (more, kind, message) in enumerate(cases):
        source = adapter(tmp_path / str(number), {**good, **more})
        with pytest.raises(kind, match=message):
            apply_training_sidecars(model, source)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Opens:
    """What a hostile pickle would call."""

    def __reduce__(self) -> Any:
        return (print, ("was run",))


def test_a_sidecar_that_wants_to_run_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = adapter(tmp_path / "a")
    torch.save({"model.layers.1.mlp.gate": Opens()}, path / BIASES)
    with pytest.raises(UnsafePickleError, match="print"):
        apply_training_sidecars(make_model("DeepseekV3"), path)
    assert capsys.readouterr().out == ""


def test_a_provenance_of_a_kind_that_is_not_known_is_refused(tmp_path: Path) -> None:
    model = make_model("GptOss")
    source = adapter(tmp_path / "a", gpt_oss_attention_sinks="melted")
    with pytest.raises(FormatError, match="'melted', expected one of live, neutralized"):
        apply_training_sidecars(model, source)


def test_a_committed_checkpoint_must_have_the_sidecars_that_it_needs(tmp_path: Path) -> None:
    model = make_model("DeepseekV3")
    path = tmp_path / "checkpoint-1"
    mp.save(path, {"model": model}, step=1, sidecars={BIASES: {"model.layers.1.mlp.gate": BIAS}})
    assert kinds(apply_training_sidecars(model, path)).keys() == {ActionKind.BIASES_FROM_WEIGHTS}
    (path / BIASES).write_bytes((path / BIASES).read_bytes()[:-1] + b"\x01")
    with pytest.raises(DigestMismatchError):
        apply_training_sidecars(model, path)
    (path / BIASES).unlink()
    with pytest.raises(CheckpointIncompleteError, match=r"need router_balancing_biases\.pt"):
        apply_training_sidecars(model, path)


def test_a_directory_without_sidecars_asks_for_nothing(tmp_path: Path) -> None:
    model = make_model("Qwen3Moe")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert apply_training_sidecars(model, adapter(tmp_path / "a")) == ()
    with pytest.raises(mp.errors.NotFoundError):
        apply_training_sidecars(model, tmp_path / "nowhere")


# ---- the same for files


FAMILIES = {
    "DeepseekV3": "model.layers.1.mlp.gate",
    "Glm4Moe": "model.layers.1.mlp.gate",
    "Glm4MoeLite": "model.layers.1.mlp.gate",
    "Dots1": "model.layers.1.mlp.gate",
    "MiniMaxM2": "model.layers.1.mlp.gate",
    "Ernie4_5_Moe": "model.layers.1.mlp.gate",
    "Lfm2Moe": "model.layers.1.feed_forward.gate",
    "GptOss": "model.layers.1.mlp.router",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tool_writes_what_the_live_model_would_hold(family: str, tmp_path: Path) -> None:
    switch = {"use_expert_bias": True} if family == "Lfm2Moe" else {}
    model = make_model(family, **switch)
    tensors, config = headers(model, tmp_path / "base")
    source = adapter(tmp_path / "a", {FAMILIES[family]: BIAS})
    plan = sidecar_actions(source, tensors, config)
    apply_training_sidecars(model, source)
    model.save_pretrained(tmp_path / "live")
    wanted = load_file(tmp_path / "live" / "model.safetensors")
    changed = {
        name
        for name, tensor in load_file(tmp_path / "base" / "model.safetensors").items()
        if not torch.equal(tensor, wanted[name])
    }
    assert set(plan.tensors) == changed and len(changed) == 1
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in plan.tensors.items())
    assert plan.needs == (BIASES,) and plan.config == {}


def test_the_table_knows_each_slot_by_both_names_that_transformers_has(tmp_path: Path) -> None:
    for family in FAMILIES:
        switch = {"use_expert_bias": True} if family == "Lfm2Moe" else {}
        model = make_model(family, **switch)
        tensors, config = headers(model, tmp_path / family)
        row = ROUTER_SLOTS[config["model_type"]]
        stored = find_slots(tensors, config["model_type"], Spelling.STORED)
        live = find_slots(model.state_dict(), config["model_type"], Spelling.RUNTIME)
        assert stored and all(name.endswith(f".{row.stored}") for name in stored), family
        assert live and all(name.endswith(f".{row.runtime}") for name in live), family


def test_a_gated_slot_of_files_comes_with_the_change_of_the_configuration(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = make_model("Lfm2Moe", use_expert_bias=False)
    tensors, config = headers(model, tmp_path / "base")
    source = adapter(tmp_path / "a", {"model.layers.1.feed_forward": BIAS})
    plan = sidecar_actions(source, tensors, config)
    assert plan.config == {"use_expert_bias": True}
    assert set(plan.tensors) == {"model.layers.1.feed_forward.expert_bias"}
    from safetensors.torch import save_file

    out = tmp_path / "base" / "model.safetensors"
    save_file({**load_file(out), **plan.tensors}, out, metadata={"format": "pt"})
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, **plan.config}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(loaded.model.layers[1].feed_forward.expert_bias, BIAS)


def test_a_tool_is_told_of_sinks_narrow_slots_and_routers_without_a_slot(tmp_path: Path) -> None:
    tensors, config = headers(make_model("GptOss").to(torch.bfloat16), tmp_path / "gpt")
    source = adapter(tmp_path / "a", gpt_oss_attention_sinks="neutralized")
    plan = sidecar_actions(source, tensors, config)
    assert len(plan.tensors) == 2 and plan.needs == (PROVENANCE,)
    assert all(t.dtype is torch.bfloat16 and (t < -9000).all() for t in plan.tensors.values())

    model = make_model("DeepseekV3").to(torch.bfloat16)
    gate = router(model)
    gate.e_score_correction_bias = gate.e_score_correction_bias.bfloat16()
    tensors, config = headers(model, tmp_path / "narrow")
    plan = sidecar_actions(adapter(tmp_path / "b", {}), tensors, config)
    assert plan.widen == {"model.layers.1.mlp.gate.e_score_correction_bias"}

    tensors, config = headers(make_model("Mixtral"), tmp_path / "mixtral")
    plan = sidecar_actions(
        adapter(tmp_path / "c", {"model.layers.0.mlp.gate": BIAS}), tensors, config
    )
    assert kinds(plan.actions) == {ActionKind.NO_SLOT: ("model.layers.0.mlp.gate",)}
    with pytest.raises(InvalidInputError, match="of another model"):
        sidecar_actions(adapter(tmp_path / "d", {"model.layers.5.mlp.gate": BIAS}), tensors, config)


def test_what_the_weights_need_and_no_save_wrote_is_found_by_verify(tmp_path: Path) -> None:
    from milepost.format.manifest import encode_manifest
    from milepost.layouts.directory import DirectoryCheckpoint

    path = tmp_path / "checkpoint-1"
    mp.save(path, {"model": make_model("Qwen3Moe")}, step=1)
    handle = DirectoryCheckpoint(path)
    handle.manifest.needs = [BIASES]
    (path / "milepost.json").write_bytes(encode_manifest(handle.manifest))
    [problem] = mp.Checkpoint.open(path).verify().problems
    assert problem.file == BIASES and "the weights need it" in problem.message


def test_show_says_what_the_weights_need_and_an_export_carries_it(tmp_path: Path) -> None:
    from milepost.cli.show import show_answer
    from milepost.tools.export import export_checkpoint

    path = tmp_path / "checkpoint-1"
    sidecars: dict[str, Any] = {BIASES: {"model.layers.0.mlp.gate": BIAS}, PROVENANCE: b"{}"}
    mp.save(path, {"model": make_model("Qwen3Moe")}, step=1, sidecars=sidecars)
    export_checkpoint(path, tmp_path / "out")
    for place in (path, tmp_path / "out"):
        assert show_answer(place).document["needs"] == [BIASES, PROVENANCE]
        loaded = torch.load(place / BIASES, weights_only=True)
        assert torch.equal(loaded["model.layers.0.mlp.gate"], BIAS)
