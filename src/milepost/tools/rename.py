"""`rename`: the same tensors under other names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from milepost.errors import InvalidInputError
from milepost.storage.fileops import PathLike
from milepost.tools.rewrite.groups import passed
from milepost.tools.rewrite.options import RewriteOptions
from milepost.tools.rewrite.report import RewriteReport
from milepost.tools.rewrite.rewrite import Rewrite
from milepost.tools.rewrite.run import run_rewrite
from milepost.tools.rewrite.source import open_source


def rename(
    source: PathLike,
    output: PathLike,
    *,
    rules: Sequence[tuple[str, str]],
    options: RewriteOptions | None = None,
) -> RewriteReport:
    """Write the tensors of `source` under other names as the directory `output`.

    Each rule is a regular expression and what replaces each place in a name that it fits (`\\1` is
    its first group); all rules are applied, in order. A rule that fits no name and two names that
    become one are refused; other errors: see `run_rewrite`.

    >>> rename("in", "out", rules=[(r"^language_model\\.", "")])  # doctest: +SKIP
    """
    compiled = [(_compiled(pattern), new) for pattern, new in rules]
    if not compiled:
        raise InvalidInputError("rename: no rule was given, so nothing would change")
    opened = open_source(source)
    names = [*opened.tensors, *opened.tied, *opened.tied.values()]
    renamed = {name: _apply(compiled, name) for name in names}
    rewrite = Rewrite(
        verb="rename",
        sources=[opened],
        groups=[passed(tensor, name=renamed[tensor.name]) for tensor in opened.tensors.values()],
        arguments={"rules": [list(rule) for rule in rules]},
        tied={renamed[alias]: renamed[name] for alias, name in opened.tied.items()},
        counts={"renamed": sum(renamed[name] != name for name in opened.tensors)},
    )
    if len({renamed[alias] for alias in opened.tied}) < len(opened.tied):
        listed = ", ".join(opened.tied)
        rewrite.problems.refuse(f"{listed}: two of these names, which are tied, become one")
    for pattern, _ in compiled:
        if not any(pattern.search(name) for name in names):
            rewrite.problems.refuse(f"rule {pattern.pattern!r} fits no tensor")
    return run_rewrite(rewrite, output, options)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidInputError(f"rule {pattern!r}: not a regular expression: {error}") from None


def _apply(rules: Sequence[tuple[re.Pattern[str], str]], old: str) -> str:
    name = old
    for pattern, new in rules:
        try:
            name = pattern.sub(new, name)
        except (re.error, IndexError) as error:
            raise InvalidInputError(f"rule {pattern.pattern!r} => {new!r}: {error}") from None
    if not name:
        raise InvalidInputError(f"the rules leave nothing of the name {old!r}")
    return name
