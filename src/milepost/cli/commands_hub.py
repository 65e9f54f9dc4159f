"""The command that talks to the Hub: `push`. Declarations."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from milepost.cli.answer import give
from milepost.cli.commands_read import JsonOption, output_of


class Proof(StrEnum):
    """What `--verify` takes; `milepost.Verify` has the same, and imports torch."""

    DIGESTS = "digests"
    SIZES = "sizes"


class RelationChoice(StrEnum):
    """What `--relation` takes, as the Hub spells it."""

    FINETUNE = "finetune"
    ADAPTER = "adapter"
    MERGE = "merge"
    QUANTIZED = "quantized"


class VisibilityChoice(StrEnum):
    """What `--visibility` takes."""

    UNCHANGED = "unchanged"
    PUBLIC = "public"
    PRIVATE = "private"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(push)


def push(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint directory.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the Hub.")],
    include_training_state: Annotated[
        bool,
        typer.Option("--include-training-state", help="Also optimizer, schedule and random state."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and list the files; contact nothing.")
    ] = False,
    visibility: Annotated[
        VisibilityChoice, typer.Option(help="Who may see the repository.")
    ] = VisibilityChoice.UNCHANGED,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="The branch; main unless said.")
    ] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="Open a pull request; change no branch.")
    ] = False,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="The commit message.")] = None,
    base_model: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="A model of the Hub that this one is made from."),
    ] = None,
    relation: Annotated[
        RelationChoice | None, typer.Option(help="How it is made from that.")
    ] = None,
    verify: Annotated[
        Proof, typer.Option(help="What is proven before anything is sent.")
    ] = Proof.DIGESTS,
    keep_stale_weights: Annotated[
        bool,
        typer.Option(
            "--keep-stale-weights",
            help="Leave weights in the repository that are no part of this model.",
        ),
    ] = False,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Another Hub; HF_ENDPOINT says it too.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Publish a checkpoint as a model on the Hub, in one commit.

    Weights and what a loader needs; training state only when asked for. The token is the one that
    `hf auth login` keeps, or HF_TOKEN.
    """
    from milepost.checkpointing.load import Verify
    from milepost.cli.push import push_answer
    from milepost.hf.publish_card import BaseModelRelation
    from milepost.tools.export import TrainingState
    from milepost.tools.publish import PublishMode, PublishTo, StaleWeights, Visibility

    state = TrainingState.INCLUDE if include_training_state else TrainingState.LEAVE_OUT
    give(
        lambda: push_answer(
            path,
            repo,
            training_state=state,
            mode=PublishMode.DRY_RUN if dry_run else PublishMode.UPLOAD,
            to=PublishTo.PULL_REQUEST if create_pr else PublishTo.BRANCH,
            visibility=Visibility(visibility.value),
            stale=StaleWeights.KEEP if keep_stale_weights else StaleWeights.REMOVE,
            verify=Verify(verify.value),
            revision=revision,
            message=message,
            base_model=base_model,
            relation=None if relation is None else BaseModelRelation(relation.value),
            endpoint=endpoint,
        ),
        output_of(as_json),
    )
