"""Layout of tensors in parts: every byte once, the rule of the size limit, names, totals."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.errors import InvalidInputError, UnencodableError
from milepost.format.header import parse_header, tensor_nbytes
from milepost.format.index import part_names
from milepost.plan import parts
from milepost.plan.parts import DATA_ALIGNMENT_NBYTES, PartsPlan, parse_nbytes, plan_parts

Item = tuple[str, str, tuple[int, ...]]

items = st.lists(
    st.tuples(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
        st.sampled_from(["F32", "BF16", "U8", "F64", "BOOL", "F8_E4M3", "C64"]),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda item: item[0],
)


def sizes(plan: PartsPlan) -> list[list[int]]:
    return [[entry.nbytes for entry in part.tensors.values()] for part in plan.parts]


@given(items, st.integers(1, 600))
def test_every_byte_of_every_tensor_lies_in_exactly_one_place(
    wanted: list[Item], limit: int
) -> None:
    plan = plan_parts(wanted, stem="model", max_part_nbytes=limit)
    seen: dict[str, int] = {}
    for part in plan.parts:
        header = parse_header(part.header, file_nbytes=part.nbytes, where=part.name)
        assert dict(header.tensors) == dict(part.tensors)
        assert header.data_start == len(part.header)
        assert len(part.header) % DATA_ALIGNMENT_NBYTES == 0
        at = header.data_start
        for name, entry in part.tensors.items():
            assert plan_offset(plan, name) == at
            at += entry.nbytes
            seen[name] = seen.get(name, 0) + entry.nbytes
        assert at == part.nbytes
    assert seen == {name: tensor_nbytes(dtype, shape) for name, dtype, shape in wanted}
    assert plan.total_nbytes == sum(seen.values())


def plan_offset(plan: PartsPlan, tensor: str) -> int:
    (part,) = (part for part in plan.parts if tensor in part.tensors)
    return part.offset(tensor)


@given(items, st.integers(1, 600))
def test_only_a_lone_tensor_exceeds_the_limit_and_no_part_could_join_its_neighbour(
    wanted: list[Item], limit: int
) -> None:
    plan = plan_parts(wanted, stem="model", max_part_nbytes=limit)
    filled = sizes(plan)
    for part in filled:
        above = [nbytes for nbytes in part if nbytes]
        assert sum(part) <= limit or len(above) == 1
    order = {name: number for number, (name, _, _) in enumerate(wanted)}
    for before, after in pairwise(plan.parts):
        first = min(after.tensors, key=order.__getitem__)
        nbytes = sum(entry.nbytes for entry in before.tensors.values())
        assert nbytes + after.tensors[first].nbytes > limit, "it would have fitted"
        assert max(order[name] for name in before.tensors) < order[first]


@given(items, st.integers(1, 600))
def test_the_index_names_each_tensor_once_and_counts_tensor_bytes_only(
    wanted: list[Item], limit: int
) -> None:
    plan = plan_parts(wanted, stem="model", max_part_nbytes=limit)
    document = json.loads(plan.index_bytes())
    assert document["metadata"] == {"total_size": plan.total_nbytes}
    assert set(document["weight_map"]) == {name for name, _, _ in wanted}
    for name, part in document["weight_map"].items():
        assert plan_offset(plan, name) >= DATA_ALIGNMENT_NBYTES
        assert part in {each.name for each in plan.parts}


@pytest.mark.case("V11")
def test_only_the_tensor_above_the_limit_makes_a_part_above_the_limit() -> None:
    wanted = [("a", "U8", (400,)), ("b", "U8", (400,)), ("c", "U8", (400,)), ("d", "U8", (3000,))]
    plan = plan_parts(wanted, stem="model", max_part_nbytes=parse_nbytes("1KB"))
    assert [list(part.tensors) for part in plan.parts] == [["a", "b"], ["c"], ["d"]]
    assert [part.name for part in plan.parts] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    assert plan.total_nbytes == 4200
    assert json.loads(plan.index_bytes())["metadata"]["total_size"] == 4200
    assert plan.index_name == "model.safetensors.index.json"


@pytest.mark.case("V11")
def test_what_fits_into_one_part_is_called_as_from_pretrained_expects_it() -> None:
    plan = plan_parts([("a", "U8", (400,))], stem="model")
    assert [part.name for part in plan.parts] == ["model.safetensors"]


@pytest.mark.case("V07")
@given(items, st.integers(1, 600))
def test_every_part_carries_the_framework_tag(wanted: list[Item], limit: int) -> None:
    for part in plan_parts(wanted, stem="model", max_part_nbytes=limit).parts:
        header = parse_header(part.header, file_nbytes=part.nbytes, where=part.name)
        assert header.metadata == {"format": "pt"}


@given(items, st.integers(1, 600), st.data())
def test_frozen_tensors_have_parts_of_their_own_before_the_others(
    wanted: list[Item], limit: int, data: st.DataObject
) -> None:
    frozen = {name for name, _, _ in wanted if data.draw(st.booleans())}
    nbytes = {name: tensor_nbytes(dtype, shape) for name, dtype, shape in wanted}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "FROZEN_NBYTES", 1)
        plan = plan_parts(wanted, stem="model", max_part_nbytes=limit, frozen=frozen)
    is_apart = sum(nbytes[name] for name in frozen) > 0
    assert [part.is_frozen for part in plan.parts] == sorted(
        (is_apart and set(part.tensors) <= frozen and bool(part.tensors) for part in plan.parts),
        reverse=True,
    )
    assert all(
        part.is_frozen or not is_apart or frozen.isdisjoint(part.tensors) for part in plan.parts
    )
    assert {name for part in plan.parts for name in part.tensors} == nbytes.keys()
    names = [part.name for part in plan.parts]
    assert names == part_names("model", len(names))
    few = plan_parts(wanted, stem="model", max_part_nbytes=limit, frozen=frozen)
    assert few == plan_parts(wanted, stem="model", max_part_nbytes=limit), "they are small"


def test_no_tensors_at_all_make_one_part() -> None:
    plan = plan_parts([], stem="optimizer")
    assert [part.name for part in plan.parts] == ["optimizer.safetensors"]
    assert (plan.total_nbytes, plan.parts[0].nbytes) == (0, DATA_ALIGNMENT_NBYTES)


@pytest.mark.parametrize("limit", [10, 1])
def test_a_name_that_comes_twice_is_refused_even_in_two_parts(limit: int) -> None:
    wanted = [("a", "U8", (1,)), ("a", "U8", (2,))]
    with pytest.raises(UnencodableError, match="a: two tensors have this name"):
        plan_parts(wanted, stem="model", max_part_nbytes=limit)


def test_twenty_thousand_tensors_are_laid_out_without_a_quadratic_step() -> None:
    wanted = [(f"layers.{i}.weight", "BF16", (4, 4)) for i in range(20_000)]
    plan = plan_parts(wanted, stem="model", max_part_nbytes=32 * 100)
    assert len(plan.parts) == 200
    assert plan.total_nbytes == 20_000 * 32


@pytest.mark.case("V11")
@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (1, 1),
        ("5GB", 5 * 10**9),
        ("5 GB", 5 * 10**9),
        ("5gb", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("500MB", 500 * 10**6),
        ("1.5KB", 1500),
        ("17", 17),
        ("17B", 17),
        ("2TiB", 2 * 2**40),
    ],
)
def test_sizes_are_read_as_hugging_face_spells_them(text: int | str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "5 G B", "five", "5PB", "-1GB", "nan", "1e9", 0, -5, "0"]
)
def test_a_size_that_means_nothing_is_refused_with_an_example(text: int | str) -> None:
    with pytest.raises(InvalidInputError, match="size"):
        parse_nbytes(text)
