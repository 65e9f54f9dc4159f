"""`--check`: is the output what loaders and servers can use? Looked at before it gets its name."""

from __future__ import annotations

from math import prod
from pathlib import Path

from milepost.errors import InvalidInputError
from milepost.hf.expert_layouts import serving_notes
from milepost.hf.load_names import compare_with_class
from milepost.layouts.checkpoint import Checkpoint
from milepost.tools.rewrite.ep_slices import require_slices, slices_of
from milepost.tools.rewrite.problems import Problems
from milepost.tools.rewrite.report import CheckReport
from milepost.tools.rewrite.source import EpSlices, Source, open_source


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
    """What `--check` says about a checkpoint directory; no tensor is read."""
    with open_source(directory, slices=EpSlices.TAKE) as source:
        if source.is_ep_sharded:
            return _look_at_slices(source)
    tensors = Checkpoint.open(directory).tensors()
    shapes = {name: info.shape for name, info in tensors.items()}
    problems: list[str] = []
    notes: list[str] = []
    left = [name for name in shapes if ".shard_" in name]
    if left:
        problems.append(f"{len(left)} slices of ranks are left over, such as {left[0]}")
    with open_source(directory) as source:
        notes += serving_notes(source.model_types, shapes)
    comparison = compare_with_class(directory, shapes)
    notes += comparison.notes
    if comparison.missing:
        names = ", ".join(comparison.missing[:5])
        problems.append(
            f"{len(comparison.missing)} tensors that {comparison.model_class} loads are not there: "
            f"{names}"
        )
    if comparison.misfits:
        problems.append(
            f"{len(comparison.misfits)} tensors are not of the size that "
            f"{comparison.model_class} has: "
            f"{'; '.join(comparison.misfits[:5])}"
        )
    if comparison.unexpected:
        names = ", ".join(comparison.unexpected[:5])
        notes.append(
            f"{len(comparison.unexpected)} tensors are none that {comparison.model_class} loads "
            f"(prediction layers, for instance): {names}"
        )
    return CheckReport(
        parameters=sum(prod(shape) for shape in shapes.values()),
        model_class=comparison.model_class,
        problems=tuple(problems),
        notes=tuple(notes),
    )


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
