"""Hub tensors as views of runtime tensors: compact, cheap to agree on, and refused when uneven."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from milepost.checkpointing.names_on_disk import derive
from milepost.errors import InvalidInputError, MismatchError
from milepost.geometry.axis_view import AxisDim, AxisKind
from milepost.geometry.placement import Placement, Replicate, Shard
from milepost.geometry.strided import StridedCopy
from milepost.plan.holding import PlacementClass
from milepost.plan.hub_map import HubMap, HubPiece, HubTensor, same_names, whole_piece
from milepost.plan.hub_views import ViewRun, Views, parts_of, views_of
from milepost.plan.inventory import SELF, Inventory, LeafInfo, holding_of, merge_inventories
from milepost.plan.view_rules import view_rules

RANKS = 64


@pytest.fixture(scope="module")
def large() -> dict[str, torch.Tensor]:
    import transformers

    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=48,
        num_experts=128,
        hidden_size=2048,
        moe_intermediate_size=768,
        vocab_size=151936,
    )
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    return {"": model, **model.state_dict()}


def of_large(large: Mapping[str, Any]) -> tuple[dict[str, LeafInfo], Views]:
    """Its leaves as 64 ranks hold them (experts on 8 x 8), and how they lie on disk."""
    tensors = {name: t for name, t in large.items() if name}
    derived = derive(large[""], tensors)
    assert derive(large[""], tensors) is derived, "derived once, however often it is saved"
    ranks = tuple(range(RANKS))
    cuts: tuple[Placement, ...] = (Shard(0, split_factor=8), Shard(0))
    experts = PlacementClass((8, 8), ranks, cuts)
    dense = PlacementClass((RANKS,), ranks, (Shard(0),))
    leaves = {
        name: LeafInfo(
            dtype="BF16",
            shape=tuple(t.shape),
            itemsize=2,
            classes=(experts if ".experts." in name else dense,),
        )
        for name, t in tensors.items()
    }
    return leaves, derived.views


def test_what_a_frozen_tensor_is_on_disk_is_frozen(large: Any) -> None:
    leaves, views = of_large(large)
    fused, runs = next(iter(views.items()))
    inventory = Inventory(
        sets={"model": leaves}, views={"model": dict(views)}, frozen={"model": frozenset({fused})}
    )
    assert Inventory.from_bytes(inventory.to_bytes()) == inventory
    assert inventory.frozen_on_disk("model") == {v.name for run in runs for v in run.views()}


def test_thousands_of_experts_are_agreed_on_in_a_few_kilobytes(large: Any) -> None:
    leaves, views = of_large(large)
    fused = Inventory(sets={"model": leaves}).to_bytes()
    inventory = Inventory(sets={"model": leaves}, views={"model": dict(views)})
    raw = inventory.to_bytes()
    assert len(inventory.on_disk("model")) == 18_867
    assert sum(len(runs) for runs in views.values()) == 3 * 48
    assert len(raw) - len(fused) < 16 * 1024
    again = Inventory.from_bytes(raw)
    assert again == inventory
    assert list(again.on_disk("model")) == list(inventory.on_disk("model"))
    assert len(view_rules({n: leaf.shape for n, leaf in leaves.items()}, views)) == 3


def test_thousands_of_experts_share_the_few_grids_of_ranks_that_hold_them(large: Any) -> None:
    leaves, views = of_large(large)
    on_disk = Inventory(sets={"model": leaves}, views={"model": dict(views)}).on_disk("model")
    holdings = {name: holding_of(leaf, name) for name, leaf in on_disk.items()}
    assert len({id(holding) for holding in holdings.values()}) == 1 + 3 * RANKS
    expert = holdings["model.layers.7.mlp.experts.5.up_proj.weight"]
    assert expert.sole_holder is not None
    assert expert.held((768, 2048), ()) == (((0, 768),), ((0, 2048),))


def runs(*shape: int) -> tuple[ViewRun, ...]:
    kind = AxisKind((4, *shape), tuple(AxisDim(n + 1, 0, 1, k) for n, k in enumerate(shape)))
    return (ViewRun("experts.", ".w", kind, (0,), 4),)


def leaf(*shape: int, placement: Placement | None = None) -> LeafInfo:
    cuts = SELF if placement is None else PlacementClass((2,), (0, 1), (placement,))
    return LeafInfo(dtype="BF16", shape=shape, itemsize=2, classes=(cuts,))


def test_stages_add_their_own_views_and_a_view_that_differs_is_refused_naming_both_ranks() -> None:
    def stage(name: str, **views: Any) -> Inventory:
        return Inventory(sets={"model": {name: leaf(4, 3, 2)}}, views={"model": views})

    merged = merge_inventories([([0], stage("a", a=runs(3, 2))), ([1], stage("b"))])
    assert list(merged.on_disk("model")) == [*(f"experts.{n}.w" for n in range(4)), "b"]
    two = [([0], stage("a", a=runs(3, 2))), ([2], stage("a", a=runs(2, 3)))]
    with pytest.raises(MismatchError, match="model: a: ranks 0 and 2 would store it"):
        merge_inventories(two)


def test_ties_have_the_names_on_disk() -> None:
    kind = AxisKind((3,), (AxisDim(0, 0, 1, 3),))
    views = {
        "embed": (ViewRun("hub.embed", None, kind, ()),),
        "head": (ViewRun("hub.head", None, kind, ()),),
        "e": runs(2),
    }
    inventory = Inventory(sets={"model": {"embed": leaf(3)}}, views={"model": views})
    assert inventory.ties_on_disk("model", {"head": "embed"}) == {"hub.head": "hub.embed"}
    assert inventory.ties_on_disk("model", {"other": "norm"}) == {"other": "norm"}


def test_a_group_that_lacks_an_expert_is_refused_for_that_expert_only() -> None:
    cut = PlacementClass((4,), (0, 1, 2, 3), (Shard(0),))
    half = PlacementClass((2, 2), (0, 1, 2, 3), (Shard(0), Replicate()))
    for classes, holders in (((cut,), [[0], [1], [2], [3]]), ((half,), [[0, 1], [2, 3]])):
        info = LeafInfo(dtype="BF16", shape=(4, 3), itemsize=2, classes=classes)
        inventory = Inventory(sets={"m": {"e": info}}, views={"m": {"e": runs(3)}})
        found = [list(holding_of(at, name).ranks) for name, at in inventory.on_disk("m").items()]
        assert found == [holders[number * len(holders) // 4] for number in range(4)]


def test_a_tensor_joined_from_two_is_read_in_parts_and_not_written_from_slices() -> None:
    joined = HubTensor(
        name="qk",
        shape=(5, 3),
        pieces=(
            HubPiece(source="q", copy=StridedCopy((6,), 0, (1,), 0, (1,))),
            HubPiece(source="k", copy=StridedCopy((9,), 6, (1,), 0, (1,))),
        ),
    )
    hub_map = HubMap({"qk": joined}, {"q": (2, 3), "k": (3, 3)})
    parts = parts_of(hub_map, joined)
    assert [(source, part.start, part.view.kind.shape) for source, part in parts] == [
        ("q", (0, 0), (2, 3)),
        ("k", (2, 0), (3, 3)),
    ]
    with pytest.raises(InvalidInputError, match="qk: its elements do not lie evenly in q, k"):
        views_of(hub_map)


def test_tensors_that_lie_as_they_are_held_need_no_view() -> None:
    assert views_of(same_names({"a": (2, 3), "b": ()})) == {}
    renamed = HubTensor(name="hub.a", shape=(2, 3), pieces=whole_piece("a", (2, 3)))
    (only,) = views_of(HubMap({"hub.a": renamed}, {"a": (2, 3)}))["a"]
    assert [view.name for view in only.views()] == ["hub.a"]


def test_rules_hold_for_all_tensors_of_a_name_and_shape_or_are_written_out() -> None:
    kind = AxisKind((3,), (AxisDim(0, 0, 1, 3),))

    def run(name: str) -> tuple[ViewRun, ...]:
        return (ViewRun(name, None, kind, ()),)

    shapes = {"a.0.w": (3,), "a.1.w": (3,), "b.0.w": (3,), "b.1.w": (3,)}
    rules = view_rules(shapes, {"a.0.w": run("x.0.w"), "a.1.w": run("x.1.w"), "b.1.w": run("y")})
    assert [(rule.runtime, rule.stored) for rule in rules] == [
        ("a.*.w", "x.*.w"),
        ("b.1.w", "y"),
    ]
