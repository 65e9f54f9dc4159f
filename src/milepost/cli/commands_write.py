"""The commands that change or make something: `prune`, `pin`, `unpin`, `export`. Declarations."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from milepost.cli.answer import give
from milepost.cli.commands_read import JsonOption, output_of

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory that holds checkpoints.")
]
StepsArgument = Annotated[list[int], typer.Argument(metavar="STEP...", help="Their steps.")]


class Target(StrEnum):
    """What `export --to` takes; `milepost.tools.export` has the same, and imports torch."""

    DIRECTORY = "directory"
    TRIO = "trio"
    SINGLE_FILE = "single-file"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    for command in (prune, pin, unpin, export):
        app.command()(command)


def prune(
    run: RunArgument,
    keep: Annotated[
        list[str],
        typer.Option(
            metavar="POLICY",
            help="last:3, best:2:loss:min, every:1000, newer-than:7d or all; "
            "given several times, what any of them keeps stays.",
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go; change nothing.")
    ] = False,
    superseded: Annotated[
        bool,
        typer.Option("--superseded", help="Also remove checkpoints that a later resume left."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove checkpoints that no retention policy keeps.

    Never the newest, pinned ones, or what is not a committed checkpoint.
    """
    from milepost.cli.prune import prune_answer
    from milepost.manager.prune import PruneMode, Superseded

    give(
        lambda: prune_answer(
            run,
            keep,
            superseded=Superseded.REMOVE if superseded else Superseded.KEEP,
            mode=PruneMode.DRY_RUN if dry_run else PruneMode.REMOVE,
        ),
        output_of(as_json),
    )


def pin(run: RunArgument, steps: StepsArgument, as_json: JsonOption = False) -> None:
    """Pin checkpoints: nothing removes them any more."""
    from milepost.cli.prune import pin_answer
    from milepost.manager.pins import pin_steps

    give(lambda: pin_answer(run, pin_steps(run, steps)), output_of(as_json))


def unpin(run: RunArgument, steps: StepsArgument, as_json: JsonOption = False) -> None:
    """Take pins off again."""
    from milepost.cli.prune import pin_answer
    from milepost.manager.pins import unpin_steps

    give(lambda: pin_answer(run, unpin_steps(run, steps)), output_of(as_json))


def export(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint of any layout.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="What to write; must not exist.")],
    to: Annotated[Target, typer.Option(help="The layout to write.")] = Target.DIRECTORY,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest weight file of a directory.")
    ] = "5GB",
    with_training_state: Annotated[
        bool,
        typer.Option("--with-training-state", help="Also optimizer, schedule and random state."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint anew in another layout.

    A directory is a complete Hugging Face model where the source has a config.
    """
    from milepost.cli.export import export_answer
    from milepost.tools.export import TrainingState

    state = TrainingState.INCLUDE if with_training_state else TrainingState.LEAVE_OUT
    give(
        lambda: export_answer(
            path,
            out,
            to=to.value,
            max_shard_size=max_shard_size,
            training_state=state,
        ),
        output_of(as_json),
    )
