"""`milepost rename`, its declaration."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from milepost.cli.verbs import InputDir, OutputDir, verb


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verb(app, "rename")(rename)


def rename(
    input_dir: InputDir,
    output_dir: OutputDir,
    rule: Annotated[
        list[str],
        typer.Option(metavar="REGEX=>NEW", help="What to replace in names; may be repeated."),
    ],
    *,
    options: Any,
) -> Any:
    """Write the tensors under other names, by regular expressions.

    A rule that fits nothing is refused, and so are two names that become one.
    """
    from milepost.errors import InvalidInputError
    from milepost.tools.rename import rename as run

    rules = []
    for text in rule:
        pattern, arrow, new = text.partition("=>")
        if not arrow:
            raise InvalidInputError(f"--rule {text!r}: expected REGEX=>NEW")
        rules.append((pattern, new))
    return run(input_dir, output_dir, rules=rules, options=options)
