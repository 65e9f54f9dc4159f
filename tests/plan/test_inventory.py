"""Ranks describe what they hold; the merge is one table, or names who disagrees."""

from __future__ import annotations

import pytest

from milepost.errors import InvalidInputError, MismatchError
from milepost.geometry.placement import PackedShard, Replicate, Shard
from milepost.plan.holding import PlacementClass
from milepost.plan.inventory import SELF, Inventory, LeafInfo, holding_of, merge_inventories


def leaf(
    *classes: PlacementClass, shape: tuple[int, ...] = (8, 4), dtype: str = "BF16"
) -> LeafInfo:
    return LeafInfo(dtype=dtype, shape=shape, itemsize=2, classes=classes)


def inventory(**leaves: LeafInfo) -> Inventory:
    return Inventory(sets={"model": leaves})


def test_an_inventory_survives_its_compact_form() -> None:
    mesh = PlacementClass((2, 2), (0, 1, 2, 3), (Replicate(), Shard(1, 2)))
    packed = PlacementClass((2, 2), (0, 1, 2, 3), (PackedShard(0, (6, 2), (1, 2)), Shard(0)))
    first = Inventory(
        sets={"model": {"w": leaf(mesh), "qkv": leaf(packed), "b": leaf(SELF, shape=())}},
        facts={"step": "7"},
    )
    assert Inventory.from_bytes(first.to_bytes()) == first


def test_plain_tensors_that_ranks_state_alike_are_replicas_of_one_holding() -> None:
    merged = merge_inventories([((0, 1, 2), inventory(w=leaf(SELF)))])
    holding = holding_of(merged.sets["model"]["w"], "w")
    assert holding.replicas(()) == (0, 1, 2)


def test_replicas_stay_one_class_of_ranks_though_one_rank_holds_more_besides() -> None:
    alike = merge_inventories([((0, 1, 2), inventory(w=leaf(SELF)))])
    merged = merge_inventories(
        [((0,), inventory(w=leaf(SELF), extra=leaf(SELF))), ((1, 2), inventory(w=leaf(SELF)))]
    )
    assert merged.sets["model"]["w"] == alike.sets["model"]["w"]


def test_stages_that_lack_each_others_names_are_joined_in_order_of_rank() -> None:
    merged = merge_inventories(
        [((1,), inventory(late=leaf(SELF))), ((0,), inventory(early=leaf(SELF)))]
    )
    assert list(merged.sets["model"]) == ["early", "late"]
    assert holding_of(merged.sets["model"]["late"], "late").ranks == [1]


def test_meshes_that_each_rank_sees_alone_become_one_holding() -> None:
    merged = merge_inventories(
        [
            ((0, 2), inventory(norm=leaf(PlacementClass((2,), (0, 2), (Shard(0),))))),
            ((1, 3), inventory(norm=leaf(PlacementClass((2,), (1, 3), (Shard(0),))))),
        ]
    )
    holding = holding_of(merged.sets["model"]["norm"], "norm")
    assert (holding.replicas((0,)), holding.replicas((1,))) == ((0, 1), (2, 3))


def test_ranks_that_disagree_on_a_shape_are_both_named() -> None:
    with pytest.raises(MismatchError) as caught:
        merge_inventories(
            [
                ((0,), inventory(w=leaf(SELF, shape=(8, 4)))),
                ((1,), inventory(w=leaf(SELF, shape=(4, 4)))),
            ]
        )
    assert str(caught.value) == (
        "model: w: global shape is (8, 4) on rank 0 and (4, 4) on rank 1; a plain tensor that is "
        "a slice of it must be declared with milepost.declare_placement"
    )


def test_facts_that_differ_are_refused() -> None:
    with pytest.raises(MismatchError, match="step: rank 0 has 7, rank 2 has 8; it must be"):
        merge_inventories([((0, 1), Inventory(facts={"step": "7"})),
                           ((2,), Inventory(facts={"step": "8"}))])  # fmt: skip


def test_a_tensor_of_which_a_shard_is_nowhere_is_refused() -> None:
    lost = leaf(PlacementClass((2,), (0, 1), (Shard(0),)))
    assert holding_of(lost, "w").ranks == [0, 1]
    half = LeafInfo(dtype="BF16", shape=(8,), itemsize=2, classes=())
    with pytest.raises(InvalidInputError, match="no group holds all of it"):
        holding_of(half, "w")


def of_frozen(*frozen: str, held: tuple[str, ...]) -> Inventory:
    return Inventory(
        sets={"model": {name: leaf(SELF) for name in held}}, frozen={"model": frozenset(frozen)}
    )


def test_a_leaf_is_frozen_when_every_rank_that_holds_it_says_so() -> None:
    first = of_frozen("a", "b", held=("a", "b", "c"))
    second = of_frozen("a", "d", held=("a", "b", "d"))
    assert Inventory.from_bytes(second.to_bytes()) == second
    merged = merge_inventories([((0,), first), ((1,), second)])
    assert merged.frozen == {"model": {"a", "d"}}
    assert merged.frozen_on_disk("model") == {"a", "d"}
    assert merged.frozen_on_disk("optimizer") == set()
