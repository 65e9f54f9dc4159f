"""`--check`: is the output what loaders and servers can use? Looked at before it gets its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from milepost.errors import InvalidInputError
from milepost.hf.expert_layouts import serving_notes
from milepost.hf.load_names import NameComparison, compare_with_class, not_compared
from milepost.tools.lowp.documents import is_of_a_layout
from milepost.tools.lowp.floats import as_floats
from milepost.tools.lowp.schemes import stated_scheme
from milepost.tools.rewrite.ep_slices import require_slices, slices_of
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import CheckReport
from milepost.tools.rewrite.source import EpSlices, Source, open_source

_LISTED = 5


def check_output(directory: Path, shown: Path) -> CheckReport:
    """Read the headers again and compare names and sizes; `InvalidInputError` names what is wrong.

    `shown` is the name that messages say.
    """
    report = look_at(directory)
    if report.problems:
        raise InvalidInputError(
            f"{shown}: the output was made, but is not right, and was not kept: "
            f"{'; '.join(report.problems)}",
            path=shown,
        )
    return report


def look_at(directory: Path) -> CheckReport:
    """What `--check` says about a checkpoint directory; no values are read.

    Of quantised weights, codes and scales must belong together, and the floats that they stand for
    are what is compared and counted.
    """
    with open_source(directory, slices=EpSlices.TAKE) as source:
        return _look_at_slices(source) if source.is_ep_sharded else _look_at_weights(source)


def _look_at_weights(source: Source) -> CheckReport:
    weights = _weights_of(source)
    comparison = NameComparison()
    if weights.unknown is not None:
        comparison = not_compared(weights.unknown)
    elif not weights.problems:
        comparison = compare_with_class(source.path, weights.shapes)
    problems = [*weights.problems, *_differences(comparison)]
    notes = [*serving_notes(source.model_types, weights.shapes), *comparison.notes]
    left = [name for name in source.tensors if ".shard_" in name]
    if left:
        problems.append(f"{len(left)} slices of ranks are left over, such as {left[0]}")
    if comparison.unexpected:
        notes.append(
            f"{len(comparison.unexpected)} tensors are none that {comparison.model_class} loads "
            f"(prediction layers, for instance): {', '.join(comparison.unexpected[:_LISTED])}"
        )
    return CheckReport(
        parameters=sum(prod(shape) for shape in weights.shapes.values()),
        model_class=comparison.model_class,
        problems=tuple(problems),
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """The shapes of a model's tensors by name: of quantised weights those of their floats.

    With `problems`, and where `unknown` says what is not understood, those of what is stored.
    """

    shapes: Mapping[str, tuple[int, ...]]
    problems: tuple[str, ...] = ()
    unknown: str | None = None


def _weights_of(source: Source) -> _Weights:
    """What does not belong together in a layout that is written here is a problem; other layouts
    may hold what is not known here."""
    stored = {name: tensor.shape for name, tensor in source.tensors.items()}
    stated = stated_scheme(source)
    if stated is None:
        return _Weights(shapes=stored)
    found = Problems()
    floats = as_floats(source, found)
    if not found:
        return _Weights(shapes={name: tensor.shape for name, tensor in floats.tensors.items()})
    is_foreign = any("FNUZ" in tensor.dtype for tensor in source.tensors.values())
    if is_of_a_layout(stated) and not is_foreign:
        return _Weights(shapes=stored, problems=tuple(found.messages))
    return _Weights(shapes=stored, unknown="; ".join(found.messages))


def _differences(comparison: NameComparison) -> list[str]:
    """What keeps an output from being the model of its class."""
    problems = []
    if comparison.missing:
        names = ", ".join(comparison.missing[:_LISTED])
        problems.append(
            f"{len(comparison.missing)} tensors that {comparison.model_class} loads are not there: "
            f"{names}"
        )
    if comparison.misfits:
        problems.append(
            f"{len(comparison.misfits)} tensors are not of the size that "
            f"{comparison.model_class} has: "
            f"{'; '.join(comparison.misfits[:_LISTED])}"
        )
    return problems


def _look_at_slices(source: Source) -> CheckReport:
    """Whether every rank has its slice; no class of transformers knows such names."""
    problems = Problems()
    problems.attempt(lambda: slices_of(source, require_slices(source), problems))
    return CheckReport(
        parameters=sum(prod(tensor.shape) for tensor in source.tensors.values()),
        problems=tuple(problems.messages),
        notes=(
            "slices of experts: no reader takes them; milepost merge-ep-shards puts them together",
        ),
    )
