"""Following elements through torch operations: the same operations on numbered elements tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.hf.hub_trace import Trace
from milepost.plan.hub_map import HubTensor

Operation: TypeAlias = Callable[[Tensor, Tensor], Tensor]

A, B = (4, 6, 5), (2, 6, 5)

FOLLOWED: dict[str, Operation] = {
    "itself": lambda a, b: a,
    "chunk": lambda a, b: a.chunk(2, dim=1)[1].contiguous(),
    "expert": lambda a, b: a.chunk(2, dim=1)[1].contiguous().chunk(4, dim=0)[2].squeeze(0),
    "unbind": lambda a, b: a.unbind(1)[3],
    "transpose": lambda a, b: a.transpose(1, 2).contiguous(),
    "transposed view": lambda a, b: a.transpose(0, 2),
    "a clone that keeps its strides": lambda a, b: a.transpose(0, 2).clone().transpose(0, 2)[1],
    "cat 0": lambda a, b: torch.cat([a, b]),
    "cat of views": lambda a, b: torch.cat([a[:2, 1:3], b.transpose(1, 2).transpose(2, 1)], 1),
    "cat last": lambda a, b: torch.cat([a[:2], b, a[2:]], dim=-1),
    "a slice across a joint": lambda a, b: torch.cat([a, b])[3:5, 1:].contiguous(),
    "stack": lambda a, b: torch.stack([a[:2], b]),
    "stack last": lambda a, b: torch.stack([a[:2], b, a[2:]], dim=-1).transpose(1, 3),
    "every second row": lambda a, b: a[:, ::2].contiguous(),
    "interleave": lambda a, b: a.reshape(4, 2, 3, 5).transpose(1, 2).reshape(4, 6, 5),
    "deinterleave": lambda a, b: a.reshape(4, 3, 2, 5).transpose(1, 2).reshape(4, 6, 5),
    "there and back": lambda a, b: (
        a.reshape(4, 3, 2, 5).transpose(1, 2).reshape(4, 6, 5)
        .reshape(4, 2, 3, 5).transpose(1, 2).reshape(4, 6, 5)
    ),
    "rope": lambda a, b: a.reshape(24, 5).view(2, 6, 2, 5).transpose(1, 2).reshape(24, 5),
    "a chunk of a permutation": lambda a, b: (
        torch.cat([a, b]).reshape(6, 3, 2, 5).transpose(1, 2).reshape(36, 5).chunk(3)[1]
    ),
    "flatten": lambda a, b: a.transpose(1, 2).flatten(),
    "unflatten": lambda a, b: a.view(4, 3, 2, 5).permute(2, 0, 3, 1),
    "one element": lambda a, b: a[1, 2, 3],
    "nothing": lambda a, b: a[:0],
}  # fmt: skip

REFUSED: dict[str, tuple[Operation, str]] = {
    "arithmetic": (lambda a, b: a + 1, "aten::add does more"),
    "a cast": (lambda a, b: a.to(torch.float32), "a cast from torch.int64"),
    "bits as another type": (lambda a, b: a.view(torch.int32), "a view of torch.int64"),
    "padding": (lambda a, b: torch.cat([a, a.new_zeros(1, 6, 5)]), "aten::new_zeros does more"),
    "an index": (lambda a, b: a[:, [0, 3]], "aten::index does more"),
    "a change in place": (lambda a, b: a.clone().mul_(2), "aten::mul_ does more"),
    "a mixture of types": (lambda a, b: torch.cat([a, b.to(torch.int32)]), "a cast from"),
}


def numbered() -> tuple[Tensor, Tensor]:
    a = torch.arange(120).reshape(A)
    return a, torch.arange(1000, 1060).reshape(B)


def traced(operation: Operation) -> HubTensor:
    hollow = [torch.empty(shape, dtype=torch.int64, device="meta") for shape in (A, B)]
    trace = Trace(dict(zip("ab", hollow, strict=True)))
    with trace:
        result = operation(*hollow)
    return HubTensor(name="r", shape=tuple(result.shape), pieces=trace.pieces_of(result))


@pytest.mark.parametrize("name", FOLLOWED)
def test_elements_are_followed_to_where_they_came_from(name: str) -> None:
    wanted = FOLLOWED[name](*numbered())
    tensor = traced(FOLLOWED[name])
    flat = dict(zip("ab", (t.flatten() for t in numbered()), strict=True))
    found = torch.full(tensor.shape, -1)
    for part in tensor.slices():
        values = flat[part.source].as_strided(part.lengths, part.strides, part.offset)
        target = found.view(part.grid)[tuple(slice(*span) for span in part.box)]
        assert bool((target == -1).all()), "no element is filled twice"
        target.copy_(values)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_more_than_moving_elements_is_refused_by_name(name: str) -> None:
    operation, message = REFUSED[name]
    with pytest.raises(InvalidInputError, match=message):
        traced(operation)


def test_following_a_plain_view_gives_one_piece() -> None:
    (piece,) = traced(FOLLOWED["expert"]).pieces
    assert piece.source == "a"
    assert piece.copy.is_run
    assert piece.copy.from_offset == 2 * 30 + 15
