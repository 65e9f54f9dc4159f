"""Adapters train on every mode of parallelism as they do in one process."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.trainer.lora_modes import Seen, train
from tests.trainer.modes import MOE, Mode, alone, mode
from tests.worlds import run_world

QUICK = [
    ("linear", mode("TP", tp=2)),
    ("linear", mode("FSDP2+TP", dp_shard=2, tp=2)),
    ("patterns", mode("FSDP2+CP", dp_shard=2, cp=2)),
    ("mixed", mode("EP+FSDP2", MOE, dp_shard=4, ep=2)),
    ("dora-everywhere", mode("TP", tp=2)),
    ("mixed", mode("TP", MOE, tp=2)),
    ("parameters", mode("EP", MOE, dp_shard=2, ep=2)),
    ("parameters", mode("TP", MOE, tp=2)),
]
SLOW = [
    ("linear", mode("DDP", dp_replicate=2)),
    ("linear", mode("FSDP2", dp_shard=4)),
    ("linear", mode("HSDP", dp_replicate=2, dp_shard=2)),
    ("linear", mode("CP", cp=2)),
    ("linear", mode("TP+CP", cp=2, tp=2)),
    ("linear", mode("HSDP+TP", dp_replicate=2, dp_shard=2, tp=2)),
    ("linear", mode("PP", pp=2)),
    ("linear", mode("PP+FSDP2", pp=2, dp_shard=2)),
    ("linear", mode("PP+TP", pp=2, tp=2)),
    ("linear", mode("FSDP2", "llama-tied", dp_shard=2)),
    ("linear", mode("TP", "llama-tied", tp=2)),
    ("dora", mode("DDP", dp_replicate=2)),
    ("dora", mode("FSDP2", dp_shard=2)),
    ("dora", mode("CP", cp=2)),
    ("patterns", mode("DDP", dp_replicate=2)),
    ("patterns", mode("TP", tp=2)),
    ("patterns", mode("FSDP2+TP", dp_shard=2, tp=2)),
    ("experts", mode("DDP", MOE, dp_replicate=2)),
    ("experts", mode("FSDP2", MOE, dp_shard=2)),
    ("experts", mode("EP", MOE, dp_shard=2, ep=2)),
    ("experts", mode("EP=TP", MOE, tp=2, ep=2)),
    ("experts", mode("EP+CP", MOE, cp=2, ep=2)),
    ("experts", mode("TP", "mixtral", tp=2)),
    ("experts", mode("FSDP2+TP", MOE, dp_shard=2, tp=2)),
    ("experts", mode("HSDP+TP", MOE, dp_replicate=2, dp_shard=2, tp=2)),
    ("experts", mode("TP+CP", MOE, cp=2, tp=2)),
    ("experts", mode("PP+TP", MOE, pp=2, tp=2)),
    ("experts", mode("EP", "mixtral", dp_shard=2, ep=2)),
    ("experts", mode("EP", "gpt-oss", dp_shard=2, ep=2)),
    ("mixed", mode("EP", MOE, dp_shard=2, ep=2)),
    ("mixed", mode("EP+TP", MOE, dp_shard=2, tp=2, ep=4)),
    ("mixed", mode("EP+CP", MOE, cp=2, ep=2)),
    ("mixed", mode("HSDP+EP", MOE, dp_replicate=2, dp_shard=2, ep=2)),
    ("mixed", mode("PP+EP", MOE, pp=2, dp_shard=2, ep=2)),
    ("parameters", mode("DDP", MOE, dp_replicate=2)),
    ("parameters", mode("FSDP2", MOE, dp_shard=2)),
    ("dora", mode("PP+TP", pp=2, tp=2)),
    ("dora", mode("TP", "llama-tied", tp=2)),
    ("dora", mode("TP+CP", cp=2, tp=2)),
    ("dora-everywhere", mode("FSDP2+TP", dp_shard=2, tp=2)),
    ("dora-everywhere", mode("HSDP+TP", dp_replicate=2, dp_shard=2, tp=2)),
    ("parameters", mode("EP+FSDP2", MOE, dp_shard=4, ep=2)),
    ("parameters", mode("EP+TP", MOE, dp_shard=2, tp=2, ep=4)),
    ("parameters", mode("EP=TP", MOE, tp=2, ep=2)),
    ("parameters", mode("EP+CP", MOE, cp=2, ep=2)),
    ("parameters", mode("FSDP2+TP", MOE, dp_shard=2, tp=2)),
    ("parameters", mode("PP+EP", MOE, pp=2, dp_shard=2, ep=2)),
    ("parameters", mode("TP", "mixtral", tp=2)),
    ("parameters", mode("EP", "gpt-oss", dp_shard=2, ep=2)),
]
CASES = [
    *(pytest.param(kind, m, id=f"{kind}-{m}") for kind, m in QUICK),
    *(pytest.param(kind, m, id=f"{kind}-{m}", marks=pytest.mark.slow) for kind, m in SLOW),
]


@functools.cache
def one_process(kind: str, family: str) -> Seen:
    return train(0, 1, alone(family), kind, torch.float32)


@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_adapters_learn_as_in_one_process(kind: str, mode: Mode) -> None:
    reference = one_process(kind, mode.family)
    assert min(reference.norms) > 1e-3 and reference.untouched
    ranks = run_world(mode.sizes.world_size, train, mode, kind, torch.float32)
    found: dict[str, torch.Tensor] = {}
    for seen in ranks:
        assert seen.untouched
        assert seen.losses == ranks[0].losses and seen.norms == ranks[0].norms
        assert seen.losses == pytest.approx(reference.losses, abs=2e-5)
        assert seen.norms == pytest.approx(reference.norms, rel=1e-3)
        for name, value in seen.trained.items():
            assert torch.equal(value, found.setdefault(name, value)), f"{name} differs on a replica"
    assert found.keys() == reference.trained.keys()
    for name, value in reference.trained.items():
        assert torch.allclose(found[name], value, rtol=1e-3, atol=2e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [mode("FSDP2", dp_shard=2), mode("TP", tp=2), mode("FSDP2+TP", dp_shard=2, tp=2)],
    ids=str,
)
def test_a_base_of_half_the_width_keeps_adapters_in_full(mode: Mode) -> None:
    seen = run_world(mode.sizes.world_size, train, mode, "linear", torch.bfloat16)
    assert all(value.dtype is torch.float32 for value in seen[0].trained.values())
    assert seen[0].untouched and min(seen[0].norms) > 1e-3
    assert all(other.losses == seen[0].losses for other in seen)
