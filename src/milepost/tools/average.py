"""`average`: one set of weights out of several steps of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from milepost.adapters.config import read_adapter_config
from milepost.adapters.kinds import ADAPTER_STEM
from milepost.errors import InvalidInputError
from milepost.storage.fileops import PathLike
from milepost.tools.cast import refuse_quantised
from milepost.tools.rewrite.dtypes import FLOATS, refuse_overflow, torch_type
from milepost.tools.rewrite.groups import Computed, Group, Make, TensorSpec
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import Source, SourceTensor, open_source

VERB = "average"


def average(
    sources: Sequence[PathLike],
    output: PathLike,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Average the weights of several checkpoints of one run, as the directory `output`.

    All count the same, or as much as `weights` say (their sum is brought to 1), or, with `ema`, as
    in an exponential moving average with this decay over the checkpoints in the order given: the
    mean starts at the first, and each one after it moves it by `1 - ema` of the difference. Sums
    are made in fp32 and rounded once to the dtype of the last checkpoint, from which the files
    beside the weights, the step and the ties are. What is no float must be the same in all.

    `InvalidInputError` for one checkpoint alone, weights that do not fit, and tensors that are not
    in all or of another shape; other errors: see `run_rewrite`.
    """
    shares = shares_of(len(sources), weights=weights, ema=ema)
    opened = [open_source(path) for path in sources]
    for source in opened:
        refuse_quantised(source, VERB)
    problems = Problems()
    _check_names(opened, problems)
    _check_adapters(opened, problems)
    main = opened[-1]
    groups = [
        group
        for name in main.tensors
        if all(name in source.tensors for source in opened)
        if (group := _group(name, opened, shares, problems)) is not None
    ]
    steps = [source.checkpoint.info.step for source in opened]
    rewrite = Rewrite(
        verb=VERB,
        sources=[main, *opened[:-1]],
        groups=groups,
        arguments={"weights": shares, "ema": ema},
        counts={"checkpoints": len(opened)},
        problems=problems,
        provenance={
            "averaged": [
                {"name": source.path.name, "step": step, "weight": share}
                for source, step, share in zip(opened, steps, shares, strict=True)
            ]
        },
    )
    return run_rewrite(rewrite, output, options)


def shares_of(count: int, *, weights: Sequence[float] | None, ema: float | None) -> list[float]:
    """What each checkpoint counts; the sum is 1.

    >>> shares_of(3, weights=None, ema=0.5)
    [0.25, 0.25, 0.5]
    """
    if count < 2:
        raise InvalidInputError(f"an average is one of at least two checkpoints, and got {count}")
    if weights is not None and ema is not None:
        raise InvalidInputError("give --weights or --ema, not both")
    if ema is not None:
        if not 0 <= ema < 1:
            raise InvalidInputError(f"--ema {ema}: expected a decay from 0 up to, not at, 1")
        rest = [(1 - ema) * ema ** (count - 1 - n) for n in range(1, count)]
        return [ema ** (count - 1), *rest]
    if weights is None:
        return [1 / count] * count
    total = sum(weights)
    if len(weights) != count or not 0 < total < float("inf") or min(weights) < 0:
        raise InvalidInputError(
            f"--weights {', '.join(map(str, weights))}: expected {count} numbers from 0 up, one "
            "for each checkpoint, that are not all 0"
        )
    return [weight / total for weight in weights]


def _check_names(opened: Sequence[Source], problems: Problems) -> None:
    every = dict.fromkeys(name for source in opened for name in source.tensors)
    for source in opened:
        missing = [name for name in every if name not in source.tensors]
        if missing:
            problems.refuse(
                f"{source.path}: has no {', '.join(missing[:5])} ({len(missing)} tensors), which "
                "other checkpoints have; only checkpoints of one model can be averaged"
            )


def _check_adapters(opened: Sequence[Source], problems: Problems) -> None:
    """Factors of adapters mean the same only where they are scaled in the same way."""
    adapters = [source for source in opened if source.stem == ADAPTER_STEM]
    found = {}
    for source in adapters:
        directory = source.path if source.path.is_dir() else source.path.parent
        config = problems.attempt(partial(read_adapter_config, directory))
        if config is not None:
            found[source.path] = config.lora, config.experts
    last = found.get(opened[-1].path)
    for path, settings in found.items():
        if last is not None and settings != last:
            problems.refuse(
                f"{path}: its adapter_config.json scales factors in another way than that of "
                f"{opened[-1].path}; merge each into the base and average the models"
            )


def _group(
    name: str, opened: Sequence[Source], shares: Sequence[float], problems: Problems
) -> Group | None:
    tensors = [source.tensors[name] for source in opened]
    last = tensors[-1]
    for tensor in tensors:
        is_kind = (tensor.dtype in FLOATS) == (last.dtype in FLOATS)
        same = is_kind and (last.dtype in FLOATS or tensor.dtype == last.dtype)
        if tensor.shape != last.shape or not same:
            problems.refuse(
                f"{name}: {tensor.dtype} {list(tensor.shape)} in {tensor.source.path}, "
                f"{last.dtype} {list(last.shape)} in {last.source.path}"
            )
            return None
    keys = [str(number) for number in range(len(tensors))]
    make = _mean(name, last.dtype, shares) if last.dtype in FLOATS else _same(name, tensors)
    return Computed(
        inputs=dict(zip(keys, tensors, strict=True)),
        outputs=(TensorSpec(name=name, dtype=last.dtype, shape=last.shape),),
        make=make,
        banded=tuple(keys) if last.shape and last.nbytes else (),
        scratch_nbytes=2 * 4 * 2**20 if last.shape else 64,
    )


def _mean(name: str, dtype: str, shares: Sequence[float]) -> Make:
    wanted = torch_type(dtype)

    def make(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = [given[str(number)] for number in range(len(shares))]
        wide = torch.float64 if torch.float64 in {v.dtype for v in values} else torch.float32
        total = values[0].to(wide) * shares[0]
        for value, share in zip(values[1:], shares[1:], strict=True):
            total.add_(value.to(wide), alpha=share)
        made = total.to(wanted)
        refuse_overflow(total, made, name)
        return {name: made}

    return make


def _same(name: str, tensors: Sequence[SourceTensor]) -> Make:
    def make(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        last = given[str(len(tensors) - 1)]
        for number, tensor in enumerate(tensors):
            if not torch.equal(given[str(number)], last):
                raise InvalidInputError(
                    f"{name}: {tensor.dtype} cannot be averaged, and {tensor.source.path} has "
                    f"other values than {tensors[-1].source.path}"
                )
        return {name: last}

    return make
