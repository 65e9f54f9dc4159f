"""The application: which modules bring commands, and how it ends when something is wrong.

A module brings commands by a function `register(app)` that declares them. Declarations import
nothing but typer; a command imports its body when it runs, so `milepost --help` stays quick.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from milepost.cli.exit_codes import ExitCode

COMMAND_MODULES = (
    "milepost.cli.commands_read",
    "milepost.cli.commands_write",
    "milepost.cli.migrate",
    "milepost.cli.commands_hub",
    "milepost.cli.tools",
)

# typer bundles click or imports it, depending on its version: the class is found through its own.
_ClickException: Any = typer.BadParameter.__mro__[2]


class _ErrorLines:
    """Reports wrong usage as one `error: ...` line, as everything else."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        main: Any = super().main  # type: ignore[misc]
        run = partial(main, args, prog_name, complete_var, False, windows_expand_args, **extra)
        if not standalone_mode:
            return run()
        try:
            code = run()
        except _ClickException as error:
            code = _usage(error)
        except typer.Abort:
            print("error: interrupted", file=sys.stderr)
            code = ExitCode.INTERRUPTED
        sys.exit(code if isinstance(code, int) else ExitCode.OK)


class ErrorLineGroup(_ErrorLines, TyperGroup):
    """A group of commands."""


class ErrorLineCommand(_ErrorLines, TyperCommand):
    """One command that is a program of its own."""


def _usage(error: Any) -> int:
    """Print what is wrong with the command line; with no arguments at all, the help."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
        print(context.get_help(), file=sys.stderr)
        return ExitCode.USAGE
    command = context.command_path if context is not None else "milepost"
    print(f"error: {error.format_message()} (see {command} --help)", file=sys.stderr)
    return int(error.exit_code)


def make_app(modules: Sequence[str] = COMMAND_MODULES) -> typer.Typer:
    """The application with the commands of all modules."""
    app = typer.Typer(
        cls=ErrorLineGroup,
        name="milepost",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    for name in modules:
        importlib.import_module(name).register(app)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from milepost import __version__

        print(f"milepost {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Say the version."),
    ] = False,
) -> None:
    """Look at, check and care for checkpoints.

    Exit codes: 0 done; 1 damage found or a difference; 2 usage; 3 not found; 4 damaged;
    5 refused; 6 file system; 7 run in use; 8 needs a newer milepost or an extra; 9 fault of
    milepost.
    """
