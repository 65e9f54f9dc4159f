"""Experts under transformers' own parallelism: packed, strided and expert shards are ordinary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import milepost as mp
from tests.parallel.models import whole
from tests.worlds import run_world

MODES = [
    {"tp_size": 2},
    {"tp_size": 2, "ep_size": 2},
    {"fsdp_size": 2, "ep_size": 2},
    {"fsdp_size": 2, "tp_size": 2},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
]


def world_size(mode: dict[str, int]) -> int:
    return mode.get("tp_size", 1) * mode.get("fsdp_size", 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of a real architecture with experts, as a Hugging Face directory."""
    directory = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def build(base: Path, mode: dict[str, int] | None) -> Any:
    if mode is None:
        return AutoModelForCausalLM.from_pretrained(base)
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(base, distributed_config=DistributedConfig(**mode))


def train(model: Any, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 64, (2, 8), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return optimizer


def values(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, param in model.named_parameters():
        found[name] = whole(param)
        for slot, value in optimizer.state.get(param, {}).items():
            found[f"{name}.{slot}"] = whole(value)
    return found


def save_trained(rank: int, size: int, base: Path, mode: dict[str, int], run: Path) -> Any:
    model = build(base, mode)
    optimizer = train(model, 2)
    mp.save(run / "checkpoint-2", {"model": model, "optimizer": optimizer}, step=2)
    return values(model, optimizer)


def load_trained(rank: int, size: int, base: Path, mode: dict[str, int] | None, run: Path) -> Any:
    model = build(base, mode)
    optimizer = train(model, 1)
    report = mp.load(run / "checkpoint-2", {"model": model, "optimizer": optimizer})
    return values(model, optimizer), report.level.value


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [n for n, t in expected.items() if not torch.equal(found[n], t)] == []


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_experts_come_back_on_the_same_shape_in_one_process_and_in_transformers(
    mode: dict[str, int], base: Path, tmp_path: Path
) -> None:
    saved = run_world(world_size(mode), save_trained, base, mode, tmp_path)[0]
    for found, level in run_world(world_size(mode), load_trained, base, mode, tmp_path):
        assert_equal(found, saved)
        assert level == "exact"
    alone, level = load_trained(0, 1, base, None, tmp_path)
    assert_equal(alone, saved)
    assert level == "resharded"
    assert mp.Checkpoint.open(tmp_path / "checkpoint-2").verify().problems == ()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    for name, param in loaded.named_parameters():
        assert torch.equal(param, saved[name]), name


def test_experts_move_between_shapes(base: Path, tmp_path: Path) -> None:
    saved = run_world(4, save_trained, base, MODES[4], tmp_path)[0]
    for found, level in run_world(2, load_trained, base, MODES[0], tmp_path):
        assert_equal(found, saved)
        assert level == "resharded"
