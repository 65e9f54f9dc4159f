"""`run_rewrite`: from what a verb wants to a directory that is there, whole, or not at all."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from enum import Enum
from math import prod
from pathlib import Path

from milepost.checkpointing.files import PlannedFile
from milepost.checkpointing.seal import seal
from milepost.engine.write import Durability, WriteOptions, digest_files, write_files
from milepost.errors import CheckpointError, ExistsError
from milepost.format.digests import Extent
from milepost.format.manifest import (
    Manifest,
)
from milepost.layouts.directory import check_step_name
from milepost.storage import fileops
from milepost.storage.fileops import PathLike
from milepost.storage.space import free_nbytes, no_space, storage_error
from milepost.tools.carried import Carried
from milepost.tools.rewrite.beside import beside_files, copied_file, edited, manifest_of
from milepost.tools.rewrite.check import check_output
from milepost.tools.rewrite.execute import execute
from milepost.tools.rewrite.options import Check, Mode, RewriteOptions, Untouched
from milepost.tools.rewrite.plan import OutputPlan, plan_output, untouched_parts
from milepost.tools.rewrite.problems import refuse_parent
from milepost.tools.rewrite.publish import OutputDirectory
from milepost.tools.rewrite.report import CheckReport, RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite


class Target(Enum):
    """What the output's name is."""

    NEW = "new"
    """A name that nothing has."""
    IN_PLACE = "in-place"
    """That of the first source, which is replaced at once when the output is complete."""


def run_rewrite(
    rewrite: Rewrite,
    output: PathLike,
    options: RewriteOptions | None = None,
    *,
    target: Target = Target.NEW,
    untouched: Untouched = Untouched.COPY,
) -> RewriteReport:
    """Write `rewrite` as the checkpoint directory `output`: all of it, or nothing.

    Everything that can be known from headers is checked first: what the verb found, names that
    come twice, an `output` that is there already or lies in an input, sidecars that are missing,
    and room. With `Mode.DRY_RUN` that is all, and it is in the report; else it is raised, all at
    once. `DamagedError` when bytes of an input are not those that were saved, `StorageError` for
    the file system; then nothing is left at `output`. The sources are closed.
    """
    began = time.monotonic()
    run = _Run(rewrite, Path(output), options or RewriteOptions(), target, untouched)
    try:
        return run.run(began)
    finally:
        for source in rewrite.sources:
            source.files.close()


@dataclass(slots=True)
class _Run:
    """One call of `run_rewrite`."""

    rewrite: Rewrite
    output: Path
    options: RewriteOptions
    target: Target
    untouched: Untouched

    def run(self, began: float) -> RewriteReport:
        rewrite = self.rewrite
        self._check_target()
        plan = plan_output(rewrite, self.options)
        carried = rewrite.problems.attempt(lambda: edited(rewrite))
        manifest = manifest_of(rewrite, carried or Carried())
        rewrite.problems.attempt(lambda: check_step_name(self.output, manifest.step))
        beside = beside_files(carried) if carried is not None else []
        beside += rewrite.extra
        if plan is not None:
            self._check_room(plan, beside)
        if self.options.mode is Mode.DRY_RUN:
            files = _predicted(plan, beside)
            return self._report(began, plan, files, carried, None)
        rewrite.problems.raise_if_any()
        assert plan is not None and carried is not None
        if rewrite.edit_manifest is not None:
            rewrite.edit_manifest(manifest)
        files, check = self._write(plan, beside, manifest)
        return self._report(began, plan, files, carried, check)

    def _check_target(self) -> None:
        """Problems of the output's name."""
        problems, place = self.rewrite.problems, os.path.realpath(self.output)
        inputs = [os.path.realpath(source.path) for source in self.rewrite.sources]
        if self.target is Target.IN_PLACE:
            assert place == inputs[0], "in place is the place of the first source"
            return
        for given in inputs:
            if place == given:
                problems.refuse(f"{self.output}: the output is an input; choose another name")
            elif os.path.commonpath([place, given]) == given:
                problems.refuse(
                    f"{self.output}: the output lies in the input {given}; choose a place outside"
                )
        if os.path.lexists(self.output) and place not in inputs:
            problems.add(
                ExistsError(
                    f"{self.output}: is there already; nothing is replaced: choose another name, "
                    "or remove it first",
                    path=self.output,
                )
            )

        refuse_parent(self.output, problems)

    def _check_room(self, plan: OutputPlan, beside: list[PlannedFile]) -> None:
        needed = plan.nbytes + sum(file.nbytes for file in beside)
        if self.untouched is Untouched.LINK:
            kept = untouched_parts(self.rewrite, plan)
            needed -= sum(part.nbytes for part in plan.parts if part.name in kept)
        if free_nbytes(self.output.parent) < needed:
            self.rewrite.problems.add(no_space(self.output.parent, needed))

    def _write(
        self, plan: OutputPlan, beside: list[PlannedFile], manifest: Manifest
    ) -> tuple[dict[str, int], CheckReport | None]:
        in_place = self.target is Target.IN_PLACE
        output = OutputDirectory(self.output, replaces=in_place)
        try:
            with output:
                files, extents = self._fill(output.path, plan, beside)
                durability = self._write_options().durability
                sizes = seal(output.path, manifest, files, extents, durability=durability)
                check = None
                if self.options.check is Check.LOAD:
                    check = check_output(output.path, self.output)
                if self.rewrite.before_publish is not None:
                    self.rewrite.before_publish(output.path)
                output.commit(is_durable=self.options.is_durable)
        except CheckpointError:
            raise
        except OSError as error:
            raise storage_error(error, self.output, needed_nbytes=plan.nbytes) from error
        return sizes, check

    def _fill(
        self, directory: Path, plan: OutputPlan, beside: list[PlannedFile]
    ) -> tuple[list[PlannedFile], list[list[Extent]]]:
        """Write everything but the digests and the manifest; what was written of each file."""
        linked = self._link_parts(directory, plan)
        others = [part for part in plan.parts if part.name not in linked]
        names = {name for part in others for name in part.tensors}
        groups = [g for g in self.rewrite.groups if g.outputs[0].name in names]
        numbers = {part.name: number for number, part in enumerate(others)}
        rest = OutputPlan(
            parts=tuple(others),
            index=plan.index,
            places={n: (numbers[p.name], p.offset(n)) for p in others for n in p.tensors},
            memory_nbytes=plan.memory_nbytes,
        )
        extents = {**linked, **execute(groups, rest, directory, self.options)}
        parts = [
            PlannedFile(name=part.name, role="weights", nbytes=part.nbytes, pieces=())
            for part in plan.parts
        ]
        files = [plan.index, *beside]
        for parent in sorted({Path(file.name).parent for file in files}):
            fileops.make_directories(directory / parent)
        found = write_files([file.write_into(directory) for file in files], self._write_options())
        return [*parts, *files], [*(extents[part.name] for part in parts), *found]

    def _link_parts(self, directory: Path, plan: OutputPlan) -> dict[str, list[Extent]]:
        """Link parts that do not change, where that is wanted and can be; their extents."""
        found: dict[str, list[Extent]] = {}
        source = self.rewrite.sources[0]
        if self.untouched is not Untouched.LINK or source.set is None:
            return found
        for name in sorted(untouched_parts(self.rewrite, plan)):
            path = Path(os.path.realpath(source.set.directory / name))
            try:
                fileops.link(path, directory / name)
            except OSError:
                continue  # another file system, or one without links: copied
            recorded = source.extents_of(source.set.directory / name)
            file = copied_file(name, path, "weights").write_into(directory)
            found[name] = recorded or digest_files([file], self._write_options())[0]
        return found

    def _write_options(self) -> WriteOptions:
        durability = Durability.DURABLE if self.options.is_durable else Durability.PAGE_CACHE
        return WriteOptions(durability=durability, threads=self.options.threads)

    def _report(
        self,
        began: float,
        plan: OutputPlan | None,
        files: dict[str, int],
        carried: Carried | None,
        check: CheckReport | None,
    ) -> RewriteReport:
        rewrite = self.rewrite
        specs = [spec for group in rewrite.groups for spec in group.outputs]
        notes = [*rewrite.notes, *(carried.notes if carried is not None else [])]
        return RewriteReport(
            verb=rewrite.verb,
            path=self.output,
            mode=self.options.mode,
            files=files,
            tensors=len(specs),
            unchanged=len(rewrite.unchanged),
            parameters=sum(prod(spec.shape) for spec in specs),
            memory_nbytes=plan.memory_nbytes if plan is not None else 0,
            free_nbytes=free_nbytes(self.output.parent),
            seconds=time.monotonic() - began,
            dropped=dict(rewrite.dropped),
            counts=dict(rewrite.counts),
            notes=tuple(dict.fromkeys(notes)),
            problems=tuple(rewrite.problems.messages),
            check=check,
        )


def _predicted(plan: OutputPlan | None, beside: list[PlannedFile]) -> dict[str, int]:
    """Files of the output and their sizes, but the manifest and the digests."""
    files = {} if plan is None else {part.name: part.nbytes for part in plan.parts}
    if plan is not None:
        files[plan.index.name] = plan.index.nbytes
    return {**files, **{file.name: file.nbytes for file in beside}}
