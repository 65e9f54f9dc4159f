"""How numbers, times and tables look in a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from milepost.storage.space import human

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["age", "counted", "human", "metrics_text", "number", "pairs", "table"]

_STEPS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def age(seconds: float | None) -> str:
    """A time span in its largest unit; `?` for None, `now` below a second.

    >>> age(7200), age(None)
    ('2 h', '?')
    """
    if seconds is None:
        return "?"
    for unit_s, unit in _STEPS:
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return "now"


def number(value: Any) -> str:
    """A metric in at most a few digits.

    >>> number(2.3456789), number(12), number(None)
    ('2.346', '12', '-')
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def counted(count: int, what: str) -> str:
    """A number and a noun.

    >>> counted(1, "file"), counted(2, "file")
    ('1 file', '2 files')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def metrics_text(metrics: Mapping[str, Any], *, limit: int = 2) -> str:
    """Metrics as `name value`; `...` when there are more."""
    shown = [f"{name} {number(value)}" for name, value in list(metrics.items())[:limit]]
    return ", ".join([*shown, "..."] if len(metrics) > limit else shown)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; columns named in `right` are flush right and never broken."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        is_right = name in right
        made.add_column(
            name,
            justify="right" if is_right else "left",
            no_wrap=is_right,
            overflow="fold",
        )
    return made


def pairs(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Lines of a name and its value; a long value goes on, indented."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        if value:
            made.add_row(name, value)
    console.print(made)
