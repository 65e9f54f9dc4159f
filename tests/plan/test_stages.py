"""Stages of a pipeline, seen in who holds what; the files that follow from them."""

from __future__ import annotations

import pytest

from milepost.geometry.placement import Replicate, Shard
from milepost.plan import parts
from milepost.plan.holding import PlacementClass
from milepost.plan.inventory import LeafInfo
from milepost.plan.part_names import (
    Numbered,
    RankParts,
    StageParts,
    WeightFiles,
    naming_of,
)
from milepost.plan.parts import plan_parts
from milepost.plan.stages import find_stages


def held_by(*ranks: int) -> LeafInfo:
    whole = PlacementClass((len(ranks),), ranks, (Replicate(),))
    return LeafInfo(dtype="F32", shape=(4,), itemsize=4, classes=(whole,))


def sharded_on(*ranks: int) -> LeafInfo:
    cut = PlacementClass((len(ranks),), ranks, (Shard(0),))
    return LeafInfo(dtype="F32", shape=(4,), itemsize=4, classes=(cut,))


def layers(*holders: tuple[int, ...]) -> dict[str, LeafInfo]:
    return {f"model.layers.{n}.weight": sharded_on(*ranks) for n, ranks in enumerate(holders)}


def test_layers_on_different_ranks_are_stages_in_order_of_the_lowest_rank() -> None:
    leaves = {
        "model.norm.weight": held_by(2, 3),
        **layers((0, 1), (0, 1), (2, 3)),
        "model.embed_tokens.weight": held_by(0, 1),
    }
    stages = find_stages(leaves)
    assert stages is not None and stages.count == 2
    assert stages.owner["model.norm.weight"] == 1 and stages.owner["model.layers.1.weight"] == 0
    assert stages.partition() == [[0, 2], [2, 3]]


def test_a_rank_with_several_virtual_stages_has_several_spans() -> None:
    stages = find_stages(layers((0,), (1,), (0,), (1,), (1,)))
    assert stages is not None
    assert stages.partition() == [[0, 1, 2, 3], [1, 2, 3, 5]]


def test_a_stage_without_layers_has_an_empty_entry() -> None:
    stages = find_stages({**layers((0,), (1,)), "lm_head.weight": held_by(2)})
    assert stages is not None
    assert stages.partition() == [[0, 1], [1, 2], []]


def test_what_several_stages_hold_is_owned_by_none_unless_it_stands_for_a_tied_one() -> None:
    leaves = {**layers((0,), (1,)), "vision.blocks.0.weight": held_by(0, 1), "tied": held_by(0, 1)}
    stages = find_stages(leaves, {"tied"})
    assert stages is not None
    assert stages.owner["vision.blocks.0.weight"] is None
    assert stages.owner["tied"] == 0


@pytest.mark.parametrize(
    "leaves",
    [
        layers((0, 1), (0, 1)),
        # Experts by name on different ranks: the layer is spread, so these are no stages.
        {
            "model.layers.0.attn": held_by(0, 1),
            "model.layers.0.experts.0.w": held_by(0),
            "model.layers.0.experts.1.w": held_by(1),
        },
        {"weight": held_by(0), "bias": held_by(1)},
        {"model.layers.0.weight": held_by(0), "head": held_by(1)},
    ],
    ids=["one-group", "experts-by-name", "no-layers", "one-list-on-one-rank"],
)
def test_other_ways_of_holding_a_model_are_no_pipeline(leaves: dict[str, LeafInfo]) -> None:
    assert find_stages(leaves) is None
    assert naming_of(WeightFiles.AUTO, leaves, (), world_size=2) == Numbered()


@pytest.mark.spec("v1#pipeline-1")
def test_parts_are_split_within_a_stage_and_always_numbered() -> None:
    leaves = {**layers((0,), (0,), (1,)), "vision.weight": held_by(0, 1)}
    naming = naming_of(WeightFiles.AUTO, leaves, (), world_size=2)
    assert isinstance(naming, StageParts)
    items = [(name, "F32", (4,)) for name in sorted(leaves)]
    plan = plan_parts(items, stem="model", max_part_nbytes=16, naming=naming)
    assert {part.name: list(part.tensors) for part in plan.parts} == {
        "model-pp00000-of-00002-00001.safetensors": ["model.layers.0.weight"],
        "model-pp00000-of-00002-00002.safetensors": ["model.layers.1.weight"],
        "model-pp00001-of-00002-00001.safetensors": ["model.layers.2.weight"],
        "model-wrapper-00001.safetensors": ["vision.weight"],
    }
    wide = plan_parts(items, stem="model", naming=naming)
    assert len(wide.parts) == 3


def test_frozen_tensors_of_a_stage_have_parts_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "FROZEN_NBYTES", 16)
    leaves = layers((0,), (0,), (1,))
    naming = naming_of(WeightFiles.AUTO, leaves, (), world_size=2)
    items = [(name, "F32", (4,)) for name in sorted(leaves)]
    frozen = {"model.layers.1.weight", "model.layers.2.weight"}
    plan = plan_parts(items, stem="model", naming=naming, frozen=frozen)
    assert {part.name: (list(part.tensors), part.is_frozen) for part in plan.parts} == {
        "model-pp00000-of-00002-00001.safetensors": (["model.layers.1.weight"], True),
        "model-pp00000-of-00002-00002.safetensors": (["model.layers.0.weight"], False),
        "model-pp00001-of-00002-00001.safetensors": (["model.layers.2.weight"], True),
    }


def test_a_model_that_is_not_divided_is_one_stage_when_stages_are_asked_for() -> None:
    naming = naming_of(WeightFiles.STAGES, layers((0, 1), (0, 1)), (), world_size=2)
    assert isinstance(naming, StageParts)
    assert naming.stages.partition() == [[0, 2]]
    assert naming.names("model", 0, 1) == ["model-pp00000-of-00001-00001.safetensors"]


def test_files_of_ranks_are_counted_from_zero_and_never_split() -> None:
    items = [("norm", "F32", (64,)), ("e.shard_0", "F32", (64,)), ("e.shard_1", "F32", (64,))]
    plan = plan_parts(items, stem="model", max_part_nbytes=1, naming=RankParts(2))
    assert {part.name: list(part.tensors) for part in plan.parts} == {
        "model-00000-of-00002.safetensors": ["norm", "e.shard_0"],
        "model-00001-of-00002.safetensors": ["e.shard_1"],
    }
