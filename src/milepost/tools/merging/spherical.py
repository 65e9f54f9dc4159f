"""Merges whose result is a weighted sum of the inputs, with weights found on a sphere.

Angles and norms need nothing but the inner products of the inputs. These are summed up first, in
fp64, part by part; then the weights are a few numbers, and one more pass adds up the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.merging.chunks import Inputs, room

COLINEAR_SLERP = 0.9995
_TINY = 1e-8
Weights = Callable[[np.ndarray], np.ndarray]


def add_up(inputs: Inputs, weights: Sequence[float]) -> Iterator[Tensor]:
    """The base + the weighted sum of the inputs (of their differences to a base)."""
    factors = [float(weight) for weight in weights]
    for rows, base in inputs.chunks():
        out = torch.mul(rows[0], factors[0], out=room("sums", rows.shape[1]))
        for row, factor in zip(rows[1:], factors[1:], strict=True):
            out.add_(row, alpha=factor)
        yield out if base is None else out.add_(base)


def by_angles(inputs: Inputs, weights: Weights) -> Iterator[Tensor]:
    """The sum with the weights that `weights` makes of the inner products `[n, n]`."""
    products = np.zeros((len(inputs.models), len(inputs.models)))
    for rows, _ in inputs.chunks():
        wide = room("wide", *rows.shape, dtype=torch.float64).copy_(rows)
        products += (wide @ wide.T).numpy()
    return add_up(inputs, weights(products).tolist())


def by_angles_of_rows(inputs: Inputs, weights: Weights) -> Iterator[Tensor]:
    """The same with weights for each row, the last dim; tensors of one dim are one row."""
    width = max(1, inputs.shape[-1] if inputs.shape else 1)
    for values, base in inputs.chunks(width):
        rows = values.view(len(inputs.models), -1, width)
        wide = rows.double()
        products = torch.einsum("irc,jrc->rij", wide, wide).numpy()
        factors = torch.from_numpy(np.stack([weights(each) for each in products])).float()
        total = torch.einsum("irc,ri->rc", rows, factors).reshape(-1)
        yield total if base is None else total.add_(base)


def slerp_weights(products: np.ndarray, t: float, colinear: float = COLINEAR_SLERP) -> np.ndarray:
    """Weights of two inputs at `t` of the arc between their directions.

    Shoemake's slerp, on the inputs as they are; a straight line where |cos| > `colinear`, and where
    an input is zero, which has no direction. (mergekit takes the angle to zero for a right one, so
    that its result is longer than the line: sin(t pi/2) of the other input instead of t.)
    """
    cosine = _cosines(products)[0, 1]
    if abs(cosine) > colinear or not np.diag(products).all():
        return np.array([1 - t, t])
    angle = math.acos(cosine)
    return np.array([math.sin((1 - t) * angle), math.sin(t * angle)]) / math.sin(angle)


def multislerp_weights(products: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Weights of any number of inputs: the mean in the tangent space of their mean direction.

    `shares` sum to 1. The result has the weighted mean of the norms. `InvalidInputError` when the
    directions cancel out.
    """
    norms = np.sqrt(np.diag(products))
    cosines = _cosines(products)
    units = np.where(norms > 0, 1 / np.maximum(norms, 1e-300), 0.0)
    centre = _unit(shares, cosines)
    if centre is None:
        if len(shares) == 2:
            return shares
        raise InvalidInputError(
            "the directions of the models cancel each other out with these weights, so they have "
            "no mean on the sphere; change the weights, or use another method"
        )
    dots = cosines @ centre
    tangent = shares - float(shares @ dots) * centre
    length = _norm(tangent, cosines)
    blend = centre * math.cos(length) + tangent * _sinc(length)
    return np.asarray(blend * units * float(shares @ norms))


def karcher_weights(
    products: np.ndarray, max_iter: int = 10, tolerance: float = 1e-5
) -> np.ndarray:
    """Weights of the Riemannian centre of mass of the directions, at the mean of the norms.

    The fixed-point iteration of Karcher (1977), on the coefficients alone: the mean stays in the
    span of the inputs. Inputs of zeros have no direction and take no part in it.
    """
    norms = np.sqrt(np.diag(products))
    there = norms > tolerance
    if not there.any():
        return np.zeros(len(norms))
    cosines = _cosines(products)
    shares = there / there.sum()
    first = np.zeros(len(norms))
    first[int(np.argmax(there))] = 1.0
    mean = _unit(shares, cosines, tolerance)
    mean = first if mean is None else mean
    for _ in range(max_iter):
        tangent = np.zeros(len(norms))
        for number in np.flatnonzero(there):
            dot = float(np.clip(mean @ cosines[:, number], -1, 1))
            angle = math.acos(dot)
            if angle < tolerance:
                continue
            away = -dot * mean
            away[number] += 1
            tangent += shares[number] * angle / math.sin(angle) * away
        length = _norm(tangent, cosines)
        if length < tolerance:
            break
        mean = math.cos(length) * mean + math.sin(length) / length * tangent
        mean = mean / max(_norm(mean, cosines), tolerance)
    return np.asarray(mean / np.where(there, norms, 1.0) * norms.mean())


def stock_weights(products: np.ndarray) -> np.ndarray:
    """Weights of differences to the base by Model Stock (Jang et al., 2024): t / n for each.

    t = n c / (1 + (n - 1) c) with the mean cosine c of all pairs; 0, which is the base, where that
    has no value.
    """
    count = len(products)
    cosines = _cosines(products, floor=1e-6)
    c = float(np.mean(cosines[np.triu_indices(count, 1)]))
    below = 1 + (count - 1) * c
    t = 0.0 if abs(below) < 1e-6 else count * c / below
    return np.full(count, t / count)


def _cosines(products: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """Cosines between all pairs; 0 with what has no length, 1 with itself."""
    norms = np.sqrt(np.diag(products))
    lengths = np.outer(norms, norms)
    cosines = np.where(lengths > 0, products / np.maximum(lengths, max(floor, 1e-300)), 0.0)
    return np.asarray(np.clip(cosines, -1, 1))


def _norm(blend: np.ndarray, cosines: np.ndarray) -> float:
    return math.sqrt(max(0.0, float(blend @ cosines @ blend)))


def _unit(shares: np.ndarray, cosines: np.ndarray, tolerance: float = _TINY) -> np.ndarray | None:
    """The weighted sum of the directions, at length 1; None when it has no length."""
    length = _norm(shares, cosines)
    return None if length < tolerance else np.asarray(shares / length)


def _sinc(angle: float) -> float:
    return 1.0 if angle < _TINY else math.sin(angle) / angle
