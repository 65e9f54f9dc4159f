"""`milepost merge-peft-adapters`, its declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.cli.verbs import OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "merge-peft-adapters")(merge_peft_adapters)


def merge_peft_adapters(
    output_dir: OutputDir,
    adapter_dir: Annotated[
        list[str],
        typer.Option(metavar="DIR[:WEIGHT]", help="An adapter, and its weight behind a colon."),
    ],
    base_model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The base; else what adapter_config.json names."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="TASK", help="causal_lm or classification; else as trained."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Float type of the output; else the base's.")
    ] = None,
    num_labels: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Labels that the head must have.")
    ] = None,
    tied: Annotated[
        str, typer.Option(metavar="WHICH", help="fold or separate: factors of a tied tensor.")
    ] = "fold",
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare outputs with the adapters' first (peft).")
    ] = False,
    *,
    options: Any,
) -> Any:
    """Fold LoRA adapters into their base, without loading the model.

    LoRA, rsLoRA, DoRA, of linear layers, embeddings and experts; sidecars are applied.
    """
    from milepost.errors import InvalidInputError
    from milepost.tools.merge_peft import Compare
    from milepost.tools.merge_peft import merge_peft_adapters as run
    from milepost.tools.merge_peft_config import MergeTask
    from milepost.tools.merge_peft_groups import TiedDelta

    chosen = None if task is None else task.replace("-", "_")
    if chosen is not None and chosen not in set(MergeTask):
        raise InvalidInputError(f"--task {task}: expected {' or '.join(MergeTask)}")
    if tied not in set(TiedDelta):
        raise InvalidInputError(f"--tied {tied}: expected {' or '.join(TiedDelta)}")
    return run(
        adapter_dir,
        output_dir,
        base=base_model,
        task=chosen,
        dtype=dtype,
        num_labels=num_labels,
        tied=tied,
        compare=Compare.OUTPUTS if verify else Compare.NOTHING,
        options=options,
    )
