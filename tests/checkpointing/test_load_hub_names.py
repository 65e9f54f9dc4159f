"""Loads of models whose tensors lie on disk in parts: what differs is told part by part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import milepost as mp
from milepost.errors import DtypeMismatchError, KeyMismatchError, ShapeMismatchError
from tests.hf.hub_families import make_model

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
FUSED = "model.layers.1.mlp.experts.gate_up_proj"


def hub(directory: Path, edit: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    """A stock directory of a small Qwen3-MoE, with its tensors edited."""
    make_model("Qwen3Moe").save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    if edit is not None:
        edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def empty_model(family: str = "Qwen3Moe") -> Any:
    model = make_model(family)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7)
    return model


def test_a_part_that_is_missing_is_refused_by_its_name_or_kept_as_it_is(tmp_path: Path) -> None:
    directory = hub(tmp_path, lambda tensors: tensors.__delitem__(EXPERT))
    model = empty_model()
    with pytest.raises(KeyMismatchError, match="1 missing, 0 unexpected") as caught:
        mp.load(directory, {"model": model})
    assert caught.value.missing == (EXPERT,)
    report = mp.load(directory, {"model": model}, missing=mp.Missing.KEEP)
    assert report.models["model"].missing == (EXPERT,)
    found, wanted = model.state_dict()[FUSED], make_model("Qwen3Moe").state_dict()[FUSED]
    assert bool((found[2, 12:] == 7).all())
    assert torch.equal(found[2, :12], wanted[2, :12])
    assert torch.equal(found[3], wanted[3])


@pytest.mark.case("V54")
def test_experts_that_are_missing_altogether_are_named_one_by_one(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            tensors[name.replace(".mlp.experts.", ".mlp.local_experts.")] = tensors.pop(name)

    model = empty_model()
    with pytest.raises(KeyMismatchError) as caught:
        mp.load(hub(tmp_path, rename), {"model": model})
    assert len(caught.value.missing) == len(caught.value.unexpected) == 2 * 4 * 3
    assert EXPERT in caught.value.missing
    assert EXPERT.replace("experts", "local_experts") in caught.value.unexpected
    assert all(bool((p == 7).all()) for p in model.parameters())


def test_an_expert_too_many_is_unexpected(tmp_path: Path) -> None:
    extra = EXPERT.replace("experts.2.", "experts.4.")
    directory = hub(tmp_path, lambda tensors: tensors.update({extra: tensors[EXPERT].clone()}))
    with pytest.raises(KeyMismatchError) as caught:
        mp.load(directory, {"model": empty_model()})
    assert caught.value.unexpected == (extra,)
    report = mp.load(directory, {"model": empty_model()}, unexpected=mp.Unexpected.IGNORE)
    assert report.models["model"].unexpected == (extra,)


def test_a_fused_tensor_beside_its_parts_is_unexpected(tmp_path: Path) -> None:
    directory = hub(tmp_path, lambda tensors: tensors.update({FUSED: torch.zeros(4, 24, 16)}))
    with pytest.raises(KeyMismatchError) as caught:
        mp.load(directory, {"model": empty_model()})
    assert caught.value.unexpected == (FUSED,)
    assert caught.value.missing == ()


def test_a_part_of_another_shape_is_refused_by_its_name_or_skipped(tmp_path: Path) -> None:
    directory = hub(tmp_path, lambda tensors: tensors.update({EXPERT: torch.zeros(12, 20)}))
    model = empty_model()
    with pytest.raises(ShapeMismatchError, match=rf"1 shapes differ; {EXPERT}: .*\(12, 16\)"):
        mp.load(directory, {"model": model})
    report = mp.load(directory, {"model": model}, shape=mp.ShapePolicy.SKIP)
    assert [difference.name for difference in report.models["model"].skipped] == [EXPERT]
    assert bool((model.state_dict()[FUSED][2, 12:] == 7).all())


def test_a_part_of_another_dtype_is_refused_by_its_name_or_cast(tmp_path: Path) -> None:
    directory = hub(
        tmp_path, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.bfloat16)})
    )
    model = empty_model()
    with pytest.raises(DtypeMismatchError, match=f"1 dtypes differ; {EXPERT}: .*F32.*BF16"):
        mp.load(directory, {"model": model})
    report = mp.load(directory, {"model": model}, dtype=mp.DtypePolicy.CAST)
    assert [difference.name for difference in report.models["model"].cast] == [EXPERT]
    stored = load_file(directory / "model.safetensors")[EXPERT]
    assert torch.equal(model.state_dict()[FUSED][2, 12:], stored.float())


@pytest.mark.parametrize("family", ["Gemma3", "Ernie4_5_Moe", "Mixtral", "GraniteMoe"])
def test_renamed_and_tied_tensors_come_back_with_their_moments(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.rand_like(param)
    optimizer.step()
    path = tmp_path / "checkpoint-1"
    mp.save(path, {"model": model, "optimizer": optimizer}, step=1)
    fresh = empty_model(family)
    other = torch.optim.AdamW(fresh.parameters())
    report = mp.load(path, {"model": fresh, "optimizer": other})
    assert report.level.value == "exact"
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in fresh.state_dict().items())
    for live, saved in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(other.state[live]["exp_avg"], optimizer.state[saved]["exp_avg"])


def test_the_reading_interface_has_the_names_on_disk(tmp_path: Path) -> None:
    model = make_model("Gemma3")
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    checkpoint = mp.Checkpoint.open(tmp_path / "checkpoint-1")
    embedding = model.state_dict()["model.language_model.embed_tokens.weight"]
    for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
        assert torch.equal(checkpoint.read(name), embedding)


def test_a_model_on_meta_is_filled_from_separate_experts(tmp_path: Path) -> None:
    wanted = make_model("Qwen3Moe")
    with torch.device("meta"):
        model = type(wanted)(wanted.config)
    mp.load(hub(tmp_path), {"model": model}, device="cpu")
    assert all(torch.equal(t, wanted.state_dict()[n]) for n, t in model.state_dict().items())


def test_files_of_other_layouts_may_hold_separate_experts_as_well(tmp_path: Path) -> None:
    wanted = make_model("Qwen3Moe")
    torch.save(load_file(hub(tmp_path / "hub") / "model.safetensors"), tmp_path / "weights.pt")
    model = empty_model()
    mp.load(tmp_path / "weights.pt", {"model": model})
    assert all(torch.equal(t, wanted.state_dict()[n]) for n, t in model.state_dict().items())
