"""The methods of `merge-models`: what each takes, and what it does to one tensor of every model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from milepost.errors import InvalidInputError
from milepost.tools.merging.chunks import Inputs, room
from milepost.tools.merging.droppers import (
    Dropper,
    KeepByRank,
    KeepLargest,
    KeepMiddle,
    KeepRandom,
)
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

_NO_WEIGHT = 1e-8


class Base(Enum):
    """Whether a method works on differences to a base model."""

    REQUIRED = "required"
    OPTIONAL = "optional"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A knob: its default, and the values that make sense, `least` to `most`.

    One that is `each` has a value for every model. A `flag` is 0 or 1.
    """

    default: float
    least: float = -math.inf
    most: float = math.inf
    each: bool = False
    flag: bool = False

    def check(self, name: str, value: float) -> None:
        """`InvalidInputError` for a value outside, or that is no number."""
        if not math.isfinite(value) or not self.least <= value <= self.most:
            raise InvalidInputError(
                f"{name}={value}: expected a finite number from {self.least:g} to {self.most:g}"
            )


@dataclass(frozen=True, slots=True)
class Values:
    """The knobs of one tensor: those of every model, and shared ones."""

    each: Mapping[str, Sequence[float]]
    shared: Mapping[str, float]
    seed: int = 0

    def __getitem__(self, name: str) -> float:
        return self.shared[name]

    def is_on(self, name: str) -> bool:
        return self.shared[name] != 0


Run = Callable[[Inputs, Values], Iterator[Tensor]]
"""The merged elements in order, fp32, in flat pieces; each is gone with the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """`least` and `most` count models without the base. One that `picks` elements keeps in memory
    which, and one that works `by_row` needs a row, whatever its length, at a time."""

    base: Base
    run: Run
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    least: int = 1
    most: int | None = None
    picks: bool = False
    by_row: bool = False


def _shares(values: Values) -> np.ndarray:
    weights = np.asarray(values.each["weight"], dtype=np.float64)
    total = weights.sum()
    if abs(total) < _NO_WEIGHT:
        raise InvalidInputError("the weights add up to 0; change them")
    return np.asarray(weights / total)


def _linear(inputs: Inputs, values: Values) -> Iterator[Tensor]:
    weights = torch.tensor(list(values.each["weight"]))
    total = float(weights.sum())
    is_mean = values.is_on("normalize") and abs(total) >= _NO_WEIGHT
    for rows, _ in inputs.chunks():
        out = torch.mul(rows[0], weights[0], out=room("sums", rows.shape[1]))
        for row, weight in zip(rows[1:], weights[1:], strict=True):
            out.addcmul_(row, weight)
        yield out.div_(total) if is_mean else out


def _slerp(inputs: Inputs, values: Values) -> Iterator[Tensor]:
    if len(inputs.models) == 2:
        return by_angles(inputs, lambda products: slerp_weights(products, values["t"]))
    return _multislerp(inputs, values)


def _multislerp(inputs: Inputs, values: Values) -> Iterator[Tensor]:
    shares = _shares(values)
    return by_angles(inputs, lambda products: multislerp_weights(products, shares))


def _nuslerp(inputs: Inputs, values: Values) -> Iterator[Tensor]:
    first, second = values.each["weight"]
    total = first + second
    t = 0.5 if abs(total) < 1e-6 else second / total

    def weights(products: np.ndarray) -> np.ndarray:
        return slerp_weights(products, t, colinear=1 - 1e-12)

    run = by_angles if values.is_on("nuslerp_flatten") else by_angles_of_rows
    return run(inputs, weights)


def _karcher(inputs: Inputs, values: Values) -> Iterator[Tensor]:
    rounds, tolerance = int(values["max_iter"]), values["tol"]
    return by_angles(inputs, lambda products: karcher_weights(products, rounds, tolerance))


def _stock(inputs: Inputs, values: Values) -> Iterator[Tensor]:
    run = by_angles_of_rows if values.is_on("filter_wise") else by_angles
    return run(inputs, stock_weights)


def _sce(inputs: Inputs, values: Values) -> Iterator[Tensor]:
    return merge_by_variance(inputs, values["select_topk"])


def _passthrough(inputs: Inputs, values: Values) -> Iterator[Tensor]:
    return add_up(inputs, [values.each["scale"][0]])


Choose = Callable[[Values, int], Dropper]


def _differences(choose: Choose | None, consensus: Consensus = Consensus.ALL) -> Run:
    def dropper(values: Values, number: int) -> Dropper | None:
        if choose is None or values.each["density"][number] >= 1:
            return None
        return choose(values, number)

    def run(inputs: Inputs, values: Values) -> Iterator[Tensor]:
        rescaled = "rescale" in values.shared and values.is_on("rescale")
        how = Sum(
            weights=values.each["weight"],
            droppers=[dropper(values, number) for number in range(len(inputs.models))],
            rescale=Rescale.L1 if rescaled else Rescale.NO,
            consensus=consensus,
            normalise=values.is_on("normalize"),
            scale=values["lambda"],
        )
        return merge_differences(inputs, how)

    return run


def _ties(values: Values, number: int) -> Dropper:
    return KeepLargest(values.each["density"][number])


def _dare(values: Values, number: int) -> Dropper:
    return KeepRandom(values.each["density"][number], values.seed)


def _della(values: Values, number: int) -> Dropper:
    return KeepByRank(values.each["density"][number], values.each["epsilon"][number], values.seed)


def _breadcrumbs(values: Values, number: int) -> Dropper:
    return KeepMiddle(values.each["density"][number], values.each["gamma"][number])


_WEIGHT = Parameter(default=1.0, each=True)
_DENSITY = Parameter(default=1.0, least=0.0, most=1.0, each=True)


def _flag(default: bool) -> Parameter:
    return Parameter(default=float(default), least=0, most=1, flag=True)


def _sums(*, normalize: bool, **more: Parameter) -> dict[str, Parameter]:
    return {
        "weight": _WEIGHT,
        "lambda": Parameter(default=1.0),
        "normalize": _flag(normalize),
        **more,
    }


def _drops(*, normalize: bool, rescale: bool, **more: Parameter) -> dict[str, Parameter]:
    return _sums(normalize=normalize, density=_DENSITY, rescale=_flag(rescale), **more)


_EPSILON = Parameter(default=0.15, least=0.0, most=0.5, each=True)
_GAMMA = Parameter(default=0.01, least=0.0, most=1.0, each=True)


def _sparse(run: Run, parameters: Mapping[str, Parameter]) -> Method:
    by_row = "epsilon" in parameters
    return Method(base=Base.REQUIRED, run=run, parameters=parameters, picks=True, by_row=by_row)


METHODS: dict[str, Method] = {
    "linear": Method(
        base=Base.REFUSED,
        run=_linear,
        parameters={"weight": _WEIGHT, "normalize": _flag(True)},
    ),
    "slerp": Method(
        base=Base.REFUSED,
        run=_slerp,
        parameters={"t": Parameter(default=0.5, least=0.0, most=1.0), "weight": _WEIGHT},
        least=2,
    ),
    "multislerp": Method(base=Base.OPTIONAL, run=_multislerp, parameters={"weight": _WEIGHT}),
    "nuslerp": Method(
        base=Base.OPTIONAL,
        run=_nuslerp,
        parameters={"weight": _WEIGHT, "nuslerp_flatten": _flag(True)},
        least=2,
        most=2,
        by_row=True,
    ),
    "karcher": Method(
        base=Base.REFUSED,
        run=_karcher,
        parameters={
            "max_iter": Parameter(default=10, least=1, most=10_000),
            "tol": Parameter(default=1e-5, least=0.0, most=1.0),
        },
    ),
    "model_stock": Method(
        base=Base.REQUIRED,
        run=_stock,
        parameters={"filter_wise": _flag(False)},
        least=2,
        by_row=True,
    ),
    "task_arithmetic": Method(
        base=Base.REQUIRED,
        run=_differences(None),
        parameters=_sums(normalize=False),
    ),
    "ties": _sparse(_differences(_ties, Consensus.SIGN), _sums(normalize=True, density=_DENSITY)),
    "dare_linear": _sparse(_differences(_dare), _drops(normalize=False, rescale=True)),
    "dare_ties": _sparse(
        _differences(_dare, Consensus.SIGN), _drops(normalize=False, rescale=True)
    ),
    "della": _sparse(
        _differences(_della, Consensus.SIGN),
        _drops(normalize=True, rescale=True, epsilon=_EPSILON),
    ),
    "della_linear": _sparse(
        _differences(_della), _drops(normalize=False, rescale=True, epsilon=_EPSILON)
    ),
    "breadcrumbs": _sparse(
        _differences(_breadcrumbs), _drops(normalize=False, rescale=False, gamma=_GAMMA)
    ),
    "breadcrumbs_ties": _sparse(
        _differences(_breadcrumbs, Consensus.SIGN),
        _drops(normalize=False, rescale=False, gamma=_GAMMA),
    ),
    "sce": Method(
        base=Base.REQUIRED,
        run=_sce,
        parameters={"select_topk": Parameter(default=1.0, least=0.0, most=1.0)},
        picks=True,
    ),
    "passthrough": Method(
        base=Base.REFUSED,
        run=_passthrough,
        parameters={"scale": Parameter(default=1.0, each=True)},
        most=1,
    ),
}
"""By name, as mergekit calls them."""
