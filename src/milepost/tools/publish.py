"""`publish`: a checkpoint becomes a model on the Hub, in one commit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from milepost.adapters.kinds import ADAPTER_CONFIG
from milepost.checkpointing.load import Verify
from milepost.errors import InvalidInputError
from milepost.format.manifest import MANIFEST_NAME
from milepost.hf.aux_files import CARD, CONFIG
from milepost.hf.card import is_hub_id
from milepost.hf.publish_card import BaseModelRelation, CardFacts, published_card
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.storage.fileops import PathLike
from milepost.tools.export import TrainingState
from milepost.tools.publish_files import (
    Publication,
    collect,
    document_of,
    openable,
    sealed_manifest,
    verify_published,
)

_REPO = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
# Types of adapters that peft does not know, so that it refuses them and does not load a part.
_NOT_PEFT = frozenset({"EXPERT_LORA", "LORA_WITH_EP_EXPERT_LORA"})


class PublishMode(Enum):
    """Whether anything is sent."""

    UPLOAD = "upload"
    DRY_RUN = "dry-run"
    """Everything is checked and listed; nothing is contacted."""


class PublishTo(Enum):
    """Where the commit goes."""

    BRANCH = "branch"
    PULL_REQUEST = "pull-request"


class Visibility(Enum):
    """Who may see the repository."""

    UNCHANGED = "unchanged"
    """As it is; a new one as the account has it by default."""
    PUBLIC = "public"
    PRIVATE = "private"
    """Refused for a repository that is there and public."""


class StaleWeights(Enum):
    """What happens to weights in the repository that are no part of what is published.

    Loaders would take them: `model.safetensors` before the parts that an index names, and an
    adapter on top of a model.
    """

    REMOVE = "remove"
    """They are removed in the same commit; the repository's history keeps them."""
    KEEP = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What was published, or would be: bytes by file name, and names that were removed.

    `commit` and `url` are those of the commit, None for a dry run; `pull_request` is its address.
    """

    repo: str
    files: Mapping[str, int]
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    commit: str | None = None
    url: str | None = None
    pull_request: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def publish(
    path: PathLike,
    repo: str,
    *,
    training_state: TrainingState = TrainingState.LEAVE_OUT,
    mode: PublishMode = PublishMode.UPLOAD,
    to: PublishTo = PublishTo.BRANCH,
    visibility: Visibility = Visibility.UNCHANGED,
    stale: StaleWeights = StaleWeights.REMOVE,
    verify: Verify = Verify.DIGESTS,
    revision: str | None = None,
    message: str | None = None,
    base_model: str | Sequence[str] | None = None,
    relation: BaseModelRelation | None = None,
    endpoint: str | None = None,
    token: str | None = None,
    attempts: int = 5,
) -> PublishReport:
    """Publish the checkpoint at `path` as the model `repo` of the Hub, in one commit.

    Weights, configuration, tokenizer, remote code and sidecars; training state only when asked for.
    A file whose name begins with `_` or `.` never goes along. The card gets the tag `milepost`,
    where the model comes from, and its relation to `base_model` (as given, or as an adapter or a
    configuration says); no path of this machine. `verify` proves the bytes first. Requests that
    fail for a while are made again, `attempts` in all. Not collective: one rank calls it.

    Raises `PublishError` when the Hub refuses or is not reached, `DamagedError` for a checkpoint
    that is torn or changed, `FormatError` for slices per rank, `InvalidInputError` when a sidecar
    that the weights need is absent, and for layouts that no loader of the Hub knows.
    """
    if not _REPO.fullmatch(repo) or ".." in repo or len(repo) > 96:
        raise InvalidInputError(f"repository {repo!r}: expected NAME or OWNER/NAME")
    if attempts < 1:
        raise InvalidInputError(f"attempts is {attempts}, expected at least 1")
    checkpoint = openable(Path(path))
    found = collect(checkpoint, training_state)
    bases = [base_model] if isinstance(base_model, str) else list(base_model or ())
    _add_card(checkpoint, found, repo, bases, relation)
    if training_state is TrainingState.INCLUDE and isinstance(checkpoint, DirectoryCheckpoint):
        found.put(MANIFEST_NAME, sealed_manifest(checkpoint, dict(found.documents)))
    verify_published(checkpoint, found, verify)
    if mode is PublishMode.DRY_RUN:
        return PublishReport(repo=repo, files=found.sizes(), notes=tuple(found.notes))
    from milepost.tools.publish_upload import Hub

    hub = Hub(repo, endpoint=endpoint, token=token, attempts=attempts)
    return hub.upload(
        found,
        to=to,
        visibility=visibility,
        stale=stale,
        revision=revision,
        message=message or f"Publish {checkpoint.path.name} with Milepost",
    )


def _add_card(
    checkpoint: Checkpoint,
    found: Publication,
    repo: str,
    base_models: Sequence[str],
    relation: BaseModelRelation | None,
) -> None:
    adapter = document_of(found, ADAPTER_CONFIG)
    config = document_of(found, CONFIG)
    wrong = [name for name in base_models if not is_hub_id(name)]
    if wrong:
        raise InvalidInputError(
            f"base_model {', '.join(wrong)}: expected models of the Hub, OWNER/NAME; a path of "
            "this machine means nothing to others"
        )
    known = [adapter.get("base_model_name_or_path"), config.get("_name_or_path")]
    bases = base_models or [n for n in known if isinstance(n, str) and is_hub_id(n)][:1]
    default = BaseModelRelation.ADAPTER if adapter else BaseModelRelation.FINETUNE
    is_peft = bool(adapter) and adapter.get("peft_type") not in _NOT_PEFT
    facts = CardFacts(
        title=repo.rpartition("/")[2],
        base_models=[name for name in bases if name != repo],
        relation=relation or default,
        library_name="peft" if is_peft else "transformers" if "model_type" in config else None,
        provenance=_provenance(checkpoint),
    )
    card, notes = published_card(found.read(CARD), facts)
    found.put(CARD, card)
    found.notes += notes


def _provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    """What others may know: no command line, no host, no path."""
    info = checkpoint.info
    writer = info.extra.get("writer") or {}
    made_by = (info.extra.get("provenance") or {}).get("made_by")
    values = {
        "checkpoint": info.checkpoint_id,
        "parent": info.extra.get("parent_id"),
        "step": info.step,
        "epoch": info.epoch,
        "metrics": {n: v for n, v in info.metrics.items() if v is not None},
        "created": info.created,
        "made_by": made_by.get("verb") if isinstance(made_by, Mapping) else None,
        "written_by": {n: v for n, v in writer.items() if v is not None},
    }
    return {name: value for name, value in values.items() if value not in (None, {}, "")}
