"""The arithmetic of merges, tensor by tensor, against mergekit's own and against definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.merging import chunks
from milepost.tools.merging.chunks import Inputs
from milepost.tools.merging.select import Kept, largest
from milepost.tools.merging.sparse import (
    Consensus,
    Dropper,
    Rescale,
    Sum,
    keep_by_rank,
    keep_largest,
    keep_middle,
    keep_random,
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
    monkeypatch.setattr(chunks, "CHUNK_NUMEL", 700)


def models(count: int, *shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(shape, generator=generator)
    return [base + 0.1 * torch.randn(shape, generator=generator) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_largest_are_those_of_a_stable_sort(data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, 3000))
    count = data.draw(st.integers(1, numel))
    levels = data.draw(st.integers(1, 50))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    sizes = torch.randint(0, levels, (numel,), generator=generator).float() / 7
    kept = Kept(largest(lambda part: sizes[part], numel, count))
    found = torch.cat([kept.mask(sizes[part]) for part in chunks.parts_of(numel)])
    expected = torch.zeros(numel, dtype=torch.bool)
    expected[torch.argsort(sizes, descending=True, stable=True)[:count]] = True
    assert torch.equal(found, expected)


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

    dropper: Dropper = {
        "ties": keep_largest(density),
        "task_arithmetic": keep_largest(1.0),
        "breadcrumbs": keep_middle(density, 0.02),
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
    out = torch.empty(40, 60)
    consensus = Consensus.SIGN if kind == "ties" else Consensus.ALL
    how = Sum(
        weights=weights,
        droppers=[dropper] * 3,
        consensus=consensus,
        normalise=kind == "ties",
        scale=0.7,
    )
    merge_differences(Inputs(others, base), how, out)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert differing(out, expected) <= 2


@pytest.mark.parametrize("dropper", [keep_random(0.4, 7), keep_by_rank(0.4, 0.2, 7)])
def test_what_is_random_depends_on_seed_model_and_tensor_alone(
    dropper: Dropper, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, *others = models(3, 64, 70)
    how = Sum(weights=[1, 1], droppers=[dropper] * 2, rescale=Rescale.L1)
    first, again, other = torch.empty(3, 64, 70).unbind()
    merge_differences(Inputs(others, base, "a"), how, first)
    monkeypatch.setattr(chunks, "CHUNK_NUMEL", 2**20)
    merge_differences(Inputs(others, base, "a"), how, again)
    merge_differences(Inputs(others, base, "b"), how, other)
    torch.testing.assert_close(first, again, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(first, other)


def kept_of(dropper: Dropper, model: Tensor) -> Tensor:
    inputs = Inputs([model], torch.zeros_like(model))
    return torch.cat([mask for _, _, mask in dropper(inputs, 0)]).view(model.shape)


def test_dare_keeps_the_share_asked_for_and_its_l1_norm() -> None:
    (model,) = models(1, 200, 200)
    kept = kept_of(keep_random(0.3, 1), model)
    assert abs(float(kept.float().mean()) - 0.3) < 5 * math.sqrt(0.3 * 0.7 / model.numel())
    out = torch.empty_like(model)
    how = Sum(weights=[1.0], droppers=[keep_random(0.3, 1)], rescale=Rescale.L1)
    merge_differences(Inputs([model], torch.zeros_like(model)), how, out)
    assert float(out.abs().sum()) == pytest.approx(float(model.abs().sum()), rel=1e-5)
    assert torch.equal(out != 0, kept)


def test_della_keeps_the_larger_of_a_row_more_often() -> None:
    (model,) = models(1, 400, 101)
    kept = kept_of(keep_by_rank(0.5, 0.3, 3), model)
    order = model.abs().argsort(1)
    by_rank = kept.gather(1, order).float().mean(0)
    expected = 0.2 + 0.6 * torch.arange(101) / 100
    assert float((by_rank - expected).abs().max()) < 5 * math.sqrt(0.25 / 400)
    with pytest.raises(InvalidInputError, match="between 0 and 1"):
        keep_by_rank(0.1, 0.2, 0)


@pytest.mark.parametrize("select", [1.0, 0.4, 0.0])
def test_sce_is_that_of_mergekit(select: float) -> None:
    from mergekit.merge_methods.generalized_task_arithmetic import get_mask
    from mergekit.merge_methods.sce import sce_mask, sce_weight

    base, *others = models(4, 30, 50)
    deltas = torch.stack([other - base for other in others])
    if select < 1:
        deltas = deltas * sce_mask(deltas, select, deltas.dtype)
    weights = sce_weight(deltas)[:, None, None] * get_mask(deltas, method="sum")
    expected = base + (deltas * weights).sum(0) / weights.sum(0).clamp(min=1e-6)
    out = torch.empty(30, 50)
    merge_by_variance(Inputs(others, base), select, out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


# ---- on the sphere


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
def test_slerp_is_that_of_mergekit(t: float) -> None:
    from mergekit.merge_methods.slerp import slerp

    one, two = torch.randn(2, 40, 50, generator=torch.Generator().manual_seed(1)).unbind()
    out = torch.empty_like(one)
    by_angles(Inputs([one, two]), out, lambda products: slerp_weights(products, t))
    expected = slerp(torch.tensor([t]), one[None], two[None])[0]
    torch.testing.assert_close(out, expected.view_as(out), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [False, True])
def test_nuslerp_is_that_of_mergekit(rows: bool) -> None:
    from mergekit.merge_methods.nuslerp import nuslerp

    one, two = torch.randn(2, 40, 50, generator=torch.Generator().manual_seed(1)).unbind()
    out = torch.empty_like(one)
    run = by_angles_of_rows if rows else by_angles
    run(Inputs([one, two]), out, lambda products: slerp_weights(products, 0.3, 1 - 1e-12))
    expected = nuslerp(0.3, one, two, dim=-1, flatten=not rows)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_the_karcher_mean_is_that_of_mergekit() -> None:
    from mergekit.merge_methods.karcher import karcher_merge_tensors

    inputs = models(4, 40, 50)
    out = torch.empty(40, 50)
    by_angles(Inputs(inputs), out, karcher_weights)
    expected = karcher_merge_tensors(inputs, [0.25] * 4, max_iter=10, tol=1e-5)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_model_stock_is_that_of_mergekit() -> None:
    base, *others = models(4, 30, 20)
    out = torch.empty(30, 20)
    by_angles(Inputs(others, base), out, stock_weights)
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
    out, arc = torch.empty(2, 900).unbind()
    shares = np.array([0.5, 0.5])
    by_angles(Inputs([one, two]), out, lambda products: multislerp_weights(products, shares))
    by_angles(Inputs([one, two]), arc, lambda products: slerp_weights(products, 0.5))
    torch.testing.assert_close(out, arc, rtol=1e-4, atol=1e-5)


def test_directions_that_cancel_out_are_refused() -> None:
    one = torch.randn(900, generator=torch.Generator().manual_seed(1))
    shares = np.array([1 / 3, 1 / 3, 1 / 3])
    parallel = Inputs([one, -one, torch.zeros(900)])
    with pytest.raises(InvalidInputError, match="cancel"):
        by_angles(parallel, torch.empty(900), lambda p: multislerp_weights(p, shares))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weighted_sum_is_rounded_once(dtype: torch.dtype) -> None:
    inputs = [model.to(dtype) for model in models(3, 50, 50)]
    out = torch.empty(50, 50, dtype=dtype)
    add_up(Inputs(inputs), [0.5, 0.25, 0.25], out)
    in_fp32 = sum((m.float() * w for m, w in zip(inputs, [0.5, 0.25, 0.25], strict=True)), zero())
    assert torch.equal(out, in_fp32.to(dtype))


def zero() -> Tensor:
    return torch.zeros(())


def test_empty_and_scalar_tensors_merge() -> None:
    for shape in ((), (0, 4)):
        base, *others = models(3, *shape)
        out = torch.empty(shape)
        how = Sum(weights=[1, 1], droppers=[keep_largest(0.5)] * 2)
        merge_differences(Inputs(others, base), how, out)
        by_angles_of_rows(Inputs(others), out, lambda products: slerp_weights(products, 0.5))
        assert out.shape == torch.Size(shape)
