"""Merges of differences to a base, of which some elements are dropped before they are added up.

Task arithmetic (Ilharco et al., 2022), TIES (Yadav et al., 2023), DARE (Yu et al., 2023), DELLA
(Deep et al., 2024), breadcrumbs (Davari and Belilovsky, 2023), SCE (Wan et al., 2024).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from milepost.tools.merging.chunks import Inputs, added, room
from milepost.tools.merging.droppers import Dropper, Mask, Packed, keep_all, sizes_of
from milepost.tools.merging.select import Bits, Cut, Kept, largest

_NO_LENGTH = 1e-7
_SIGN = -(2**31)
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32)
"""The bits of every byte, `[256, 8]`."""


class Consensus(Enum):
    """Which differences are added up."""

    ALL = "all"
    SIGN = "sign"
    """Those that have the sign of the weighted sum (TIES)."""


class Rescale(Enum):
    """Whether what is kept is scaled to the L1 norm that the tensor had."""

    NO = "no"
    L1 = "l1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """How the differences are added up: `base + scale * sum(w d) [/ sum(w)]`.

    A model whose dropper is None keeps all of them.
    """

    weights: Sequence[float]
    droppers: Sequence[Dropper | None]
    rescale: Rescale = Rescale.NO
    consensus: Consensus = Consensus.ALL
    normalise: bool = False
    scale: float = 1.0


def merge_differences(inputs: Inputs, how: Sum) -> Iterator[Tensor]:
    """The base and the sum of the differences to it, chunk by chunk."""
    kept = _Kept(inputs, how)
    weights = torch.tensor(list(how.weights), dtype=torch.float32)[:, None]
    divisor = float(weights.sum())
    for rows, origin in inputs.chunks(kept.multiple):
        assert origin is not None, "differences are to a base"
        kept.weigh(rows, weights)
        out, signs, divisors = room("sums", 3, rows.shape[1])
        if how.consensus is Consensus.SIGN:
            _flip_to_majority(rows, signs)
            added(rows, out)
            if how.normalise:
                out.div_(_divisors(rows, weights, divisors))
            _flip(out, signs)
        else:
            added(rows, out)
            if how.normalise and abs(divisor) >= 1e-8:
                out.div_(divisor)
        if how.scale != 1:
            out.mul_(how.scale)
        yield out.add_(origin)


def _flip_to_majority(rows: Tensor, signs: Tensor) -> None:
    """Change all signs so that the sum of each column of `rows` `[n, elements]` is positive, and
    zero what is still negative. A sum of 0 is positive as it is. `signs` becomes what was flipped.
    """
    added(rows, signs).view(torch.int32).bitwise_and_(_SIGN)
    _flip(rows, signs)
    rows.clamp_(min=0)


def _flip(values: Tensor, signs: Tensor) -> None:
    values.view(torch.int32).bitwise_xor_(signs.view(torch.int32))


def _divisors(rows: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """The sum of the `weights` `[n, 1]` of those `rows` that are not 0; 1 where it is 0.

    In `out`; `rows` `[n, elements]`, which are not negative, are used up.
    """
    added(rows.sign_().mul_(weights), out)
    return out.add_(rows[0].copy_(out == 0))


class _Kept:
    """What is kept of the differences of every model, and by which factor it is scaled.

    The factors are known only once all masks are; these stay in memory meanwhile, a bit an element.
    Kept elements are multiplied by factor and weight in one go, by way of a table for each model.
    """

    def __init__(self, inputs: Inputs, how: Sum) -> None:
        self._inputs, self._droppers = inputs, how.droppers
        chosen = [dropper for dropper in how.droppers if dropper is not None]
        self.multiple = max([1, *(dropper.row_numel(inputs.shape) for dropper in chosen)])
        self._tables = [_BITS * np.float32(weight) for weight in how.weights]
        self._masks = self._begin(_cuts(inputs, how.droppers)) if chosen else []
        self._measured: Iterator[list[Packed]] | None = None
        if how.rescale is Rescale.L1 and chosen:
            self._measure()

    def _begin(self, cuts: Sequence[Sequence[Cut]]) -> list[Mask]:
        return [
            keep_all if dropper is None else dropper.masks(self._inputs, number, cuts[number])
            for number, dropper in enumerate(self._droppers)
        ]

    def weigh(self, rows: Tensor, weights: Tensor) -> None:
        """Zero in the next chunk what is dropped; multiply the rest by `weights` `[n, 1]`, and by
        the factors."""
        if not self._masks:
            rows.mul_(weights)
            return
        masks = self._find(rows) if self._measured is None else next(self._measured)
        rows.mul_(_multipliers(self._tables, masks, rows))

    def _find(self, rows: Tensor) -> list[Packed]:
        """The masks of the next chunk."""
        return [find(row) for find, row in zip(self._masks, rows.numpy(), strict=True)]

    def _measure(self) -> None:
        """Go over all differences once, for their L1 norms and those of what is kept."""
        before, after = torch.zeros(2, len(self._droppers), dtype=torch.float64).unbind()
        ones, found = [_BITS] * len(self._masks), []
        for rows, _ in self._inputs.chunks(self.multiple):
            found.append(self._find(rows))
            before += rows.abs_().sum(1)
            after += rows.mul_(_multipliers(ones, found[-1], rows)).sum(1)
        self._measured = iter(found)
        has_length = (before >= _NO_LENGTH) & (after >= _NO_LENGTH)
        factors = torch.where(has_length, before / after, 1.0).float().numpy()
        self._tables = [t * factor for t, factor in zip(self._tables, factors, strict=True)]


def _multipliers(
    tables: Sequence[NDArray[np.float32]], masks: Sequence[Packed], rows: Tensor
) -> Tensor:
    """What masks multiply `rows` `[n, elements]` by: an entry of the model's table for 8 bits."""
    out = room("multipliers", len(rows), len(masks[0]), 8).numpy()
    for table, mask, row in zip(tables, masks, out, strict=True):
        np.take(table, mask, axis=0, out=row, mode="wrap")  # unlike "raise", right into it
    return torch.from_numpy(out).flatten(1)[:, : rows.shape[1]]


def _cuts(inputs: Inputs, droppers: Sequence[Dropper | None]) -> list[list[Cut]]:
    """The cuts that each of the droppers asks for."""
    counts = [[] if d is None else list(d.counts(inputs.numel)) for d in droppers]
    numbers = [number for number, each in enumerate(counts) for _ in each]
    found: list[list[Cut]] = [[] for _ in droppers]
    if not numbers:
        return found

    def sizes(every: int) -> Iterator[list[Bits]]:
        for rows, _ in inputs.chunks(every=every):
            values = rows.numpy()
            bits = sizes_of(values, values.view(np.int32))
            yield [bits[number] for number in numbers]

    wanted = [count for each in counts for count in each]
    for number, cut in zip(numbers, largest(sizes, inputs.numel, wanted), strict=True):
        found[number].append(cut)
    return found


# ---- SCE


def merge_by_variance(inputs: Inputs, select_topk: float) -> Iterator[Tensor]:
    """SCE: keep the elements that differ most between the models, weigh models by the mean square
    of what they keep, drop what has not the sign of the sum, and average."""
    count = len(inputs.models)
    cut = None if select_topk >= 1 else _most_varying(inputs, select_topk)
    squares = torch.zeros(count, dtype=torch.float64)
    for rows, _ in _chosen(inputs, cut):
        squares += rows.double().square().sum(1)
    mean = squares / max(1, inputs.numel)
    total = float(mean.sum())
    shares = torch.full_like(mean, 1 / count) if total < 1e-6 else mean / total
    weights = shares.float()[:, None]
    for rows, origin in _chosen(inputs, cut):
        (signs,) = room("sums", 1, rows.shape[1])
        _flip_to_majority(rows, signs)
        divisor = (rows.sign() * weights).sum(0).clamp_(min=1e-6)
        out = rows.mul_(weights).sum(0).div_(divisor)
        _flip(out, signs)
        yield out.add_(origin)


def _most_varying(inputs: Inputs, share: float) -> Cut:
    """The cut that keeps this share of the elements that are not the same in all models."""

    def sizes(every: int) -> Iterator[list[Bits]]:
        for rows, _ in inputs.chunks(every=every):
            yield [_variance(rows)]

    varying = sum(int(np.count_nonzero(bits)) for (bits,) in sizes(1))
    (cut,) = largest(sizes, inputs.numel, [int(varying * share)])
    return cut


def _variance(rows: Tensor) -> Bits:
    variance = rows.var(0, unbiased=False).numpy()
    return sizes_of(variance, variance.view(np.int32))


def _chosen(inputs: Inputs, cut: Cut | None) -> Iterator[tuple[Tensor, Tensor]]:
    """The differences, zero where the models vary less than `cut` says, and the base."""
    kept = None if cut is None else Kept(cut)
    for chunk in inputs.chunks():
        if kept is not None:
            mask = np.empty(chunk.values.shape[1], dtype=np.bool_)
            kept.mask(_variance(chunk.values), mask)
            chunk.values.mul_(torch.from_numpy(mask))
        yield chunk.values, chunk.origin
