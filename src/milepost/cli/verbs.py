"""What all after-training verbs share, so that a verb's module only declares its own options.

    def register(app: typer.Typer) -> None:
        verb(app, "reshard")(reshard)

    def reshard(input_dir: InputDir, output_dir: OutputDir, *, options: Any) -> Any:
        \"\"\"Write the weights in parts of another size.\"\"\"
        from milepost.tools import reshard as tool

        return tool.reshard(input_dir, output_dir, options=options)

The function gets `options`, a `RewriteOptions`, and returns the `RewriteReport`; it runs inside the
handling of errors and imports its tool itself, so that declaring costs nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import typer

from milepost.cli.answer import Answer, give
from milepost.cli.commands_read import JsonOption, output_of

if TYPE_CHECKING:
    from milepost.tools.rewrite.options import RewriteOptions

InputDir: TypeAlias = Annotated[
    Path, typer.Option("--input-dir", metavar="PATH", help="The checkpoint, of any layout.")
]
OutputDir: TypeAlias = Annotated[
    Path, typer.Option("--output-dir", metavar="DIR", help="What to write; must not exist.")
]
Verb: TypeAlias = Callable[..., Any]


def _shared(
    max_shard_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Largest weight file, such as 5GB (the default)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="From headers alone: files, memory, problems.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Look at the output before it gets its name.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Threads that read, compute and write.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Let groups of tensors take this much together."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
    as_json: JsonOption = False,
) -> None:
    """The options that every verb takes."""


def verb(app: typer.Typer, name: str, **settings: Any) -> Callable[[Verb], Verb]:
    """Add `function` to `app` as the verb `name`, with the shared options behind its own.

    Options are accepted with underscores too (`--input_dir`). `settings` go to typer.
    """

    def add(function: Verb) -> Verb:
        shared = dict(inspect.signature(_shared).parameters)
        own = dict(inspect.signature(function).parameters)
        own.pop("options")
        hints = {**get_type_hints(_shared, include_extras=True)}
        hints |= get_type_hints(function, include_extras=True)

        def command(**values: Any) -> None:
            chosen = {key: values.pop(key) for key in shared}
            give(partial(_answer, function, values, chosen), output_of(chosen["as_json"]))

        parameters = [*own.values(), *shared.values()]
        keyword_only = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
            for parameter in parameters
        ]
        keyword_only.sort(key=lambda parameter: parameter.default is not inspect.Parameter.empty)
        described: Any = command
        described.__signature__ = inspect.Signature(keyword_only)
        described.__annotations__ = {p.name: p.annotation for p in keyword_only}
        described.__doc__, described.__name__ = function.__doc__, function.__name__
        context = {"token_normalize_func": _kebab}
        app.command(name, context_settings=context, **settings)(described)
        return function

    return add


def _kebab(word: str) -> str:
    """The spelling with hyphens of an option; what is no word of that kind stays."""
    return word.replace("_", "-") if re.fullmatch(r"-*[a-z][a-z0-9_-]*", word) else word


def _answer(function: Verb, values: dict[str, Any], chosen: dict[str, Any]) -> Answer:
    from milepost.cli.rewrite_answer import answer_of, progress

    with progress(is_shown=not chosen["quiet"]) as on_progress:
        report = function(**values, options=_options(chosen, on_progress))
    return answer_of(report)


def _options(chosen: dict[str, Any], on_progress: Any) -> RewriteOptions:
    from milepost.plan.parts import parse_nbytes
    from milepost.tools.rewrite.options import Check, Mode, RewriteOptions

    more: dict[str, Any] = {}
    if chosen["threads"] is not None:
        more["threads"] = chosen["threads"]
    if chosen["memory"] is not None:
        more["memory_nbytes"] = parse_nbytes(chosen["memory"])
    return RewriteOptions(
        max_shard_size=chosen["max_shard_size"],
        mode=Mode.DRY_RUN if chosen["dry_run"] else Mode.WRITE,
        check=Check.LOAD if chosen["check"] else Check.NONE,
        on_progress=on_progress,
        **more,
    )
