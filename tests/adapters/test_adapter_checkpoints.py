"""Adapter checkpoints of one process: at home in peft and transformers, exact, never mistaken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

import milepost as mp
from tests.adapters.lora_models import (
    adapted,
    base,
    logits,
    optimizer_of,
    randomise,
    steps,
    tensors_of,
)

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True},
    "rslora-patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head-saved": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [3, 5]},
    "biases": {"bias": "lora_only"},
}
QUICK = ["plain", "dora", "head-saved", "tokens"]
VARIANTS = [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in SETTINGS]


def written_by_peft(model: PeftModel, directory: Path) -> Path:
    model.save_pretrained(str(directory))
    return directory


def trained(variant: str, seed: int = 5) -> tuple[Any, torch.optim.Optimizer]:
    model = adapted(seed, **SETTINGS[variant])
    optimizer = optimizer_of(model)
    steps(model, optimizer, 2)
    return model, optimizer


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_adapter_alone_loads_in_stock_peft_with_equal_logits(
    variant: str, tmp_path: Path
) -> None:
    model, optimizer = trained(variant)
    place = tmp_path / "checkpoint-2"
    mp.save(place, {"model": model, "optimizer": optimizer}, step=2)
    stock = PeftModel.from_pretrained(base(), place)
    assert torch.equal(logits(stock), logits(model))
    names = {path.name for path in place.iterdir()}
    assert not {n for n in names if n.startswith("model") or n == "config.json"}
    assert mp.Checkpoint.open(place).verify().ok


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_weights_load_without_peft_and_say_the_same(variant: str, tmp_path: Path) -> None:
    model, optimizer = trained(variant)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    place = tmp_path / "checkpoint-2"
    state = {"model": model, "optimizer": optimizer}
    mp.save(place, state, step=2, adapters=mp.Adapters.MERGED)
    plain, info = LlamaForCausalLM.from_pretrained(place, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-6)
    assert not torch.equal(logits(plain), logits(base()))
    assert not (place / "adapter_config.json").exists()
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    stock = PeftModel.from_pretrained(base(), place / "resume_adapter")
    assert torch.equal(logits(stock), logits(model))


@pytest.mark.parametrize("adapters", [mp.Adapters.ALONE, mp.Adapters.MERGED])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_adapter_run_equals_the_one_that_never_stopped(
    variant: str, adapters: mp.Adapters, tmp_path: Path
) -> None:
    model, optimizer = trained(variant)
    place = tmp_path / "checkpoint-2"
    mp.save(place, {"model": model, "optimizer": optimizer}, step=2, adapters=adapters)
    expected = steps(model, optimizer, 3)
    second = adapted(9, **SETTINGS[variant])
    optimizer2 = optimizer_of(second)
    report = mp.load(place, {"model": second, "optimizer": optimizer2})
    assert report.level is mp.Level.EXACT
    assert steps(second, optimizer2, 3) == expected


def test_an_adapter_injected_in_place_is_saved_as_one_of_a_peft_model(tmp_path: Path) -> None:
    wrapped = adapted()
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj", "down_proj"])
    injected = inject_adapter_in_model(settings, base())
    randomise(injected, 5)
    injected.load_state_dict(wrapped.base_model.model.state_dict())
    mp.save(tmp_path / "checkpoint-1", {"model": wrapped}, step=1)
    mp.save(tmp_path / "checkpoint-2", {"model": injected}, step=2)
    first, second = (tensors_of(tmp_path / f"checkpoint-{n}") for n in (1, 2))
    assert first.keys() == second.keys()
    stock = PeftModel.from_pretrained(base(), tmp_path / "checkpoint-2")
    assert torch.equal(logits(stock), logits(wrapped))
    fresh = inject_adapter_in_model(settings, base())
    mp.load(tmp_path / "checkpoint-1", {"model": fresh})
    assert torch.equal(logits(fresh), logits(wrapped))


class Scored(nn.Module):
    """A backbone with an adapter, and a head beside it that is trained too."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.backbone = adapted(seed)
        torch.manual_seed(seed)
        self.head = nn.Linear(32, 1)
        self.register_buffer("seen", torch.tensor(float(seed)))


@pytest.mark.parametrize("adapters", [mp.Adapters.ALONE, mp.Adapters.MERGED])
def test_a_value_head_and_buffers_beside_the_backbone_come_back(
    adapters: mp.Adapters, tmp_path: Path
) -> None:
    first, second = Scored(5), Scored(9)
    mp.save(tmp_path / "checkpoint-1", {"model": first}, step=1, adapters=adapters)
    mp.load(tmp_path / "checkpoint-1", {"model": second})
    expected, found = first.state_dict(), second.state_dict()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


@pytest.mark.case("V44")
def test_an_adapter_without_elements_is_refused_before_a_file_exists(tmp_path: Path) -> None:
    model = adapted()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.lora_A["default"].weight.data = torch.empty(0)
    with pytest.raises(
        mp.errors.InvalidInputError, match=r"lora_A.*shape \(0,\).*nothing was written"
    ):
        mp.save(tmp_path / "run" / "checkpoint-1", {"model": model}, step=1)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.case("V48")
def test_an_adapter_that_is_merged_in_memory_is_not_folded_in_twice(tmp_path: Path) -> None:
    model = adapted()
    model.merge_adapter()
    with pytest.raises(mp.errors.InvalidInputError, match="merged into the live weight already"):
        mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1, adapters=mp.Adapters.MERGED)


@pytest.mark.case("V48")
def test_weights_and_marker_are_one_commit_that_names_adapter_and_base(tmp_path: Path) -> None:
    base().save_pretrained(tmp_path / "base")
    model = adapted()
    model.base_model.model.config._name_or_path = str(tmp_path / "base")
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": model}, step=1, adapters=mp.Adapters.MERGED)
    manifest = json.loads((place / "milepost.json").read_text())
    entry = manifest["models"]["model"]["adapter"]
    assert entry["kind"] == "merged_adapter" and entry["prefix"] == "resume_adapter"
    assert entry["base"]["name"] == str(tmp_path / "base")
    assert entry["base"]["weights"].startswith("xxh3-128:")
    digests = {file["name"]: file["digest"] for file in manifest["files"]}
    wanted = {"model.safetensors", "resume_adapter.json", "resume_adapter/adapter_config.json"}
    assert wanted | {"resume_adapter/adapter_model.safetensors"} <= digests.keys()
    assert json.loads((place / "resume_adapter.json").read_text()) == {
        "adapter_dir": "resume_adapter"
    }
    (place / "resume_adapter.json").unlink()
    with pytest.raises(mp.errors.DamagedError, match=r"resume_adapter\.json is missing"):
        mp.load(place, {"model": adapted()})


@pytest.mark.case("V50")
@pytest.mark.parametrize(
    "prefix",
    [
        "base_model.model.model.",
        "base_model.model.model.model.",
        "model.",
        "base_model.model.language_model.model.",
        "base_model.model.model.language_model.",
        "language_model.model.",
    ],
)
def test_known_prefixes_of_other_writers_are_understood(prefix: str, tmp_path: Path) -> None:
    model = adapted()
    stock = written_by_peft(model, tmp_path / "stock")
    tensors = tensors_of(stock)
    renamed = {prefix + n.removeprefix("base_model.model.model."): t for n, t in tensors.items()}
    save_file(renamed, stock / "adapter_model.safetensors")
    second = adapted(9)
    report = mp.load(stock, {"model": second})
    assert report.level is mp.Level.WEIGHTS_ONLY
    assert torch.equal(logits(second), logits(model))


@pytest.mark.case("V50")
def test_an_adapter_with_a_layer_too_few_or_too_many_is_refused(tmp_path: Path) -> None:
    stock = written_by_peft(adapted(), tmp_path / "stock")
    tensors = tensors_of(stock)
    short = {n: t for n, t in tensors.items() if "layers.1." not in n}
    second = adapted(9)
    before = logits(second)
    save_file(short, stock / "adapter_model.safetensors")
    with pytest.raises(
        mp.errors.KeyMismatchError, match=r"6 missing, 0 unex.*layers\.1\."
    ) as caught:
        mp.load(stock, {"model": second})
    assert len(caught.value.missing) == 6 and not caught.value.unexpected
    third = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in tensors.items()}
    save_file(tensors | third, stock / "adapter_model.safetensors")
    with pytest.raises(mp.errors.KeyMismatchError, match=r"0 missing, 6 unex.*layers\.2\."):
        mp.load(stock, {"model": second})
    assert torch.equal(logits(second), before)


@pytest.mark.case("V50")
def test_an_adapter_of_which_nothing_or_not_all_fits_is_refused_with_both_sides(
    tmp_path: Path,
) -> None:
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": adapted()}, step=1)
    other = adapted(target_modules=["k_proj"])
    with pytest.raises(mp.errors.KeyMismatchError, match=r"none of its 12 tensors.*k_proj"):
        mp.load(place, {"model": other})
    more = adapted(target_modules=["q_proj", "o_proj", "down_proj", "k_proj"])
    with pytest.raises(mp.errors.KeyMismatchError, match="k_proj"):
        mp.load(place, {"model": more})
    fewer = adapted(target_modules=["q_proj", "o_proj"])
    with pytest.raises(mp.errors.KeyMismatchError, match="down_proj"):
        mp.load(place, {"model": fewer})


@pytest.mark.parametrize(
    ("live", "told"),
    [
        ({"r": 8, "lora_alpha": 16}, r"q_proj: saved with rank 4, has rank 8"),
        (
            {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"o_proj": 4}},
            r"layers\.0\.self_attn\.o_proj: saved with rank 4, has rank 2; model\.layers\.1",
        ),
    ],
    ids=["all", "pattern"],
)
def test_factors_of_another_rank_at_equal_scaling_are_refused_with_both_ranks(
    live: dict[str, Any], told: str, tmp_path: Path
) -> None:
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": adapted()}, step=1)
    second = adapted(9, **live)
    with pytest.raises(mp.errors.MismatchError, match=told):
        mp.load(place, {"model": second})
    report = mp.load(place, {"model": second}, shape=mp.ShapePolicy.SKIP)
    assert report.models["model"].skipped


def test_an_adapter_is_not_loaded_into_a_model_that_has_none(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": adapted()}, step=1)
    with pytest.raises(mp.errors.KeyMismatchError, match="has none to fill"):
        mp.load(place, {"model": base()})


@pytest.mark.parametrize("live", [{"lora_alpha": 16}, {"use_rslora": True}])
def test_factors_that_would_be_scaled_otherwise_are_refused(
    live: dict[str, Any], tmp_path: Path
) -> None:
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": adapted()}, step=1)
    with pytest.raises(mp.errors.MismatchError, match="saved with 2, is 4"):
        mp.load(place, {"model": adapted(**live)})


def test_merged_weights_alone_may_be_looked_at_but_not_trained_on(tmp_path: Path) -> None:
    model, optimizer = trained("plain")
    place = tmp_path / "checkpoint-2"
    state = {"model": model, "optimizer": optimizer}
    mp.save(place, state, step=2, adapters=mp.Adapters.MERGED)
    plain = base()
    mp.load(place, {"model": plain})
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-6)
    with pytest.raises(mp.errors.MismatchError, match="no adapter to go on training"):
        mp.load(place, {"model": base(), "optimizer": torch.optim.AdamW(base().parameters())})


def test_an_adapter_without_its_configuration_is_not_scaled_by_guess(tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path / "stock")
    (tmp_path / "stock" / "adapter_config.json").unlink()
    with pytest.raises(
        mp.errors.CheckpointIncompleteError, match=r"adapter_config\.json: not there"
    ):
        mp.load(tmp_path / "stock", {"model": adapted(9)})


def test_a_marker_without_its_adapter_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": adapted()}, step=1, adapters=mp.Adapters.MERGED)
    plain = tmp_path / "copied"
    shutil.copytree(place, plain)
    shutil.rmtree(plain / "resume_adapter")
    (plain / "milepost.json").unlink()
    with pytest.raises(mp.errors.CheckpointIncompleteError, match=r"adapter_model\.safetensors"):
        mp.load(plain, {"model": adapted(9)})


@pytest.mark.case("V52")
@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")
def test_a_tied_embedding_with_an_adapter_is_untied_in_merged_weights(tmp_path: Path) -> None:
    model = adapted(tied=True, target_modules=["embed_tokens", "q_proj"])
    place = tmp_path / "checkpoint-1"
    mp.save(place, {"model": model}, step=1, adapters=mp.Adapters.MERGED)
    plain = LlamaForCausalLM.from_pretrained(place)
    assert json.loads((place / "config.json").read_text())["tie_word_embeddings"] is False
    assert not torch.equal(plain.lm_head.weight, plain.model.embed_tokens.weight)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-6)


@pytest.mark.case("V52")
def test_a_tied_pair_that_stays_equal_is_one_tensor_and_tied(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    model = adapted(tied=True)
    mp.save(place, {"model": model}, step=1, adapters=mp.Adapters.MERGED)
    assert json.loads((place / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in mp.Checkpoint.open(place).tensors()
    plain = LlamaForCausalLM.from_pretrained(place)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-6)


def test_everything_as_the_modules_have_it_is_still_to_be_had(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-1"
    model = adapted()
    mp.save(place, {"model": model}, step=1, adapters=mp.Adapters.WITH_BASE)
    assert mp.Checkpoint.open(place).tensors().keys() == model.state_dict().keys()
    second = adapted(9)
    mp.load(place, {"model": second})
    assert torch.equal(logits(second), logits(model))
