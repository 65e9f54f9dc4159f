"""The arithmetic of merges, tensor by tensor, against mergekit's own and against definitions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.merging import chunks, select
from milepost.tools.merging.chunks import Inputs, flat, rounded
from milepost.tools.merging.droppers import (
    Dropper,
    KeepByRank,
    KeepLargest,
    KeepMiddle,
    KeepRandom,
    sizes_of,
)
from milepost.tools.merging.select import Bits, Kept, largest
from milepost.tools.merging.sparse import (
    Consensus,
    Rescale,
    Sum,
    merge_by_variance,
    merge_differences,
)
from milepost.tools.merging.spherical import (
    add_up,
    by_angles,
    by_angles_of_rows,
    karcher_weights,
    multislerp_weights,
    slerp_weights,
    stock_weights,
)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so short that every tensor here has several."""
    monkeypatch.setattr(chunks, "CHUNK_NUMEL", 704)


def models(count: int, *shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    return [base + 0.1 * torch.randn(shape, generator=generator) for _ in range(count)]


def of(models: Sequence[Tensor], base: Tensor | None = None, key: str = "") -> Inputs:
    """Models that are in memory."""
    origin = None if base is None else flat(base)
    return Inputs([flat(model) for model in models], models[0].shape, origin, key)


def joined(pieces: Iterator[Tensor], like: Tensor) -> Tensor:
    """All that a method makes, in the shape and dtype of `like`."""
    found = [piece.clone() for piece in rounded(pieces, like.dtype)]
    return torch.cat([torch.empty(0, dtype=like.dtype), *found]).view(like.shape)


def masked(kept: Kept, bits: Bits) -> NDArray[np.bool_]:
    out = np.empty(len(bits), dtype=np.bool_)
    kept.mask(bits, out)
    return out


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_the_largest_are_those_of_a_stable_sort_whatever_the_sample(data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, 3000))
    count = data.draw(st.integers(0, numel))
    levels = data.draw(st.integers(1, 50))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    sizes = torch.randint(0, levels, (numel,), generator=generator).float() / 7
    if data.draw(st.booleans()):
        sizes = sizes.sort().values  # a sample of the beginning says nothing of the end
    bits = sizes.view(torch.int32).numpy()
    step = data.draw(st.sampled_from([70, 700]))

    def rows(every: int) -> Iterator[list[Bits]]:
        return ([bits[first : first + step : every]] for first in range(0, numel, step))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(select, "_SAMPLE_NUMEL", data.draw(st.sampled_from([1, 30, 2**15])))
        (cut,) = largest(rows, numel, [count])
    kept = Kept(cut)
    found = torch.cat([torch.from_numpy(masked(kept, each)) for (each,) in rows(1)])
    expected = torch.zeros(numel, dtype=torch.bool)
    expected[torch.argsort(sizes, descending=True, stable=True)[:count]] = True
    assert torch.equal(found, expected)


def test_numbers_that_are_none_count_as_the_largest() -> None:
    values = np.array([1.0, np.nan, -np.inf, 2.0, 0.5, -np.nan], dtype=np.float32)
    bits = sizes_of(values)
    for count, expected in ((2, [1, 5]), (3, [1, 2, 5]), (4, [1, 2, 3, 5])):
        (cut,) = largest(lambda every: iter([[bits[::every]]]), 6, [count])
        assert np.flatnonzero(masked(Kept(cut), bits)).tolist() == expected


def differing(found: Tensor, expected: Tensor) -> int:
    """Elements that differ once both are rounded to bf16, as merges are stored."""
    return int((found.bfloat16() != expected.bfloat16()).sum())


@pytest.mark.parametrize("density", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("kind", ["ties", "task_arithmetic", "breadcrumbs"])
def test_differences_are_added_up_as_by_mergekit(kind: str, density: float) -> None:
    from mergekit.merge_methods.generalized_task_arithmetic import get_mask
    from mergekit.sparsify import magnitude, magnitude_outliers

    base, *others = models(4, 40, 60)
    weights = [0.5, 0.3, -0.4]

    def sparsify(delta: Tensor) -> Tensor:
        if kind == "ties":
            return magnitude(delta, density=density)  # type: ignore[no-any-return]
        if kind == "breadcrumbs":
            return magnitude_outliers(delta, density=density, gamma=0.02)  # type: ignore[no-any-return]
        return delta

    dropper: Dropper | None = {
        "ties": KeepLargest(density),
        "task_arithmetic": None,
        "breadcrumbs": None if density == 1 else KeepMiddle(density, 0.02),
    }[kind]
    column = torch.tensor(weights)[:, None, None]
    deltas = torch.stack([sparsify(other - base) for other in others]) * column
    if kind == "ties":
        mask = get_mask(deltas, method="sum")
        divisor = (column * mask).sum(0)
        divisor[divisor == 0] = 1
        expected = base + 0.7 * (deltas * mask).sum(0) / divisor
    else:
        expected = base + 0.7 * deltas.sum(0)
    consensus = Consensus.SIGN if kind == "ties" else Consensus.ALL
    how = Sum(
        weights=weights,
        droppers=[dropper] * 3,
        consensus=consensus,
        normalise=kind == "ties",
        scale=0.7,
    )
    out = joined(merge_differences(of(others, base), how), base)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert differing(out, expected) == 0


@pytest.mark.parametrize("dropper", [KeepRandom(0.4, 7), KeepByRank(0.4, 0.2, 7)])
def test_what_is_random_depends_on_seed_model_and_tensor_alone(
    dropper: Dropper, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, *others = models(3, 64, 70)
    how = Sum(weights=[1, 1], droppers=[dropper] * 2, rescale=Rescale.L1)
    first = joined(merge_differences(of(others, base, "a"), how), base)
    monkeypatch.setattr(chunks, "CHUNK_NUMEL", 2**20)
    again = joined(merge_differences(of(others, base, "a"), how), base)
    other = joined(merge_differences(of(others, base, "b"), how), base)
    torch.testing.assert_close(first, again, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(first, other)


def kept_of(dropper: Dropper, like: Tensor, inputs: Inputs, number: int = 0) -> Tensor:
    """The mask of one of the models."""
    mask = dropper.masks(inputs, number, [])
    rows = inputs.chunks(dropper.row_numel(like.shape))
    found = []
    for values, _ in rows:
        bits = np.unpackbits(mask(values[number].numpy()), count=values.shape[1])
        found.append(torch.from_numpy(bits.view(np.bool_)))
    return torch.cat(found).view(like.shape)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("consensus", Consensus)
@pytest.mark.parametrize("dropper", [KeepRandom(0.4, 7), KeepByRank(0.4, 0.2, 7)])
def test_a_random_merge_is_that_of_mergekit_given_the_same_masks(
    dropper: Dropper, consensus: Consensus, normalise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mergekit.merge_methods.generalized_task_arithmetic import get_mask
    from mergekit.sparsify import RescaleNorm, bernoulli, della_magprune

    base, *others = (model.bfloat16().float() for model in models(4, 64, 70))
    inputs, weights = of(others, base, "a"), [0.5, 0.3, -0.4]
    masks = [kept_of(dropper, base, inputs, number) for number in range(3)]
    drawn = iter(masks)
    monkeypatch.setattr(torch, "bernoulli", lambda chances: next(drawn).float())
    deltas = []
    for other in others:
        if isinstance(dropper, KeepRandom):
            deltas.append(bernoulli(other - base, 0.4, RescaleNorm.l1))
        else:
            deltas.append(della_magprune(other - base, 0.4, 0.2, RescaleNorm.l1))
    column = torch.tensor(weights)[:, None, None]
    kept = torch.stack(deltas) * column
    agree = get_mask(kept) if consensus is Consensus.SIGN else torch.ones_like(kept)
    divisor = (column * agree).sum(0)
    divisor[divisor == 0] = 1
    expected = base + (kept * agree).sum(0) / (divisor if normalise else 1)
    how = Sum(
        weights=weights,
        droppers=[dropper] * 3,
        rescale=Rescale.L1,
        consensus=consensus,
        normalise=normalise,
    )
    out = joined(merge_differences(inputs, how), base)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert differing(out, expected) <= 2  # the L1 norm is one of fp64 here


@pytest.mark.parametrize("density", [0.02, 0.3, 0.5, 0.75, 0.999])
def test_dare_keeps_the_share_asked_for_and_its_l1_norm(density: float) -> None:
    (model,) = models(1, 400, 400)
    dropper = KeepRandom(density, 1)
    kept = kept_of(dropper, model, of([model]))
    deviation = math.sqrt(density * (1 - density) / model.numel())
    assert abs(float(kept.float().mean()) - density) < 5 * deviation
    how = Sum(weights=[1.0], droppers=[dropper], rescale=Rescale.L1)
    out = joined(merge_differences(of([model], torch.zeros_like(model)), how), model)
    assert float(out.abs().sum()) == pytest.approx(float(model.abs().sum()), rel=1e-5)
    assert torch.equal(out != 0, kept)


def test_della_keeps_the_larger_of_a_row_more_often() -> None:
    (model,) = models(1, 400, 101)
    kept = kept_of(KeepByRank(0.5, 0.3, 3), model, of([model]))
    order = model.abs().argsort(1)
    by_rank = kept.gather(1, order).float().mean(0)
    expected = 0.2 + 0.6 * torch.arange(101) / 100
    assert float((by_rank - expected).abs().max()) < 5 * math.sqrt(0.25 / 400)
    with pytest.raises(InvalidInputError, match="between 0 and 1"):
        KeepByRank(0.1, 0.2, 0)


@pytest.mark.parametrize("select_topk", [1.0, 0.4, 0.0])
def test_sce_is_that_of_mergekit(select_topk: float) -> None:
    from mergekit.merge_methods.generalized_task_arithmetic import get_mask
    from mergekit.merge_methods.sce import sce_mask, sce_weight

    base, *others = models(4, 30, 50)
    deltas = torch.stack([other - base for other in others])
    if select_topk < 1:
        deltas = deltas * sce_mask(deltas, select_topk, deltas.dtype)
    weights = sce_weight(deltas)[:, None, None] * get_mask(deltas, method="sum")
    expected = base + (deltas * weights).sum(0) / weights.sum(0).clamp(min=1e-6)
    out = joined(merge_by_variance(of(others, base), select_topk), base)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


# ---- on the sphere


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
def test_slerp_is_that_of_mergekit(t: float) -> None:
    from mergekit.merge_methods.slerp import slerp

    one, two = torch.randn(2, 40, 50, generator=torch.Generator().manual_seed(1)).unbind()
    out = joined(by_angles(of([one, two]), lambda products: slerp_weights(products, t)), one)
    expected = slerp(torch.tensor([t]), one[None], two[None])[0]
    torch.testing.assert_close(out, expected.view_as(out), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [False, True])
def test_nuslerp_is_that_of_mergekit(rows: bool) -> None:
    from mergekit.merge_methods.nuslerp import nuslerp

    one, two = torch.randn(2, 40, 50, generator=torch.Generator().manual_seed(1)).unbind()
    run = by_angles_of_rows if rows else by_angles
    pieces = run(of([one, two]), lambda products: slerp_weights(products, 0.3, 1 - 1e-12))
    out = joined(pieces, one)
    expected = nuslerp(0.3, one, two, dim=-1, flatten=not rows)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.case("V60")
@pytest.mark.parametrize("t", [0.0, 0.25, 1.0])
def test_the_way_from_and_to_zero_is_a_straight_line(t: float) -> None:
    some, none = torch.randn(3, 40), torch.zeros(3, 40)
    half = torch.cat([some[:1], none[1:]])
    for one, two in ((none, some), (some, none), (some, half), (none, none)):
        line = (1 - t) * one + t * two
        for colinear in (0.9995, 1 - 1e-12):
            inputs = of([one, two])
            if two is not half:
                out = by_angles(inputs, partial(slerp_weights, t=t, colinear=colinear))
                torch.testing.assert_close(joined(out, one), line)
            rows = by_angles_of_rows(inputs, partial(slerp_weights, t=t, colinear=colinear))
            torch.testing.assert_close(joined(rows, one), line)


def test_the_karcher_mean_is_that_of_mergekit() -> None:
    from mergekit.merge_methods.karcher import karcher_merge_tensors

    inputs = models(4, 40, 50)
    out = joined(by_angles(of(inputs), karcher_weights), inputs[0])
    expected = karcher_merge_tensors(inputs, [0.25] * 4, max_iter=10, tol=1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_model_stock_is_that_of_mergekit() -> None:
    base, *others = models(4, 30, 20)
    out = joined(by_angles(of(others, base), stock_weights), base)
    flat = [(other - base).flatten().double() for other in others]
    cosines = [
        float(torch.nn.functional.cosine_similarity(flat[i], flat[j], dim=0))
        for i, j in ((0, 1), (0, 2), (1, 2))
    ]
    c = sum(cosines) / 3
    t = 3 * c / (1 + 2 * c)
    expected = t * sum(others, torch.zeros(30, 20)) / 3 + (1 - t) * base
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_the_mean_of_two_on_the_sphere_is_their_slerp_when_they_are_of_one_length() -> None:
    one, two = torch.randn(2, 900, generator=torch.Generator().manual_seed(1)).unbind()
    two = two * one.norm() / two.norm()
    shares = np.array([0.5, 0.5])
    pair = of([one, two])
    out = joined(by_angles(pair, lambda products: multislerp_weights(products, shares)), one)
    arc = joined(by_angles(pair, lambda products: slerp_weights(products, 0.5)), one)
    torch.testing.assert_close(out, arc, rtol=1e-4, atol=1e-5)


def test_directions_that_cancel_out_are_refused() -> None:
    one = torch.randn(900, generator=torch.Generator().manual_seed(1))
    shares = np.array([1 / 3, 1 / 3, 1 / 3])
    parallel = of([one, -one, torch.zeros(900)])
    with pytest.raises(InvalidInputError, match="cancel"):
        by_angles(parallel, lambda products: multislerp_weights(products, shares))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weighted_sum_is_rounded_once(dtype: torch.dtype) -> None:
    inputs = [model.to(dtype) for model in models(3, 50, 50)]
    out = joined(add_up(of(inputs), [0.5, 0.25, 0.25]), inputs[0])
    in_fp32 = sum((m.float() * w for m, w in zip(inputs, [0.5, 0.25, 0.25], strict=True)), zero())
    assert torch.equal(out, in_fp32.to(dtype))


def zero() -> Tensor:
    return torch.zeros(())


def test_empty_and_scalar_tensors_merge() -> None:
    for shape in ((), (0, 4)):
        base, *others = models(3, *shape)
        for dropper in (KeepLargest(0.5), KeepRandom(0.5, 0), KeepByRank(0.5, 0.2, 0)):
            how = Sum(weights=[1, 1], droppers=[dropper] * 2, rescale=Rescale.L1)
            out = joined(merge_differences(of(others, base), how), base)
            assert out.isfinite().all()
        by_row = by_angles_of_rows(of(others), lambda products: slerp_weights(products, 0.5))
        assert joined(by_row, base).isfinite().all()
