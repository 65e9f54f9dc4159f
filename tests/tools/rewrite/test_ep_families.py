"""Models of real families, cut for ranks and merged again: transformers loads what there was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.errors import InvalidInputError
from milepost.hf.ep_families import FUSED_ON_HUB, supported_ep_merge_model_types
from milepost.hf.expert_layouts import BANK_RENAMES, EXPERT_STACKS, INPUT_FIRST_BANKS
from milepost.tools.merge_ep_shards import merge_ep_shards
from milepost.tools.reshard import reshard
from tests.tools.rewrite.experts import RANKS, write_slices
from tests.tools.rewrite.hub import QUICK, read_hub, same_bits
from tests.tools.rewrite.moe_models import FAMILIES, MULTIMODAL, build, build_multimodal

KINDS = sorted(FAMILIES)


def save(model: Any, place: Path) -> None:
    """The model in the form that a merge makes: where that has banks, with names of modules."""
    kind = model.config.model_type
    is_of_modules = kind in FUSED_ON_HUB and kind not in BANK_RENAMES
    model.save_pretrained(place, **({"save_original_format": False} if is_of_modules else {}))


def is_expert(kind: str, name: str) -> bool:
    stack = EXPERT_STACKS.get(kind)
    return ".experts." in name if stack is None else stack.fullmatch(name) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_a_real_model_become_its_tensors_again(tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    assert kind in supported_ep_merge_model_types()
    model = build(kind)
    save(model, tmp_path / "hub")
    hub = read_hub(tmp_path / "hub")
    for ranks in (2, 4):
        reshard(tmp_path / "hub", tmp_path / f"ep{ranks}", ep_size=ranks, options=QUICK)
        slices = [n for n in read_hub(tmp_path / f"ep{ranks}") if n.endswith(".shard_1")]
        assert slices and all(is_expert(kind, n.removesuffix(".shard_1")) for n in slices)
        merge_ep_shards(tmp_path / f"ep{ranks}", tmp_path / f"out{ranks}", options=QUICK)
        assert same_bits(read_hub(tmp_path / f"out{ranks}"), hub)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out2", output_loading_info=True)
    assert not any(info.values()), info
    assert same_bits(loaded.state_dict(), model.state_dict())
    tokens = torch.arange(3, 15).view(1, -1)
    with torch.no_grad():
        found, wanted = (m.eval()(input_ids=tokens).logits for m in (loaded, model))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", [*KINDS, *MULTIMODAL])
def test_modules_cut_by_another_trainer_become_what_transformers_saves(
    tmp_path: Path, kind: str
) -> None:
    model = build_multimodal(kind) if kind in MULTIMODAL else build(kind)
    save(model, tmp_path / "hub")
    model.save_pretrained(tmp_path / "modules", save_original_format=False)
    rest = read_hub(tmp_path / "modules")
    banks = {name: rest.pop(name) for name in list(rest) if is_expert(kind, name)}
    assert banks
    if kind not in INPUT_FIRST_BANKS and kind not in EXPERT_STACKS:
        banks = {name: t.transpose(1, 2).contiguous() for name, t in banks.items()}
    assert all(len(tensor) % RANKS == 0 for tensor in banks.values())
    config = json.loads((tmp_path / "hub" / "config.json").read_bytes())
    cut = write_slices(tmp_path / "ep", banks, rest, **config)
    merge_ep_shards(cut, tmp_path / "out", options=QUICK)
    if kind != "minimax_m3_vl":  # where tensors outside of the layers keep the names of modules
        assert same_bits(read_hub(tmp_path / "out"), read_hub(tmp_path / "hub"))
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert same_bits(loaded.state_dict(), model.state_dict())


def test_rows_of_dbrx_are_divided_between_experts_only(tmp_path: Path) -> None:
    build("dbrx").save_pretrained(tmp_path / "hub")
    with pytest.raises(InvalidInputError, match="4 experts cannot be divided among 3 ranks"):
        reshard(tmp_path / "hub", tmp_path / "out", ep_size=3, options=QUICK)
