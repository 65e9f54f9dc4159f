"""What a pipeline of stages is made of, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from milepost.manager.resume import Resume


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage; `after` is the one with whose result its weights begin, None for fresh weights."""

    name: str
    after: str | None = None


LANGUAGE_MODEL_STAGES = (
    Stage("pretrain"),
    Stage("sft", after="pretrain"),
    Stage("dpo", after="sft"),
    Stage("verifier"),
)


class OnStage(Enum):
    """What to do with a stage."""

    AUTO = "auto"
    """Take the result that is there, else go on where the stage was left, else begin."""
    SKIP = "skip"
    """Do not train: take a result that is named or there; without one, that of the stage before."""
    AGAIN = "again"
    """Begin again, in a new generation beside what is there."""


class OnStale(Enum):
    """What to do with a result that does not belong to what is there now."""

    ERROR = "error"
    AGAIN = "again"
    """Begin the stage again."""


class StageAction(Enum):
    """What is to be done with a stage that was entered."""

    BEGIN = "begin"
    RESUME = "resume"
    REUSE = "reuse"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """A checkpoint that a stage ended with. The id and the digest are None for a directory of
    weights that Milepost did not write."""

    stage: str
    path: Path
    checkpoint_id: str | None
    weights_digest: str | None
    step: int | None
    metrics: Mapping[str, Any]

    def to_document(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "path": str(self.path)}

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> StageResult:
        """What `to_document` gave."""
        return StageResult(**{**document, "path": Path(document["path"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStart:
    """The answer of `StagePipeline.enter`.

    Train when `action` is `BEGIN` or `RESUME`: in `directory`, with a manager made with `resume`,
    and with a model built from `weights` (None: fresh weights). `result` is what to use otherwise;
    it is another stage's after a skip. `stale` says why an older result is not used.
    """

    stage: str
    action: StageAction
    directory: Path
    weights: Path | None
    resume: Resume
    result: StageResult | None
    stale: tuple[str, ...] = ()
