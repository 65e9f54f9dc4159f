"""The map between runtime and hub tensors as a value: what it refuses, answers and cuts."""

from __future__ import annotations

import itertools
from math import prod

import pytest

from milepost.errors import InvalidInputError
from milepost.geometry.placement import IndexSet, Shard, index_set, local_shape
from milepost.geometry.strided import StridedCopy, contiguous_strides
from milepost.plan.hub_map import (
    HubMap,
    HubPiece,
    HubSlice,
    HubTensor,
    drop_aliases,
    same_names,
    whole_piece,
)

FUSED = (4, 6, 5)  # experts, gate rows then up rows, columns


def piece(source: str, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> HubPiece:
    copy = StridedCopy(shape, 0, contiguous_strides(shape), offset, strides)
    return HubPiece(source=source, copy=copy.normalised())


def experts() -> dict[str, HubTensor]:
    tensors = {}
    for expert, (half, name) in itertools.product(range(4), enumerate(("gate", "up"))):
        part = piece("fused", (3, 5), expert * 30 + half * 15, (5, 1))
        tensors[f"{expert}.{name}"] = HubTensor(
            name=f"{expert}.{name}", shape=(3, 5), pieces=(part,)
        )
    return tensors


def interleaved() -> HubTensor:
    """Rows g0 u0 g1 u1 ... on disk, from a tensor that holds all of g, then all of u."""
    copy = StridedCopy((3, 2, 5), 0, (10, 5, 1), 0, (5, 15, 1)).normalised()
    return HubTensor(name="w13", shape=(6, 5), pieces=(HubPiece(source="g_u", copy=copy),))


def test_every_runtime_element_must_be_saved_once() -> None:
    tensors = experts()
    del tensors["3.up"]
    with pytest.raises(InvalidInputError, match="fused: 105 of its 120 elements would be saved"):
        HubMap(tensors, {"fused": FUSED})


def test_every_hub_element_must_be_filled_once() -> None:
    half = HubTensor(name="a", shape=(2, 2), pieces=whole_piece("b", (2,)))
    with pytest.raises(InvalidInputError, match="a: 4 elements on disk would be filled 2 times"):
        HubMap({"a": half}, {"b": (2,)})


def test_one_tensor_under_two_hub_names_is_refused_unless_it_is_tied() -> None:
    twice = {n: HubTensor(name=n, shape=(2,), pieces=whole_piece("w", (2,))) for n in ("a", "b")}
    with pytest.raises(InvalidInputError, match="w: 4 of its 2 elements"):
        HubMap(twice, {"w": (2,)})
    assert set(HubMap(twice, {"w": (2,)}, shared=frozenset({"w"})).tensors) == {"a", "b"}


def test_same_names_is_an_identity() -> None:
    hub_map = same_names({"a": (2, 3), "b": (), "empty": (0, 4)}, {"alias": "a"})
    assert hub_map.is_identity
    assert hub_map.identity == {"a", "b", "empty"}
    assert hub_map.ties == {"alias": "a"}


def test_a_renamed_tensor_is_known_as_one_that_lies_as_it_is() -> None:
    renamed = HubTensor(name="b", shape=(6,), pieces=whole_piece("a", (2, 3)))
    hub_map = HubMap({"b": renamed}, {"a": (2, 3)})
    assert hub_map.renamed == {"b": "a"}
    assert not hub_map.identity


def test_the_map_can_be_asked_from_either_side() -> None:
    hub_map = HubMap(experts(), {"fused": FUSED})
    names = [name for name, _ in hub_map.by_source["fused"]]
    assert names == ["0.gate", "0.up", "1.gate", "1.up", "2.gate", "2.up", "3.gate", "3.up"]
    assert hub_map.by_source["fused"][3][1] == StridedCopy((15,), 45, (1,), 0, (1,))
    assert hub_map.tensors["1.up"].slices() == [
        HubSlice(grid=(3, 5), box=((0, 3), (0, 5)), source="fused", offset=45, strides=(5, 1))
    ]


def test_interleaved_rows_are_one_slice_of_a_finer_grid() -> None:
    (part,) = interleaved().slices()
    assert part.grid == (3, 2, 5)
    assert part.lengths == (3, 2, 5)
    assert part.strides == (5, 15, 1)


def test_a_joined_tensor_is_one_slice_for_each_source() -> None:
    parts = []
    for source, rows, start in (("q", 4, 0), ("k", 2, 4)):
        copy = StridedCopy((rows * 3,), start * 3, (1,), 0, (1,))
        parts.append(HubPiece(source=source, copy=copy))
    joined = HubTensor(name="qk", shape=(6, 3), pieces=tuple(parts))
    hub_map = HubMap({"qk": joined}, {"q": (4, 3), "k": (2, 3)})
    assert [(s.source, s.grid, s.box) for s in hub_map.tensors["qk"].slices()] == [
        ("q", (6, 3), ((0, 4), (0, 3))),
        ("k", (6, 3), ((4, 6), (0, 3))),
    ]


def test_a_source_that_lies_transposed_in_memory_is_followed_there() -> None:
    tensor = HubTensor(name="a", shape=(2, 3), pieces=whole_piece("a", (2, 3)))
    transposed = StridedCopy((2, 3), 0, (3, 1), 7, (1, 2))
    (part,) = tensor.slices({"a": transposed})
    assert (part.offset, part.strides) == (7, (1, 2))


def test_hub_names_that_only_repeat_a_tied_tensor_are_ties() -> None:
    made = [HubTensor(name=n, shape=(2,), pieces=whole_piece(n, (2,))) for n in ("head", "embed")]
    hub_map = drop_aliases(made, {"head": (2,), "embed": (2,)}, {"head": "embed"})
    assert list(hub_map.tensors) == ["embed"]
    assert hub_map.ties == {"head": "embed"}
    assert hub_map.sources == {"embed": (2,)}


def test_a_hub_tensor_that_joins_a_tied_tensor_with_another_is_kept() -> None:
    copies = [StridedCopy((2,), at, (1,), 0, (1,)) for at in (0, 2)]
    pieces = tuple(HubPiece(source=s, copy=c) for s, c in zip("ab", copies, strict=True))
    joined = HubTensor(name="joined", shape=(4,), pieces=pieces)
    plain = HubTensor(name="kept", shape=(2,), pieces=whole_piece("kept", (2,)))
    shapes = {"a": (2,), "b": (2,), "kept": (2,)}
    hub_map = drop_aliases([joined, plain], shapes, {"b": "kept"})
    assert [p.source for p in hub_map.tensors["joined"].pieces] == ["a", "kept"]


def test_files_that_hold_tensors_as_they_are_in_memory_are_taken_as_they_are() -> None:
    hub_map = HubMap(experts(), {"fused": FUSED})
    assert list(hub_map.as_stored(["fused"]).tensors) == ["fused"]
    assert list(hub_map.as_stored(list(experts())).tensors) == list(experts())
    some = [*experts()][:-1]
    assert list(hub_map.as_stored(some).tensors) == list(experts()), "what is missing has hub names"
    assert hub_map.as_stored([*some, "fused"]).is_identity


def test_sources_of_one_hub_tensor_are_stored_joined_or_all_on_their_own() -> None:
    copies = [StridedCopy((2,), at, (1,), 0, (1,)) for at in (0, 2)]
    pieces = tuple(HubPiece(source=s, copy=c) for s, c in zip("qk", copies, strict=True))
    joined = HubTensor(name="qk", shape=(4,), pieces=pieces)
    hub_map = HubMap({"qk": joined}, {"q": (2,), "k": (2,)})
    assert list(hub_map.as_stored(["q", "k"]).tensors) == ["q", "k"]
    assert list(hub_map.as_stored(["q"]).tensors) == ["qk"]


@pytest.mark.parametrize(
    ("placements", "mesh"),
    [
        ([Shard(0)], [2]),
        ([Shard(1, split_factor=2)], [3]),
        ([Shard(0, split_factor=2), Shard(0)], [2, 2]),
        ([Shard(0), Shard(2)], [2, 2]),
        ([Shard(1), Shard(2)], [4, 2]),
        ([Shard(0)], [8]),
    ],
)
def test_the_ranks_together_hold_each_hub_element_once(
    placements: list[Shard], mesh: list[int]
) -> None:
    for tensors, source, shape in (
        (experts(), "fused", FUSED),
        ({"w13": interleaved()}, "g_u", (2, 3, 5)),
    ):
        hub_map = HubMap(tensors, {source: shape})
        filled = {name: [-1] * prod(tensor.shape) for name, tensor in tensors.items()}
        for coordinate in itertools.product(*map(range, mesh)):
            _fill(hub_map, filled, shape, index_set(shape, mesh, coordinate, placements))
        alone = {name: [-1] * prod(tensor.shape) for name, tensor in tensors.items()}
        _fill(hub_map, alone, shape, tuple(((0, length),) for length in shape))
        assert filled == alone
        assert sorted(itertools.chain(*alone.values())) == list(range(prod(shape)))


def _fill(
    hub_map: HubMap, filled: dict[str, list[int]], shape: tuple[int, ...], held: IndexSet
) -> None:
    """Paint what a rank holds with the global index of each element, each place once."""
    strides = contiguous_strides(shape)
    indices = [[i for a, b in spans for i in range(a, b)] for spans in held]
    local = [sum(map(int.__mul__, index, strides)) for index in itertools.product(*indices)]
    assert len(local) == len(list(itertools.product(*map(range, local_shape(held)))))
    for name, tensor in hub_map.tensors.items():
        for part in tensor.pieces:
            for copy in part.held(shape, held):
                for index in itertools.product(*map(range, copy.shape)):
                    to = copy.to_offset + sum(map(int.__mul__, index, copy.to_strides))
                    source = copy.from_offset + sum(map(int.__mul__, index, copy.from_strides))
                    assert filled[name][to] == -1
                    filled[name][to] = local[source]
