"""`migrate`: files of old layouts become trios, directories or single files, many at once.

A file is read by the safe unpickler alone. What is written appears complete or not at all, and a
source is taken away only after the written files were read again and compared bit by bit. A call
that was cut short, by a full disk for instance, is made again: what is done already is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from milepost.engine.write import WriteOptions
from milepost.errors import (
    CheckpointMigrationError,
    InvalidInputError,
)
from milepost.layouts.trio_names import trio_names
from milepost.storage.fileops import PathLike
from milepost.storage.space import free_nbytes, no_space
from milepost.tools.migrate_content import Reading
from milepost.tools.migrate_one import migrate_one
from milepost.tools.migrate_options import (
    Backup,
    Existing,
    MigrateMode,
    MigrateTarget,
    Migration,
    MigrationReport,
    OnDone,
    OnFound,
    Original,
    Outcome,
    Proof,
    Request,
    Search,
)
from milepost.tools.migrate_sources import Task, find_tasks, task_of
from milepost.tools.migrate_target import existing_parent

__all__ = [
    "Backup",
    "Existing",
    "MigrateMode",
    "MigrateTarget",
    "Migration",
    "MigrationReport",
    "Original",
    "Outcome",
    "Proof",
    "Search",
    "convert_legacy_checkpoint_to_split",
    "migrate",
]


def migrate(
    paths: Sequence[PathLike],
    *,
    to: MigrateTarget = MigrateTarget.TRIO,
    out: PathLike | None = None,
    search: Search = Search.TOP,
    original: Original = Original.KEEP,
    existing: Existing = Existing.COMPARE,
    backup: Backup = Backup.NONE,
    proof: Proof = Proof.BEFORE_REMOVING,
    mode: MigrateMode = MigrateMode.WRITE,
    allow: Sequence[str] = (),
    strip_prefixes: Sequence[str] = (),
    jobs: int = 1,
    options: WriteOptions | None = None,
    on_found: OnFound | None = None,
    on_done: OnDone | None = None,
) -> MigrationReport:
    """Convert checkpoint files of old layouts; one entry in the report for each that was found.

    A path is a file (`.pt`, `.pth`, `.bin`, `.ckpt`), its stem, a pattern, or a directory whose
    files are tried. The new checkpoint lies beside its source, or below `out`. What goes wrong with
    one is in its entry and keeps no other from being converted. Everything is carried over, or the
    file is refused with what cannot be; `_orig_mod.` is taken off names, and so are the segments of
    `strip_prefixes`. `allow` names classes whose instances become plain dicts of their fields.

    Mode and times of a source are those of the new files. Each job holds one checkpoint in memory.

    >>> report = migrate(["checkpoints"], mode=MigrateMode.DRY_RUN)  # doctest: +SKIP
    """
    if isinstance(paths, str | Path):
        raise InvalidInputError(f"paths={paths!r}: expected a list of paths")
    if jobs < 1:
        raise InvalidInputError(f"jobs={jobs}: expected a number from 1 up")
    request = Request(
        to=to,
        original=original,
        existing=existing,
        backup=backup,
        proof=proof,
        mode=mode,
        reading=Reading(allow=tuple(allow), strip_prefixes=tuple(strip_prefixes)),
        options=options or WriteOptions(),
    )
    tasks = find_tasks(paths, to=to, out=None if out is None else Path(out), search=search)
    if on_found is not None:
        on_found([task.source for task in tasks])
    found = _run(tasks, request, jobs, on_done)
    return MigrationReport(migrations=tuple(found if request.writes else _forecast(found, request)))


def _run(
    tasks: Sequence[Task], request: Request, jobs: int, on_done: OnDone | None
) -> list[Migration]:
    def one(task: Task) -> Migration:
        done = migrate_one(task, request)
        if on_done is not None:
            on_done(done)
        return done

    if jobs == 1:
        return [one(task) for task in tasks]
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _forecast(planned: Sequence[Migration], request: Request) -> list[Migration]:
    """The plans again, those for which there would be no room left as failures."""
    taken: dict[int, int] = {}
    result = []
    for one in planned:
        if one.outcome is Outcome.PLANNED and one.target is not None:
            place = existing_parent(one.target)
            device = place.stat().st_dev
            if free_nbytes(place) < taken.get(device, 0) + one.nbytes:
                error = no_space(place, one.nbytes)
                result.append(replace(one, outcome=Outcome.FAILED, error=error))
                continue
            taken[device] = taken.get(device, 0) + one.nbytes
            if one.removed and request.backup is Backup.NONE:
                source = one.source.parent.stat().st_dev
                taken[source] = taken.get(source, 0) - one.source_nbytes
        result.append(one)
    return result


def convert_legacy_checkpoint_to_split(
    path: PathLike, *, in_place: bool = False, overwrite: bool = False
) -> dict[str, Path]:
    """Convert one legacy file into a trio beside it; the paths of `weights`, `meta`, `extra_state`.

    `path` is the file or its stem. With `in_place` the legacy file is removed once the trio was
    read again and holds the same bits; with `overwrite` files of a trio are replaced.
    `CheckpointMigrationError` says why not: nothing there, a trio there, no training checkpoint,
    an unsafe pickle, a damaged file, no room. Then nothing has changed.
    """
    source = Path(path)
    if source.is_dir():
        raise CheckpointMigrationError(
            f"{source}: a directory, not a file; milepost migrate takes directories", path=source
        )
    done = migrate_one_file(
        source,
        Request(
            original=Original.REMOVE if in_place else Original.KEEP,
            existing=Existing.OVERWRITE if overwrite else Existing.ERROR,
        ),
    )
    if done.error is not None:
        raise CheckpointMigrationError(str(done.error), path=source) from done.error
    if done.outcome is not Outcome.MIGRATED:
        reasons = done.differences or done.notes
        raise CheckpointMigrationError(f"{source}: {'; '.join(reasons[:5])}", path=source)
    assert done.target is not None, "what was migrated has a target"
    weights, meta, extra_state = (
        done.target.with_name(name) for name in trio_names(done.target.name)
    )
    return {"weights": weights, "meta": meta, "extra_state": extra_state}


def migrate_one_file(path: Path, request: Request) -> Migration:
    """One file or stem, taken literally: no pattern, no directory."""
    return migrate_one(task_of(path, to=request.to), request)
