"""The rules of a pipeline of stages, as the coordinator carries them out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.errors import (
    CheckpointError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StorageError,
    UnencodableError,
)
from milepost.format import strictjson
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint, require_intact
from milepost.layouts.run import newest
from milepost.manager.resume import Resume
from milepost.manager.stage_record import (
    Parent,
    StageRecord,
    Status,
    read_records,
    relative,
    weights_digest,
    write_record,
)
from milepost.manager.stage_types import (
    OnStage,
    OnStale,
    Stage,
    StageAction,
    StageResult,
)


class StageRules:
    """What `StagePipeline` decides; nothing here is collective."""

    def __init__(self, directory: Path, stages: Sequence[Stage]) -> None:
        self.directory = directory
        self.stages = {stage.name: stage for stage in stages}
        _check_stages(stages)

    def enter(
        self,
        stage: str,
        policy: OnStage,
        on_stale: OnStale,
        given: Path | None,
        settings: dict[str, Any],
    ) -> dict[str, Any]:
        settings = _plain(stage, settings)
        if policy is OnStage.SKIP:
            return self._skip(stage, given)
        parent = self._parent(stage)
        record = read_records(self.directory).get(stage)
        reasons: list[str] = []
        if record is not None and record.status != "skipped" and policy is OnStage.AUTO:
            reasons = self._stale(stage, record, parent, settings)
            if reasons and on_stale is OnStale.ERROR:
                raise MismatchError(
                    f"{self.directory}: stage {stage} is stale: {'; '.join(reasons)}; begin it "
                    "again with policy=OnStage.AGAIN or stale=OnStale.AGAIN, or skip it with "
                    "checkpoint= if its result is right all the same"
                )
            if not reasons and record.status != "started":
                return _told(StageAction.REUSE, parent, result=self.result(stage))
            if not reasons and newest(self.directory / stage) is not None:
                return _told(StageAction.RESUME, parent, resume=Resume.MUST)
        is_again = policy is OnStage.AGAIN or bool(reasons)
        if not is_again and newest(self.directory / stage) is not None and record is None:
            raise InvalidInputError(
                f"{self.directory / stage}: holds checkpoints of a training that was not entered, "
                "so what it began with is not known; skip the stage with one of them "
                "(checkpoint=), or begin beside them with policy=OnStage.AGAIN"
            )
        write_record(
            self.directory,
            stage,
            StageRecord(status="started", parent=_parent_record(parent), settings=settings),
        )
        resume = Resume.NEVER if is_again else Resume.AUTO
        return _told(StageAction.BEGIN, parent, resume=resume, stale=reasons)

    def _skip(self, stage: str, given: Path | None) -> dict[str, Any]:
        if given is not None:
            write_record(self.directory, stage, self._described(given, "adopted"))
        elif self.result(stage) is None:
            if self.stage(stage).after is None:
                raise InvalidInputError(
                    f"{self.directory}: stage {stage} cannot be skipped: it has no result, and "
                    "there is no stage before it; name a checkpoint with checkpoint="
                )
            self._parent(stage)
            write_record(self.directory, stage, StageRecord(status="skipped"))
        return _told(StageAction.SKIP, None, result=self.result(stage))

    def _stale(
        self,
        stage: str,
        record: StageRecord,
        parent: StageResult | None,
        settings: Mapping[str, Any],
    ) -> list[str]:
        reasons = []
        if record.checkpoint is not None:
            try:
                self._checked(stage, record)
            except (NotFoundError, MismatchError) as error:
                reasons.append(str(error))
        if record.status == "adopted":
            return reasons
        began, now = record.parent, _parent_record(parent)
        if began != now:
            reasons.append(f"it began with {_shown(began)}, now there is {_shown(now)}")
        changed = [
            f"{name} was {record.settings.get(name)!r:.60}, is {settings.get(name)!r:.60}"
            for name in sorted({*record.settings, *settings})
            if record.settings.get(name) != settings.get(name)
        ]
        return [*reasons, *changed]

    def finish(self, stage: str, given: Path | None, metrics: dict[str, Any]) -> StageResult:
        record = read_records(self.directory).get(stage)
        if record is None or record.status != "started":
            raise InvalidInputError(
                f"{self.directory}: stage {stage} was not entered, so what it began with is not "
                "known; call enter() before training"
            )
        entry = None if given is not None else newest(self.directory / stage)
        path = given if entry is None else entry.path
        if path is None:
            raise NotFoundError(
                f"{self.directory / stage}: no committed checkpoint to finish with",
                path=self.directory / stage,
            )
        described = self._described(path, "finished")
        write_record(
            self.directory,
            stage,
            StageRecord(
                status="finished",
                checkpoint=described.checkpoint,
                checkpoint_id=described.checkpoint_id,
                weights_digest=described.weights_digest,
                step=described.step,
                metrics={**described.metrics, **metrics},
                parent=record.parent,
                settings=record.settings,
            ),
        )
        result = self.result(stage)
        assert result is not None, "it was recorded just now"
        return result

    def _described(self, path: Path, status: Status) -> StageRecord:
        checkpoint = Checkpoint.open(path)
        digest = None
        if isinstance(checkpoint, DirectoryCheckpoint):
            require_intact(checkpoint, ["weights"])
            digest = weights_digest(checkpoint.manifest)
        return StageRecord(
            status=status,
            checkpoint=relative(path, self.directory),
            checkpoint_id=checkpoint.info.checkpoint_id,
            weights_digest=digest,
            step=checkpoint.info.step,
            metrics=dict(checkpoint.info.metrics),
        )

    def _parent(self, stage: str) -> StageResult | None:
        after = self.stage(stage).after
        if after is None:
            return None
        found = self.result(after)
        if found is None:
            raise InvalidInputError(
                f"{self.directory}: stage {stage} begins with the result of {after}, which has "
                f"none yet; train {after} first, or skip it with a checkpoint"
            )
        return found

    def result(self, stage: str) -> StageResult | None:
        record = read_records(self.directory).get(stage)
        if record is None or record.status == "started":
            return None
        if record.status == "skipped":
            after = self.stage(stage).after
            return None if after is None else self.result(after)
        return self._checked(stage, record)

    def _checked(self, stage: str, record: StageRecord) -> StageResult:
        """The recorded result, which has to be there still, and to be the same."""
        assert record.checkpoint is not None, "a stage with a result has a checkpoint"
        path = Path(os.path.normpath(self.directory / record.checkpoint))
        try:
            found = self._described(path, record.status)
        except StorageError:
            raise
        except CheckpointError as error:
            raise NotFoundError(
                f"the result of stage {stage} is gone: {error}", path=path
            ) from error
        was = (record.checkpoint_id, record.weights_digest)
        if was != (found.checkpoint_id, found.weights_digest):
            raise MismatchError(
                f"{path}: not the result that stage {stage} ended with: checkpoint "
                f"{found.checkpoint_id}, weights {found.weights_digest}; recorded {was[0]}, "
                f"weights {was[1]}"
            )
        return StageResult(
            stage=stage,
            path=path,
            checkpoint_id=record.checkpoint_id,
            weights_digest=record.weights_digest,
            step=record.step,
            metrics=record.metrics,
        )

    def newest(self, stage: str) -> Path | None:
        found = self.result(stage)
        if found is not None and found.stage == stage:
            return found.path
        entry = newest(self.directory / stage)
        return None if entry is None else entry.path

    def finished(self) -> list[str]:
        records = read_records(self.directory)
        return [n for n in self.stages if n in records and records[n].checkpoint is not None]

    def stage(self, name: str) -> Stage:
        if name not in self.stages:
            raise InvalidInputError(
                f"no stage {name!r} in this pipeline; it has {', '.join(self.stages)}"
            )
        return self.stages[name]


def _check_stages(stages: Sequence[Stage]) -> None:
    known: set[str] = set()
    for stage in stages:
        if not stage.name.replace("_", "").replace("-", "").isalnum() or stage.name in known:
            raise InvalidInputError(
                f"stage {stage.name!r}: expected a word of its own, which names a directory"
            )
        if stage.after is not None and stage.after not in known:
            raise InvalidInputError(
                f"stage {stage.name}: comes after {stage.after!r}, which is no stage before it"
            )
        known.add(stage.name)


def _plain(stage: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they come back after a restart, to be compared then."""
    try:
        plain: dict[str, Any] = strictjson.loads(strictjson.dumps(settings), where="settings")
    except UnencodableError as error:
        raise InvalidInputError(
            f"stage {stage}: settings: {error}; pass numbers, texts, lists and dicts"
        ) from error
    return plain


def _told(
    action: StageAction,
    parent: StageResult | None,
    *,
    resume: Resume = Resume.AUTO,
    result: StageResult | None = None,
    stale: Sequence[str] = (),
) -> dict[str, Any]:
    """The answer to `enter`, as the coordinator tells it."""
    return {
        "action": action.value,
        "weights": None if parent is None else str(parent.path),
        "resume": resume.value,
        "result": None if result is None else result.to_document(),
        "stale": list(stale),
    }


def _parent_record(parent: StageResult | None) -> Parent | None:
    if parent is None:
        return None
    return Parent(
        stage=parent.stage,
        checkpoint_id=parent.checkpoint_id,
        weights_digest=parent.weights_digest,
    )


def _shown(parent: Parent | None) -> str:
    if parent is None:
        return "fresh weights"
    return f"checkpoint {parent.checkpoint_id} of {parent.stage}"
