"""What a mesh of ranks is, and what is refused before a step is trained."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost_trainer.parallel import MeshSizes, build
from tests.trainer import modes
from tests.trainer.modes import Mode, alone, config_of, mode, start
from tests.worlds import run_world


def test_ranks_that_share_a_batch_are_those_of_one_context_tensor_and_pipeline_group() -> None:
    sizes = MeshSizes(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    sizes.check_world(48)
    place = product(range(2), range(2), range(3), range(2), range(2))
    for rank, (pp, replicate, shard, cp, tp) in enumerate(place):
        assert sizes.coordinates(rank) == {
            "pp": pp,
            "dp_replicate": replicate,
            "dp_shard": shard,
            "cp": cp,
            "tp": tp,
        }
        assert sizes.data_rank(rank) == replicate * 3 + shard
    assert sizes.data_world == 6


def test_experts_live_on_the_ranks_of_one_replica_of_a_stage() -> None:
    sizes = MeshSizes(pp=2, dp_replicate=3, dp_shard=4, tp=2, ep=2, etp=2)
    assert (sizes.world_size, sizes.stage_ranks, sizes.efsdp) == (48, 8, 2)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 0}, "tp=0: expected a whole number"),
        ({"dp_shard": 2.0}, "dp_shard=2.0: expected a whole number"),
        ({"dp_shard": 4, "ep": 3}, r"ep=3 times etp=1 must divide dp_shard \* cp \* tp = 4"),
        ({"dp_replicate": 2, "ep": 2}, "ep=2 times etp=1 must divide"),
    ],
)
def test_sizes_that_make_no_mesh_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MeshSizes(**sizes)


def test_a_mesh_of_another_size_than_the_job_is_refused() -> None:
    with pytest.raises(ValueError, match="tp=4 needs 4 ranks, but the job has 1"):
        build(config_of("llama"), MeshSizes(tp=4))


PARTS = [
    mode("TP", tp=2),
    mode("DDP", dp_replicate=2),
    mode("CP", cp=2),
    mode("PP", schedule=modes.INTERLEAVED, pp=2),
]


def weights_from(rank: int, world_size: int, base: Path) -> list[dict[str, torch.Tensor]]:
    held = [build(base, part.sizes, schedule=part.schedule) for part in PARTS]
    return [{n: modes.whole(p) for n, p in each.named_parameters()} for each in held]


def test_a_model_of_a_directory_has_its_values_on_any_mesh(tmp_path: Path) -> None:
    base = build(config_of("llama"), MeshSizes(), seed=5).modules[0]
    base.save_pretrained(tmp_path)  # type: ignore[operator]
    weights = {name: param.detach() for name, param in base.named_parameters()}
    for stages in zip(*run_world(2, weights_from, tmp_path), strict=True):
        together = stages[0] | stages[1]
        assert together.keys() == weights.keys()
        assert all(torch.equal(together[name], weights[name]) for name in weights)


REFUSED = [
    (mode("EP", "llama", dp_shard=2, ep=2), "`LlamaForCausalLM` has no `ep_plan`"),
    (mode("ETP", "llama", dp_shard=2, etp=2), "LlamaForCausalLM has no fused experts"),
]


def refusal(rank: int, world_size: int, mode: Mode) -> str:
    with pytest.raises(ValueError) as caught:
        start(mode)
    return str(caught.value)


@pytest.mark.parametrize(("mode", "message"), REFUSED, ids=str)
def test_a_model_that_does_not_fit_a_mesh_is_refused(mode: Mode, message: str) -> None:
    for found in run_world(2, refusal, mode):
        assert message in found


def odd_batches(rank: int, world_size: int) -> tuple[str, str]:
    pipeline, context = start(mode("PP", pp=2)), start(mode("CP", cp=2))
    batch = pipeline.batches.slice_of(1)
    with pytest.raises(ValueError) as rows:
        pipeline.held.train_step({name: tensor[:6] for name, tensor in batch.items()})
    with pytest.raises(ValueError) as length:
        context.held.train_step({name: tensor[:, :7] for name, tensor in batch.items()})
    return str(rows.value), str(length.value)


def test_batches_that_cannot_be_cut_evenly_are_refused() -> None:
    for rows, length in run_world(2, odd_batches):
        assert rows == "6 rows of a batch cannot be cut evenly into 4 microbatches"
        assert length == "a batch of length 7 cannot be cut evenly by cp=2"


def test_a_batch_without_labels_has_no_loss_and_no_gradient() -> None:
    training = start(alone("llama"))
    batch = training.batches.slice_of(1)
    batch["labels"] = batch["labels"].fill_(-100)
    assert training.held.train_step(batch) == 0.0
    assert training.held.clip_grad_norm_(1.0) == 0.0
