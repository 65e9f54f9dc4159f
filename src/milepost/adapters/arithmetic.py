"""Folding low-rank factors into weights: in fp32 (fp64 for such weights), one cast at the end.

Every kind of adapter is brought into one form, in the layout in which the weight is stored:
`multiplier * (weight + scale * left @ right)`. A part of a weight (some rows, some columns) needs
only the same rows of `left` and columns of `right`, so parts are folded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from milepost.errors import InvalidInputError


class Layout(Enum):
    """How the weight of a projection lies."""

    OUT_IN = "out-in"
    """Rows are outputs, as torch.nn.Linear has them; experts as [experts, out, in]."""
    IN_OUT = "in-out"
    """Rows are inputs: GPT-2's Conv1D, and experts as [experts, in, out]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Factors in the layout of a stored weight `[*experts, rows, columns]`, each in its own dtype.

    `left` is `[*experts, rows, r]`, `right` `[*experts, r, columns]`. With a `magnitude`, which has
    an entry for each index of the weight's last or last but one dim `magnitude_dim`, slices along
    that dim are scaled to it (DoRA).
    """

    left: Tensor
    right: Tensor
    scale: float
    magnitude: Tensor | None = None
    magnitude_dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return (*self.left.shape[:-1], self.right.shape[-1])

    def box(self, spans: Sequence[slice]) -> LowRank:
        """The factors of a box of the weight; a slice for each of its dims."""
        *experts, rows, columns = spans
        magnitude = self.magnitude
        if magnitude is not None:
            magnitude = magnitude[(rows, columns)[self.magnitude_dim]]
        return replace(
            self,
            left=self.left[(*experts, rows)],
            right=self.right[(*experts, slice(None), columns)],
            magnitude=magnitude,
        )


def linear(
    a: Tensor,
    b: Tensor,
    scale: float,
    *,
    layout: Layout = Layout.OUT_IN,
    magnitude: Tensor | None = None,
) -> LowRank:
    """Factors of a linear layer, `a` [r, in] and `b` [out, r]; `magnitude` [out]."""
    if layout is Layout.OUT_IN:
        return LowRank(left=b, right=a, scale=scale, magnitude=magnitude, magnitude_dim=0)
    return LowRank(left=a.T, right=b.T, scale=scale, magnitude=magnitude, magnitude_dim=1)


def convolution(a: Tensor, b: Tensor, scale: float) -> LowRank:
    """Factors of a convolution of one group, `a` [r, in, *kernel] and `b` [out, r, 1...], for its
    weight taken as [out, in * kernel]."""
    return LowRank(left=b.flatten(1), right=a.flatten(1), scale=scale)


def embedding(a: Tensor, b: Tensor, scale: float, *, magnitude: Tensor | None = None) -> LowRank:
    """Factors of an embedding, `a` [r, vocabulary] and `b` [dim, r]; `magnitude` [dim]."""
    return LowRank(left=a.T, right=b.T, scale=scale, magnitude=magnitude, magnitude_dim=1)


def joined_experts(a: Tensor, b: Tensor, experts: int, scale: float, layout: Layout) -> LowRank:
    """Factors of all experts in one pair, as peft has them for a parameter [experts, d1, d2].

    `a` is [experts * r, in] and counts experts slowest; `b` is [out, experts * r] and counts them
    fastest.
    """
    if a.shape[0] % experts or a.shape[0] != b.shape[1]:
        raise InvalidInputError(
            f"factors of shapes {tuple(a.shape)} and {tuple(b.shape)} do not belong to {experts} "
            "experts"
        )
    by_expert = a.reshape(experts, -1, a.shape[-1])
    outputs = b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    if layout is Layout.OUT_IN:
        return LowRank(left=outputs, right=by_expert, scale=scale)
    return LowRank(left=by_expert.transpose(1, 2), right=outputs.transpose(1, 2), scale=scale)


def grouped_experts(a: Tensor, b: Tensor, scale: float, layout: Layout) -> LowRank:
    """Factors of grouped experts in matmul convention, `a` [experts, in, r], `b` [experts, r, out];
    the weight is [experts, out, in] or, `IN_OUT`, [experts, in, out]."""
    if layout is Layout.IN_OUT:
        return LowRank(left=a, right=b, scale=scale)
    return LowRank(left=b.transpose(1, 2), right=a.transpose(1, 2), scale=scale)


def layout_of_experts(inner: int, outer: int, shape: Sequence[int], *, name: str) -> Layout:
    """How a weight [experts, d1, d2] lies whose inputs have `inner` and outputs `outer` features.

    `InvalidInputError` where the shape does not say, or says neither; `name` is the weight's.
    """
    dims = tuple(shape[-2:])
    if inner == outer and dims == (inner, outer):
        raise InvalidInputError(
            f"{name}: {tuple(shape)} is square, so its shape does not say whether inputs or "
            "outputs come first; say it (is_transposed)"
        )
    if dims == (outer, inner):
        return Layout.OUT_IN
    if dims == (inner, outer):
        return Layout.IN_OUT
    raise InvalidInputError(
        f"{name}: shape {tuple(shape)} does not belong to factors of {inner} inputs and {outer} "
        "outputs"
    )


def check_fits(low_rank: LowRank, shape: Sequence[int], *, name: str) -> None:
    """`InvalidInputError` when factors do not belong to a weight of this shape, called `name`."""
    if low_rank.left.shape[-1] != low_rank.right.shape[-2] or low_rank.shape != tuple(shape):
        raise InvalidInputError(
            f"{name}: the weight has shape {tuple(shape)}, its factors "
            f"{tuple(low_rank.left.shape)} and {tuple(low_rank.right.shape)}; they are those of "
            "another model"
        )


def squared_norms(weight: Tensor, low_rank: LowRank) -> Tensor:
    """Sums of squares of `weight + scale * left @ right` along the dim that has no magnitude, fp32.

    Those of the parts of a weight, added up, are those of the whole.
    """
    total = _added(weight, low_rank)
    return total.square().sum(dim=1 - low_rank.magnitude_dim)


def fold(
    weight: Tensor, low_rank: LowRank, squares: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """The weight with the factors folded in, in the weight's dtype; no operand is changed.

    With a magnitude, `squares` are the `squared_norms` of the whole weight for these indices; when
    they are not given, `weight` is the whole weight. The sum is made in `out` where that is given:
    of the weight's shape, fp32 (fp64 for such weights); it may be the weight itself.
    """
    total = _added(weight, low_rank, out)
    if low_rank.magnitude is not None:
        dim = low_rank.magnitude_dim
        if squares is None:
            squares = total.square().sum(dim=1 - dim)
        total.mul_((low_rank.magnitude.to(total.dtype) / squares.sqrt()).unsqueeze(1 - dim))
    return total.to(weight.dtype)


def fold_bias(bias: Tensor, of_b: Tensor, scale: float) -> Tensor:
    """A bias with that of the second factor folded in."""
    return (bias.float() + of_b.float() * scale).to(bias.dtype)


def _added(weight: Tensor, low_rank: LowRank, out: Tensor | None = None) -> Tensor:
    wide = torch.float64 if weight.dtype is torch.float64 else torch.float32
    base, left, right = (t.to(wide) for t in (weight, low_rank.left, low_rank.right))
    if base.dim() == 3:
        return torch.baddbmm(base, left, right, alpha=low_rank.scale, out=out)
    return torch.addmm(base, left, right, alpha=low_rank.scale, out=out)
