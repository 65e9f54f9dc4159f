"""Merges of differences to a base, of which some elements are dropped before they are added up.

Task arithmetic (Ilharco et al., 2022), TIES (Yadav et al., 2023), DARE (Yu et al., 2023), DELLA
(Deep et al., 2024), breadcrumbs (Davari and Belilovsky, 2023), SCE (Wan et al., 2024). What is
random is drawn for every tensor and model from a seed of its own, so that a merge can be repeated
and does not depend on the order of tensors, threads or memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.merging.chunks import Inputs, parts_of, put
from milepost.tools.merging.select import Kept, largest

_NO_LENGTH = 1e-7


class Consensus(Enum):
    """Which differences are added up."""

    ALL = "all"
    SIGN = "sign"
    """Those that have the sign of the weighted sum (TIES)."""


class Rescale(Enum):
    """Whether what is kept is scaled to the L1 norm that the tensor had."""

    NO = "no"
    L1 = "l1"


class Dropper(Protocol):
    """Gives the masks of what is kept of one model's differences, part after part."""

    def __call__(self, inputs: Inputs, number: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(part, differences, mask) for every part, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sum:
    """How the differences are added up: `base + scale * sum(w d) [/ sum(w)]`."""

    weights: Sequence[float]
    droppers: Sequence[Dropper]
    rescale: Rescale = Rescale.NO
    consensus: Consensus = Consensus.ALL
    normalise: bool = False
    scale: float = 1.0


def merge_differences(inputs: Inputs, how: Sum, out: Tensor) -> None:
    """Fill `out` with the base and the sum of the differences to it."""
    kept_of = [_Kept(inputs, n, dropper, how.rescale) for n, dropper in enumerate(how.droppers)]
    weights = torch.tensor(list(how.weights), dtype=torch.float32)[:, None]
    for pieces in zip(*(each.parts() for each in kept_of), strict=True):
        part = pieces[0][0]
        kept = torch.stack([differences for _, differences in pieces]).mul_(weights)
        divisor: Tensor = weights.sum(0)
        if how.consensus is Consensus.SIGN:
            agree = _agreement(kept)
            kept, divisor = kept * agree, (weights * agree).sum(0)
            divisor[divisor == 0] = 1
        elif abs(float(divisor)) < 1e-8:
            divisor = torch.ones(1)
        total = kept.sum(0)
        if how.normalise:
            total /= divisor
        put(out, part, total.mul_(how.scale).add_(inputs.origin(part)))


def _agreement(kept: Tensor) -> Tensor:
    """Which elements have the sign of the sum; a sum of 0 counts as positive."""
    majority = torch.where(kept.sum(0) >= 0, 1.0, -1.0)
    return kept.sign() == majority


class _Kept:
    """What is kept of one model's differences, rescaled.

    The factor is known only once all masks are; they stay in memory meanwhile, a byte an element.
    """

    def __init__(self, inputs: Inputs, number: int, dropper: Dropper, rescale: Rescale) -> None:
        self._inputs, self._number, self._dropper = inputs, number, dropper
        self._factor = 1.0
        self._masks: list[Tensor] = []
        if rescale is Rescale.L1 and dropper is not keep_all:
            self._measure()

    def _measure(self) -> None:
        before = after = 0.0
        for _, differences, mask in self._dropper(self._inputs, self._number):
            sizes = differences.abs_()
            before += float(sizes.sum(dtype=torch.float64))
            after += float(sizes.mul_(mask).sum(dtype=torch.float64))
            self._masks.append(mask)
        if before >= _NO_LENGTH and after >= _NO_LENGTH:
            self._factor = before / after

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """(part, differences with zeros for what was dropped) for every part, in order."""
        if not self._masks:
            for part, differences, mask in self._dropper(self._inputs, self._number):
                yield part, differences.mul_(mask)
            return
        start = 0
        for mask in self._masks:
            part = slice(start, start + len(mask))
            start = part.stop
            yield part, self._inputs.value(self._number, part).mul_(mask).mul_(self._factor)


# ---- what is kept


def keep_all(inputs: Inputs, number: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Everything."""
    for part in parts_of(inputs.numel):
        yield part, inputs.value(number, part), torch.ones(1)


def keep_largest(density: float) -> Dropper:
    """The `max(1, floor(density n))` largest by magnitude (TIES)."""
    if density >= 1:
        return keep_all

    def drop(inputs: Inputs, number: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        if not inputs.numel:
            return
        count = max(1, int(density * inputs.numel))
        kept = Kept(largest(_sizes(inputs, number), inputs.numel, count))
        for part in parts_of(inputs.numel):
            differences = inputs.value(number, part)
            yield part, differences, kept.mask(differences.abs())

    return drop


def keep_middle(density: float, gamma: float) -> Dropper:
    """All but the `floor(gamma n)` largest and the smallest, so that `floor(density n)` remain.

    (Breadcrumbs.) Fewer of the largest are dropped when there would not be enough left.
    """
    if density >= 1:
        return keep_all

    def drop(inputs: Inputs, number: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        numel, sizes = inputs.numel, _sizes(inputs, number)
        wanted = int(density * numel)
        top = numel - wanted - max(0, numel - wanted - int(gamma * numel))
        inner = Kept(largest(sizes, numel, top)) if top else None
        outer = Kept(largest(sizes, numel, top + wanted)) if top + wanted else None
        for part in parts_of(numel):
            differences = inputs.value(number, part)
            size = differences.abs()
            mask = torch.zeros_like(size, dtype=torch.bool) if outer is None else outer.mask(size)
            if inner is not None:
                mask &= ~inner.mask(size)
            yield part, differences, mask

    return drop


def keep_random(density: float, seed: int) -> Dropper:
    """Each with probability `density` (DARE)."""
    if density >= 1:
        return keep_all

    def drop(inputs: Inputs, number: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        generator = _generator(seed, inputs.key, number)
        for part in parts_of(inputs.numel):
            differences = inputs.value(number, part)
            yield part, differences, torch.rand(len(differences), generator=generator) < density

    return drop


def keep_by_rank(density: float, epsilon: float, seed: int) -> Dropper:
    """Each with a probability from `density - epsilon` for the smallest of its row to
    `density + epsilon` for the largest (DELLA)."""
    if density >= 1:
        return keep_all
    if density + epsilon >= 1 or density - epsilon <= 0:
        raise InvalidInputError(
            f"density {density} with epsilon {epsilon}: expected both density - epsilon and "
            "density + epsilon between 0 and 1"
        )

    def drop(inputs: Inputs, number: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        generator = _generator(seed, inputs.key, number)
        width = inputs.shape[1:].numel() if len(inputs.shape) > 1 else inputs.numel
        for part in parts_of(inputs.numel, max(1, width)):
            differences = inputs.value(number, part)
            ranks = _ranks(differences.abs().view(-1, width)).reshape(-1)
            chance = density - epsilon + 2 * epsilon * ranks / max(1, width - 1)
            draws = torch.rand(len(differences), generator=generator)
            yield part, differences, draws < chance

    return drop


def _ranks(sizes: Tensor) -> Tensor:
    """Position of every element in its row when that is sorted upwards, from 0, fp32.

    Size and column are sorted as one number, which is several times faster than sorting columns by
    size.
    """
    columns = np.arange(sizes.shape[1], dtype=np.uint64)
    keys = sizes.contiguous().view(torch.int32).numpy().astype(np.uint64) << np.uint64(32)
    keys |= columns
    keys.sort(axis=1)
    order = (keys & np.uint64(2**32 - 1)).astype(np.int64)
    ranks = np.empty(sizes.shape, dtype=np.float32)
    np.put_along_axis(ranks, order, columns.astype(np.float32)[None, :], axis=1)
    return torch.from_numpy(ranks)


def _sizes(inputs: Inputs, number: int) -> Callable[[slice], Tensor]:
    return lambda part: inputs.value(number, part).abs()


def _generator(seed: int, key: str, number: int) -> torch.Generator:
    mixed = xxhash.xxh64_intdigest(f"{seed}/{number}/{key}".encode()) >> 1
    return torch.Generator().manual_seed(mixed)


# ---- SCE


def merge_by_variance(inputs: Inputs, select_topk: float, out: Tensor) -> None:
    """SCE: keep the elements that differ most between the models, weigh models by the mean square
    of what they keep, drop what has not the sign of the sum, and average."""
    numel, count = inputs.numel, len(inputs.models)

    def variance(part: slice) -> Tensor:
        return torch.stack(inputs.values(part)).var(0, unbiased=False)

    kept: Callable[[], Callable[[slice], Tensor]]
    if select_topk >= 1:
        kept = _everywhere
    else:
        nonzero = sum(int(variance(part).count_nonzero()) for part in parts_of(numel))
        wanted = int(nonzero * select_topk)
        cut = largest(variance, numel, wanted) if wanted else None

        def kept() -> Callable[[slice], Tensor]:
            if cut is None:
                return lambda part: torch.zeros(1)
            masks = Kept(cut)
            return lambda part: masks.mask(variance(part))

    squares = torch.zeros(count, dtype=torch.float64)
    mask = kept()
    for part in parts_of(numel):
        chosen = torch.stack(inputs.values(part)) * mask(part)
        squares += chosen.double().square().sum(1)
    mean = squares / max(1, numel)
    total = float(mean.sum())
    shares = torch.full_like(mean, 1 / count) if total < 1e-6 else mean / total
    mask = kept()
    for part in parts_of(numel):
        chosen = torch.stack(inputs.values(part)) * mask(part)
        weights = shares.float()[:, None] * _agreement(chosen)
        merged = (chosen * weights).sum(0) / weights.sum(0).clamp(min=1e-6)
        put(out, part, merged.add_(inputs.origin(part)))


def _everywhere() -> Callable[[slice], Tensor]:
    return lambda part: torch.ones(1)
