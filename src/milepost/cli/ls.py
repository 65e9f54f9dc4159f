"""`milepost ls`: every checkpoint of a run, and everything beside them that is not one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.checkpointing.phases_text import phases_text
from milepost.cli.answer import Answer
from milepost.cli.text import age, counted, human, metrics_text, number, table
from milepost.errors import CheckpointError, InvalidInputError
from milepost.format.manifest import MANIFEST_NAME
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.run import RunEntry, RunListing, TornEntry, list_run
from milepost.layouts.trio_names import META_SUFFIX, split_suffix
from milepost.manager.prune import kept_entries
from milepost.manager.retention import BestMode, KeepBest, age_s, parse_best
from milepost.storage.intent import read_intent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PICKLES = (".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A committed checkpoint as it is listed. `save_s` is what its save took until the commit."""

    entry: RunEntry
    nbytes: int
    save_s: float
    age_s: float | None
    marks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A trio or a `.pt` file that lies in the run directory; `problem` when it cannot be opened."""

    name: str
    layout: str
    nbytes: int | None = None
    epoch: float | None = None
    step: int | None = None
    metrics: Mapping[str, Any] | None = None
    problem: str | None = None


def ls_answer(run: Path, *, best: str | None = None) -> Answer:
    """List the run; `best` is `METRIC[:min|max]`."""
    if (run / MANIFEST_NAME).exists():
        raise InvalidInputError(
            f"{run}: a checkpoint, not a run; look at it with: milepost show {run}, or list its "
            f"run: milepost ls {run.parent}",
            path=run,
        )
    listing = list_run(run)
    by = None if best is None else parse_best(best)
    rows = list(_rows(listing, _best_step(listing, by) if by else None, by))
    others = list(_others(run))
    document = {
        "run": run,
        "newest": listing.newest.step if listing.newest else None,
        "best": None if by is None else {"metric": by[0], "mode": by[1]},
        "checkpoints": [_row_document(row) for row in rows],
        "torn": [
            {"name": torn.name, "path": torn.path, "reason": _reason(torn)} for torn in listing.torn
        ],
        "unfinished": listing.unfinished,
        "pinned": listing.pinned,
        "others": [_other_document(other) for other in others],
    }
    return Answer(
        document=document,
        show=partial(_show, listing=listing, rows=rows, others=others, by=by),
    )


def _best_step(listing: RunListing, by: tuple[str, BestMode]) -> int | None:
    """The best step by a metric; `InvalidInputError` when no checkpoint has that metric."""
    metric, mode = by
    entries = kept_entries(listing)
    known = sorted({name for entry in entries for name in entry.metrics})
    if entries and metric not in known:
        raise InvalidInputError(
            f"{listing.run}: no checkpoint records a metric {metric!r}; recorded are: "
            f"{', '.join(known) or 'none'}"
        )
    return next(iter(KeepBest(1, metric, mode).keeps(entries)), None)


def _rows(listing: RunListing, best: int | None, by: tuple[str, BestMode] | None) -> Iterator[Row]:
    for entry in listing.committed:
        is_best = by is not None and entry.step == best and not entry.superseded
        marks = [
            ("newest", entry is listing.newest),
            ("best", is_best),
            ("pinned", entry.step in listing.pinned),
            ("superseded", entry.superseded),
        ]
        yield Row(
            entry=entry,
            nbytes=entry.manifest.nbytes + (entry.path / MANIFEST_NAME).stat().st_size,
            save_s=sum(entry.manifest.phases.values()),
            age_s=age_s(entry.manifest.created),
            marks=tuple(name for name, holds in marks if holds),
        )


def _reason(torn: TornEntry) -> str:
    """Why an entry does not count; the path in front is taken off, its name stands beside it."""
    place = torn.path / MANIFEST_NAME
    if torn.path.is_dir() and not place.exists():
        from milepost.layouts.huggingface import huggingface_stem

        if huggingface_stem(torn.path) is not None:
            return f"no {MANIFEST_NAME}: written by another program, or copied in part"
        return f"no {MANIFEST_NAME}: its save never finished, or it was copied in part"
    return torn.reason.removeprefix(f"{place}: ").removeprefix(f"{torn.path}: ")


def _others(run: Path) -> Iterator[Other]:
    intent = read_intent(run)
    names = {place.name for place in run.iterdir()} | {
        target for _, target in (intent.renames if intent else ())
    }
    names = {name for name in names if not name.startswith(".")}
    stems = {name.removesuffix(META_SUFFIX) for name in names if name.endswith(META_SUFFIX)}
    for stem in sorted(stems):
        yield _other(run, stem, "trio")
    for name in sorted(names):
        if not name.endswith(PICKLES) or split_suffix(name)[1] not in (".pt", ""):
            continue
        if split_suffix(name)[0] in stems:
            problem = f"not read: the trio {split_suffix(name)[0]!r} has the same name and counts"
            yield Other(name=name, layout="single-file", problem=problem)
        else:
            yield _other(run, name, "single-file")


def _other(run: Path, name: str, layout: str) -> Other:
    try:
        checkpoint = Checkpoint.open(run / name)
        info = checkpoint.info
        nbytes = checkpoint.nbytes
    except CheckpointError as error:
        return Other(name=name, layout=layout, problem=str(error).removeprefix(f"{run / name}: "))
    metrics = dict(info.metrics)
    if info.loss is not None:
        metrics.setdefault("loss", info.loss)
    return Other(
        name=name,
        layout=checkpoint.layout.value,
        nbytes=nbytes,
        epoch=info.epoch,
        step=info.step,
        metrics=metrics,
    )


def _row_document(row: Row) -> dict[str, Any]:
    manifest, entry = row.entry.manifest, row.entry
    return {
        "step": entry.step,
        "name": entry.name,
        "path": entry.path,
        "checkpoint_id": manifest.checkpoint_id,
        "parent_id": manifest.parent_id,
        "generation": manifest.generation,
        "epoch": manifest.epoch,
        "metrics": manifest.metrics,
        "nbytes": row.nbytes,
        "created": manifest.created,
        "age_s": row.age_s,
        "save_s": row.save_s,
        "save_nbytes_per_s": row.nbytes / row.save_s if row.save_s else None,
        "phases": manifest.phases,
        "phase_nbytes": manifest.phase_nbytes,
        "newest": "newest" in row.marks,
        "best": "best" in row.marks,
        "pinned": "pinned" in row.marks,
        "superseded": entry.superseded,
    }


def _other_document(other: Other) -> dict[str, Any]:
    return {name: getattr(other, name) for name in Other.__slots__}


# ---- for people


def _show(
    console: Console,
    *,
    listing: RunListing,
    rows: Sequence[Row],
    others: Sequence[Other],
    by: tuple[str, BestMode] | None,
) -> None:
    total = sum(row.nbytes for row in rows)
    count = counted(len(rows), "checkpoint")
    console.print(f"{listing.run}: {count}, {human(total)}", soft_wrap=True)
    if rows:
        console.print()
        console.print(_table(rows, by[0] if by else None, console.width))
    last = listing.newest
    if last is not None and last.manifest.phases:
        phases = phases_text(last.manifest.phases, last.manifest.phase_nbytes)
        console.print(f"\n{last.name} on rank 0: {phases}", soft_wrap=True)
    if listing.torn:
        console.print("\nnot checkpoints, never chosen and never counted:", style="yellow")
        for torn in listing.torn:
            console.print(f"  {torn.name}: {_reason(torn)}", soft_wrap=True)
    if listing.unfinished:
        saves = counted(len(listing.unfinished), "save")
        console.print(f"\nunfinished: {saves}, being written now or left by a dead job;")
        console.print("the next save removes what is left:")
        for name in listing.unfinished:
            console.print(f"  {name}", soft_wrap=True)
    if others:
        console.print("\nothers, by name:")
        console.print(_other_table(others))
        for other in others:
            if other.problem:
                console.print(f"  {other.name}: {other.problem}", soft_wrap=True)


def _table(rows: Sequence[Row], metric: str | None, width: int) -> Table:
    """One line a checkpoint: metrics have a column each, as many as the width allows."""
    with_generation = any(row.entry.manifest.generation for row in rows)
    columns = ["step", "gen", "epoch", "size", "age", "save", "GiB/s"]
    if not with_generation:
        columns.remove("gen")
    marks = max(len(", ".join(row.marks)) for row in rows)
    metrics = _metric_columns(rows, metric, width - _OTHERS_WIDTH - 5 * with_generation - marks)
    numbers = [*columns, *metrics]
    made = table(*numbers, "", right=numbers)
    for row in rows:
        manifest, gibs = row.entry.manifest, row.nbytes / 2**30
        cells = {
            "step": str(row.entry.step),
            "gen": str(manifest.generation),
            "epoch": number(manifest.epoch),
            "size": human(row.nbytes),
            "age": age(row.age_s),
            "save": f"{row.save_s:.1f} s" if row.save_s else "-",
            "GiB/s": f"{gibs / row.save_s:.2f}" if row.save_s else "-",
        }
        values = [number(manifest.metrics.get(name)) for name in metrics]
        made.add_row(
            *(cells[name] for name in columns),
            *values,
            ", ".join(row.marks),
            style="dim" if row.entry.superseded else None,
        )
    return made


_OTHERS_WIDTH = 52  # of the columns besides metrics and marks


def _metric_columns(rows: Sequence[Row], first: str | None, width: int) -> list[str]:
    """Names of metrics to show: the one asked for, losses, the rest; at least one."""
    names = {name for row in rows for name in row.entry.manifest.metrics}
    ordered = sorted(names, key=lambda name: (name != first, "loss" not in name, name))
    shown: list[str] = []
    for name in ordered:
        width -= max(len(name), 6) + 2
        if shown and width < 0:
            break
        shown.append(name)
    return shown


def _other_table(others: Sequence[Other]) -> Table:
    made = table("name", "layout", "step", "epoch", "size", "metrics", right=("step", "size"))
    for other in others:
        if not other.problem:
            made.add_row(
                other.name,
                other.layout,
                number(other.step),
                number(other.epoch),
                human(other.nbytes or 0),
                metrics_text(other.metrics or {}),
            )
    return made
