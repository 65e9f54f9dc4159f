"""Where everything lies in the output, and what making it takes: from headers alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from milepost.checkpointing.files import PlannedFile, document_file
from milepost.errors import CheckpointError, InvalidInputError
from milepost.format.header import Header
from milepost.format.index import Index, encode_index
from milepost.plan.parts import DEFAULT_PART_NBYTES, PartPlan, parse_nbytes, plan_parts
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.rewrite import Parts, Rewrite
from milepost.tools.rewrite.source import Source

MIN_MEMORY_NBYTES = 32 * 2**20
"""What groups may take together where all of them are smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlan:
    """The parts in order, their index, and where tensors begin.

    `places` has for each tensor the number of its part and the first byte in it. `memory_nbytes` is
    what groups take together at most.
    """

    parts: tuple[PartPlan, ...]
    index: PlannedFile
    places: Mapping[str, tuple[int, int]]
    memory_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the weights' files."""
        return sum(part.nbytes for part in self.parts) + self.index.nbytes


def plan_output(rewrite: Rewrite, options: RewriteOptions) -> OutputPlan | None:
    """The layout; None when it cannot be told, with the reason in the rewrite's problems."""
    problems = rewrite.problems
    check_groups(rewrite)
    laid_out = problems.attempt(lambda: _lay_out(rewrite, options))
    if laid_out is None:
        return None
    parts, index = laid_out
    places = {
        name: (number, part.offset(name))
        for number, part in enumerate(parts)
        for name in part.tensors
    }
    return OutputPlan(
        parts=parts, index=index, places=places, memory_nbytes=memory_of_groups(rewrite, options)
    )


def memory_of_groups(rewrite: Rewrite, options: RewriteOptions) -> int:
    """What groups may take together: no less than the largest needs."""
    largest = max((group.memory_nbytes for group in rewrite.groups), default=0)
    return max(largest, options.memory_nbytes or MIN_MEMORY_NBYTES)


def check_groups(rewrite: Rewrite) -> None:
    """Each output has one group, and each tensor of the first source goes somewhere."""
    seen: set[str] = set()
    for spec in (spec for group in rewrite.groups for spec in group.outputs):
        if spec.name in seen:
            rewrite.problems.refuse(f"{spec.name}: two tensors of the output have this name")
        seen.add(spec.name)
    for alias, name in rewrite.ties.items():
        if alias in seen:
            rewrite.problems.refuse(f"{alias}: is to be {name} by its tie, and a tensor as well")
    main = rewrite.sources[0]
    read = {t.name for group in rewrite.groups for t in group.sources if t.source is main}
    lost = [name for name in main.tensors if name not in read and name not in rewrite.dropped]
    if lost and not rewrite.problems:
        shown = ", ".join(lost[:5])
        raise AssertionError(f"{rewrite.verb}: {len(lost)} tensors go nowhere: {shown}")


def _lay_out(rewrite: Rewrite, options: RewriteOptions) -> tuple[tuple[PartPlan, ...], PlannedFile]:
    if rewrite.parts is Parts.KEEP:
        if options.max_shard_size is not None:
            raise InvalidInputError(
                f"max_shard_size={options.max_shard_size}: {rewrite.verb} keeps the files of the "
                "input; use reshard for another part size"
            )
        return _kept(rewrite)
    limit = options.max_shard_size
    if limit is not None and not rewrite.naming.splits:
        raise InvalidInputError(
            f"max_shard_size={limit}: slices of experts have one file for each rank, whatever its "
            "size; leave it out"
        )
    plan = plan_parts(
        ((spec.name, spec.dtype, spec.shape) for g in rewrite.groups for spec in g.outputs),
        stem=rewrite.stem,
        max_part_nbytes=DEFAULT_PART_NBYTES if limit is None else parse_nbytes(limit),
        naming=rewrite.naming,
    )
    return plan.parts, document_file(plan.index_name, plan.index_bytes(), "weights")


def _kept(rewrite: Rewrite) -> tuple[tuple[PartPlan, ...], PlannedFile]:
    """The parts of the first source as they are."""
    source = rewrite.sources[0]
    found = source.set
    if found is None:
        raise InvalidInputError(
            f"{source.path}: a {source.checkpoint.layout.value} checkpoint has no safetensors "
            "parts to keep; export it to a directory first (milepost export)"
        )
    specs = {spec.name: spec for group in rewrite.groups for spec in group.outputs}
    parts = []
    for name, header in found.headers.items():
        for tensor, entry in header.tensors.items():
            spec = specs[tensor]
            same = (spec.dtype, spec.shape) == (entry.dtype, entry.shape)
            assert same, f"{tensor}: a part that is kept has tensors of the same kind"
        parts.append(_part_of(source, name, header))
    if found.index is not None:
        raw = found.index_path.read_bytes()
    else:
        weight_map = {tensor: part.name for part in parts for tensor in part.tensors}
        raw = encode_index(Index(weight_map=weight_map, total_size=source.nbytes))
    return tuple(parts), document_file(found.index_path.name, raw, "weights")


def _part_of(source: Source, name: str, header: Header) -> PartPlan:
    assert source.set is not None
    path = source.set.directory / name
    descriptor = source.files.descriptor(path)
    raw = os.pread(descriptor, header.data_start, 0)
    if len(raw) != header.data_start:
        raise CheckpointError(f"{path}: changed while it was read; run it again", path=path)
    return PartPlan(name=name, tensors=header.tensors, header=raw, nbytes=header.file_nbytes)


def untouched_parts(rewrite: Rewrite, plan: OutputPlan) -> set[str]:
    """Names of kept parts of which no byte changes."""
    if rewrite.parts is not Parts.KEEP:
        return set()
    unchanged = rewrite.unchanged
    return {part.name for part in plan.parts if set(part.tensors) <= unchanged}
