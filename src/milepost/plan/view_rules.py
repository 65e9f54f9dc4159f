"""Views written down: a few rules for thousands of tensors, for readers that have no live model.

A rule has `*` for the numbers of layers, which are the same in both names, and `#` for the fixed
index that a stored name counts. Rules are made from what is there and hold for all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from milepost.format.manifest import ViewRule
from milepost.geometry.blocks import Shape
from milepost.plan.hub_views import ViewRun, Views


def view_rules(shapes: Mapping[str, Shape], views: Views) -> list[ViewRule]:
    """The rules of one set: `shapes` are of all its runtime tensors, `views` of some of them."""
    alike: dict[tuple[str, Shape], dict[str, frozenset[ViewRule]]] = {}
    for fqn, shape in shapes.items():
        rules = frozenset(_rules(fqn, shape, views.get(fqn, ()), _numbers(fqn)))
        alike.setdefault((_starred(fqn), shape), {})[fqn] = rules
    found: dict[ViewRule, None] = {}
    for (_, shape), by_name in alike.items():
        if len(set(by_name.values())) == 1:
            first = next(iter(by_name))
            found.update(dict.fromkeys(_rules(first, shape, views.get(first, ()), _numbers(first))))
            continue
        for fqn in by_name:
            found.update(dict.fromkeys(_rules(fqn, shape, views.get(fqn, ()), [])))
    return list(found)


def _rules(
    fqn: str, shape: Shape, runs: tuple[ViewRun, ...], numbers: list[str]
) -> Iterator[ViewRule]:
    """The rules of one tensor, with its own `numbers` replaced where all names have them."""
    names = [run.head + (run.tail or "") for run in runs]
    is_starred = bool(numbers) and all(_numbers(name) == numbers for name in names)
    for run in runs:
        runtime, head, tail = fqn, run.head, run.tail
        if is_starred:
            runtime, head = _starred(fqn), _starred(head)
            tail = None if tail is None else _starred(tail)
        dims = tuple((dim.source, dim.offset, dim.step, dim.length) for dim in run.kind.dims)
        if tail is not None and run.first[0] == 0 and run.count == _length(run):
            stored, fixed = f"{head}#{tail}", run.first[1:]
            yield ViewRule(runtime=runtime, shape=shape, stored=stored, dims=dims, fixed=fixed)
            continue
        for view in run.views():
            stored = _starred(view.name) if is_starred and tail is None else view.name
            name = runtime if tail is None else fqn
            yield ViewRule(runtime=name, shape=shape, stored=stored, dims=dims, fixed=view.fixed)


def _length(run: ViewRun) -> int:
    return run.kind.source_shape[run.kind.fixed_dims[0]]


def _numbers(name: str) -> list[str]:
    return [segment for segment in name.split(".") if segment.isdigit()]


def _starred(name: str) -> str:
    return ".".join("*" if segment.isdigit() else segment for segment in name.split("."))
