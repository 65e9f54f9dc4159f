"""`load_full_state_dict`: the weights of a whole model by name, whatever wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import milepost as mp
from milepost.errors import DamagedError, FormatError, NotFoundError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 16, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def save(path: Path, model: Tied) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    optimizer.step()
    mp.save(path, {"model": model, "optimizer": optimizer}, step=1, max_shard_size=200)


def test_it_is_the_state_dict_of_the_model_with_its_ties(model: Tied, tmp_path: Path) -> None:
    save(tmp_path / "checkpoint-1", model)
    found = mp.load_full_state_dict(tmp_path / "checkpoint-1")
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["head.weight"] is found["embed.weight"]
    assert {tensor.device.type for tensor in found.values()} == {"cpu"}
    other = Tied()
    other.load_state_dict(found)
    assert torch.equal(other.head.weight, model.head.weight)


def test_training_state_is_not_looked_at_and_a_lost_part_is_damage(
    model: Tied, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint-1"
    save(path, model)
    (path / "training" / "optimizer.safetensors").write_bytes(b"")
    assert torch.equal(mp.load_full_state_dict(path)["inner.bias"], model.inner.bias)
    first, *others = sorted(path.glob("model-*.safetensors"))
    assert others
    first.unlink()
    with pytest.raises(DamagedError, match=first.name):
        mp.load_full_state_dict(path)


def test_slices_of_experts_are_refused_and_the_tool_that_merges_them_is_named(
    tmp_path: Path,
) -> None:
    parts = {}
    for rank in range(2):
        file = f"model-{rank:05d}-of-00002.safetensors"
        name = f"experts.gate_up_proj.shard_{rank}"
        save_file({name: torch.ones(2, 4, 4)}, tmp_path / file, metadata={"format": "pt"})
        parts[name] = file
    index = {"metadata": {"format": "ep_sharded", "total_size": 256}, "weight_map": parts}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    with pytest.raises(FormatError, match="milepost merge-ep-shards"):
        mp.load_full_state_dict(tmp_path)


def test_nothing_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="checkpoint-7"):
        mp.load_full_state_dict(tmp_path / "checkpoint-7")
