"""A pipeline of training stages, each in a run directory of its own, each begun with a result.

What a stage began with is recorded by id and by the digest of its weights, so a result that was
made from something else than what is there now is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.checkpointing.load import load
from milepost.checkpointing.report import LoadReport
from milepost.errors import InvalidInputError, NotFoundError
from milepost.manager.decide import decide
from milepost.manager.resume import Resume
from milepost.manager.stage_rules import StageRules
from milepost.manager.stage_types import (
    LANGUAGE_MODEL_STAGES,
    OnStage,
    OnStale,
    Stage,
    StageAction,
    StageResult,
    StageStart,
)
from milepost.storage.fileops import PathLike


class StagePipeline:
    """Stages that begin with each other's results, below one directory.

    Stage `sft` trains in `<directory>/sft`, as any run; what it began with and ended with stands in
    `milepost-stages.json`. All calls are collective: the coordinator decides, errors are the same
    on all ranks. Default stages: `pretrain`, `sft` after it, `dpo` after that, and `verifier`.

    >>> pipeline = StagePipeline("runs/mine")  # doctest: +SKIP
    >>> start = pipeline.enter("sft", settings={"lr": 1e-5})  # doctest: +SKIP
    >>> with CheckpointManager(start.directory, resume=start.resume) as manager:  # doctest: +SKIP
    ...     report = manager.resume(state)
    ...     ...
    >>> pipeline.finish("sft", metrics={"eval_loss": 1.9})  # doctest: +SKIP
    """

    def __init__(
        self, directory: PathLike, stages: Sequence[Stage] = LANGUAGE_MODEL_STAGES
    ) -> None:
        self.directory = Path(directory)
        self._rules = StageRules(self.directory, stages)

    def run_directory(self, stage: str) -> Path:
        """Where a stage trains."""
        return self.directory / self._rules.stage(stage).name

    def enter(
        self,
        stage: str,
        *,
        policy: OnStage = OnStage.AUTO,
        stale: OnStale = OnStale.ERROR,
        checkpoint: PathLike | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> StageStart:
        """What to do with `stage` now; what it begins with is recorded before it trains.

        `checkpoint` is a result to skip with, of this pipeline or another. `settings` are plain
        values that the result depends on. `InvalidInputError` when the stage before has no result,
        or there is nothing to skip with; `MismatchError` when a result is stale: it is gone, is
        another checkpoint than was recorded, or was made with other settings or from another result
        of the stage before.
        """
        given = None if checkpoint is None else Path(checkpoint)
        if given is not None and policy is not OnStage.SKIP:
            raise InvalidInputError(
                f"{stage}: checkpoint= names a result to skip the stage with; pass "
                "policy=OnStage.SKIP too, or leave it out"
            )
        self._rules.stage(stage)
        told = decide(lambda: self._rules.enter(stage, policy, stale, given, dict(settings or {})))
        result = told.pop("result")
        return StageStart(
            stage=stage,
            action=StageAction(told["action"]),
            directory=self.run_directory(stage),
            weights=None if told["weights"] is None else Path(told["weights"]),
            resume=Resume(told["resume"]),
            result=None if result is None else StageResult.from_document(result),
            stale=tuple(told["stale"]),
        )

    def finish(
        self,
        stage: str,
        checkpoint: PathLike | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
    ) -> StageResult:
        """Record the result of a stage: `checkpoint`, by default the newest that it committed."""
        self._rules.stage(stage)
        given = None if checkpoint is None else Path(checkpoint)
        return StageResult.from_document(
            decide(lambda: self._rules.finish(stage, given, dict(metrics or {})).to_document())
        )

    def result(self, stage: str) -> StageResult | None:
        """The result that stages after `stage` begin with; None when it has none yet.

        That of the stage before where it was skipped. `MismatchError` or `NotFoundError` when it is
        not what was recorded.
        """
        self._rules.stage(stage)
        found = decide(lambda: _as_document(self._rules.result(stage)))
        return None if found is None else StageResult.from_document(found)

    def newest(self, stage: str) -> Path | None:
        """The result of a stage, or the newest checkpoint it committed so far; None for nothing."""
        self._rules.stage(stage)
        found = decide(lambda: _as_text(self._rules.newest(stage)))
        return None if found is None else Path(found)

    def load(self, stage: str, state: Mapping[str, Any], **options: Any) -> LoadReport:
        """Fill the models in `state` from the result of `stage`; options are those of `load`."""
        result = self.result(stage)
        if result is None:
            raise NotFoundError(
                f"{self.directory}: stage {stage} has no result yet; those that have one: "
                f"{', '.join(self._rules.finished()) or 'none'}",
                path=self.directory,
            )
        return load(result.path, state, **options)

    def lineage(self, stage: str) -> list[StageResult]:
        """The result of `stage` and those that it came from, the first one first."""
        chain: list[StageResult] = []
        name: str | None = stage
        while name is not None:
            found = self.result(name)
            if found is None:
                break
            chain.insert(0, found)
            name = self._rules.stage(found.stage).after
        return chain


def _as_document(result: StageResult | None) -> dict[str, Any] | None:
    return None if result is None else result.to_document()


def _as_text(path: Path | None) -> str | None:
    return None if path is None else str(path)
