"""`milepost merge-models`, its declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.cli.verbs import OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "merge-models")(merge_models)


def merge_models(
    output_dir: OutputDir,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL[:WEIGHT]]...", help="More models, after --models."),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL[:WEIGHT]", help="A model, and its weight behind a colon."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(metavar="METHOD", help="linear, slerp, ties, ... (see the guide).")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="YAML", help="The merge in mergekit's form.")
    ] = None,
    base_model: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The model that differences are taken to.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Float type of the output.")
    ] = None,
    t: Annotated[
        float | None, typer.Option("--t", help="slerp: 0 the first, 1 the second.")
    ] = None,
    density: Annotated[
        float | None, typer.Option(help="Share of differences that is kept; for ties 0.6.")
    ] = None,
    lambda_: Annotated[
        float | None, typer.Option("--lambda", help="Factor of the merged difference.")
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="della: how far the chance to be kept varies.")
    ] = None,
    gamma: Annotated[
        float | None, typer.Option(help="breadcrumbs: share of the largest that is dropped.")
    ] = None,
    select_topk: Annotated[
        float | None, typer.Option(help="sce: share of elements that is merged.")
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Any other knob of the method."),
    ] = None,
    tokenizer_source: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", help="base, union, or the path of one of the models."),
    ] = None,
    allow_missing_tokenizer: Annotated[
        bool, typer.Option("--allow-missing-tokenizer", help="Merge models without a tokenizer.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of what a method draws at random.")] = 0,
    *,
    options: Any,
) -> Any:
    """Make one model of several of one architecture.

    Either --models with --method, or --config.
    """
    from milepost.errors import InvalidInputError
    from milepost.tools.merge_models import Tokenizers
    from milepost.tools.merge_models import merge_models as run
    from milepost.tools.merging.recipe import recipe_from_command_line, recipe_from_yaml

    knobs = {
        "t": t,
        "density": density,
        "lambda": lambda_,
        "epsilon": epsilon,
        "gamma": gamma,
        "select_topk": select_topk,
    }
    named = [*(models or ()), *(more or ())]
    given = {name: value for name, value in knobs.items() if value is not None}
    if config is not None:
        others = {"models": named, "method": method, "base-model": base_model, "dtype": dtype}
        extra = [f"--{name}" for name, value in {**others, **given}.items() if value]
        if extra:
            raise InvalidInputError(f"--config says all of the merge; leave out {', '.join(extra)}")
        recipe = recipe_from_yaml(config)
    else:
        recipe = recipe_from_command_line(
            named,
            method=method,
            base=base_model,
            dtype=dtype,
            knobs=given,
            settings=parameter or (),
            tokenizer=tokenizer_source,
            seed=seed,
        )
    missing = Tokenizers.ALLOW_MISSING if allow_missing_tokenizer else Tokenizers.REQUIRE
    return run(recipe, output_dir, tokenizers=missing, options=options)
