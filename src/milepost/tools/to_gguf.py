"""`to-gguf`: a model with its tokenizer as one GGUF file."""

from __future__ import annotations

import os
import time
from math import prod
from pathlib import Path

from milepost.errors import ExistsError, InvalidInputError
from milepost.storage.fileops import PathLike
from milepost.storage.space import free_nbytes, no_space
from milepost.tools.cast import refuse_quantised
from milepost.tools.gguf.container import Container, lay_out, read_back
from milepost.tools.gguf.families import FAMILIES, Family, family_of
from milepost.tools.gguf.hyperparameters import Keys, read_hyperparameters
from milepost.tools.gguf.origin import origin_keys
from milepost.tools.gguf.package import gguf_package
from milepost.tools.gguf.tensors import Kind, TensorPlan, plan_tensors
from milepost.tools.gguf.tokenizer import tokenizer_keys
from milepost.tools.gguf.write import memory_and_threads, require_equal, tasks_of, write_file
from milepost.tools.rewrite.options import Check, Mode, RewriteOptions
from milepost.tools.rewrite.problems import Problems, refuse_parent
from milepost.tools.rewrite.report import CheckReport, RewriteReport
from milepost.tools.rewrite.source import Source, open_source


def to_gguf(
    source: PathLike, output: PathLike, *, dtype: str, options: RewriteOptions | None = None
) -> RewriteReport:
    """Write the model at `source`, of any layout, as the GGUF file `output`: whole, or not at all.

    `dtype` is `f32`, `f16`, `bf16` or `q8_0`: the type of the matrices. Vectors and routers are
    float32 always. Tensors go through a band of rows at a time. Families, configurations, tensors
    and tokenizers that readers of the format would take for something else are refused, all of it
    at once, before anything is written; with `Mode.DRY_RUN` it is in the report. Errors otherwise
    as those of `run_rewrite`; `MissingExtraError` without the package `gguf`.
    """
    gguf_package()
    kind = _kind(dtype)
    with open_source(source) as opened:
        refuse_quantised(opened, "to-gguf")
        return _Run(opened, Path(output), kind, options or RewriteOptions()).run()


def _kind(dtype: str) -> Kind:
    found = {kind.value.lower(): kind for kind in Kind}
    if dtype.lower() not in found:
        raise InvalidInputError(f"dtype {dtype!r}: expected one of {', '.join(found)}")
    return found[dtype.lower()]


class _Run:
    def __init__(self, source: Source, output: Path, kind: Kind, options: RewriteOptions) -> None:
        self._source, self._output = source, output
        self._kind, self._options = kind, options
        self._problems = Problems()
        self._notes: list[str] = []
        self._began = time.monotonic()

    def run(self) -> RewriteReport:
        self._check_options()
        family = self._family()
        plan = container = None
        if family is not None:
            plan, container = self._plan(family)
        if container is not None and free_nbytes(self._output.parent) < container.nbytes:
            self._problems.add(no_space(self._output.parent, container.nbytes))
        if self._options.mode is Mode.DRY_RUN:
            return self._report(plan, container, None)
        self._problems.raise_if_any()
        assert plan is not None and container is not None
        return self._report(plan, container, self._write(plan, container))

    def _check_options(self) -> None:
        problems, output = self._problems, self._output
        if output.suffix != ".gguf":
            problems.refuse(f"{output}: the file needs a name that ends in .gguf")
        if os.path.lexists(output):
            problems.add(
                ExistsError(
                    f"{output}: is there already; nothing is replaced: choose another name, or "
                    "remove it first",
                    path=output,
                )
            )
        refuse_parent(output, problems)
        given = os.path.realpath(self._source.path)
        place = os.path.realpath(output)
        if place != given and os.path.commonpath([place, given]) == given:
            problems.refuse(
                f"{output}: the output lies in the input {given}; choose a place outside"
            )
        if self._options.max_shard_size is not None:
            problems.refuse("--max-shard-size: to-gguf writes one file")
        for name in self._source.needs:
            problems.refuse(
                f"{self._source.path}: its weights need {name}, for which GGUF has no place; apply "
                "it first (milepost convert-to-bf16)"
            )

    def _family(self) -> Family | None:
        kinds = self._source.model_types
        family = family_of(kinds)
        if family is None:
            found = " with ".join(kinds) or "no model_type"
            self._problems.refuse(
                f"{self._source.path}: config.json has {found}; to-gguf knows {', '.join(FAMILIES)}"
            )
        return family

    def _plan(self, family: Family) -> tuple[TensorPlan | None, Container | None]:
        source, problems = self._source, self._problems
        sizes = read_hyperparameters(source.config, family, problems)
        if sizes is None:
            return None, None
        plan = plan_tensors(source.tensors, source.tied, family, sizes, self._kind, problems)
        if plan.narrow:
            self._notes.append(
                f"{len(plan.narrow)} matrices are F16, because 32 does not divide their rows: "
                f"{', '.join(plan.narrow[:3])}"
            )
        keys: Keys = {**origin_keys(source), **sizes.keys(family.arch)}
        directory = source.path if source.path.is_dir() else source.path.parent
        found = problems.attempt(lambda: tokenizer_keys(directory, source.config, sizes.vocabulary))
        if found is not None:
            keys |= found.keys
            self._notes += found.notes
        return plan, lay_out(family.arch, keys, self._kind, plan.tensors)

    def _write(self, plan: TensorPlan, container: Container) -> CheckReport | None:
        if plan.head is not None:
            require_equal(plan.head, self._source["model.embed_tokens.weight"])
        is_checked = self._options.check is Check.LOAD

        def check(path: Path) -> None:
            wrong = read_back(str(path), plan.tensors, container) if is_checked else []
            if wrong:
                raise InvalidInputError(
                    f"{self._output}: the output was made, but is not right, and was not kept: "
                    f"{'; '.join(wrong)}",
                    path=self._output,
                )

        write_file(self._output, container, plan.tensors, self._options, check)
        return CheckReport(parameters=_parameters(plan)) if is_checked else None

    def _report(
        self, plan: TensorPlan | None, container: Container | None, check: CheckReport | None
    ) -> RewriteReport:
        memory = 0
        if plan is not None and container is not None:
            tasks = tasks_of(plan.tensors, container)
            memory = memory_and_threads(tasks, self._options)[0] + len(container.header)
        return RewriteReport(
            verb="to-gguf",
            path=self._output,
            mode=self._options.mode,
            files={} if container is None else {self._output.name: container.nbytes},
            tensors=0 if plan is None else len(plan.tensors),
            unchanged=0,
            parameters=0 if plan is None else _parameters(plan),
            memory_nbytes=memory,
            free_nbytes=free_nbytes(self._output.parent),
            seconds=time.monotonic() - self._began,
            dropped={} if plan is None else plan.dropped,
            notes=tuple(self._notes),
            problems=tuple(self._problems.messages),
            check=check,
        )


def _parameters(plan: TensorPlan) -> int:
    return sum(prod(tensor.shape) for tensor in plan.tensors if tensor.segments)
