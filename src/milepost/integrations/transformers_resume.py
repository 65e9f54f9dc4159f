"""Which checkpoint a Trainer goes on from, proven before anything is read from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from milepost._warn import warn_user
from milepost.checkpointing.load import Verify
from milepost.checkpointing.world import converse
from milepost.engine.read import ReadOptions
from milepost.engine.rendezvous import together
from milepost.errors import CheckpointWarning, DamagedError, NotCommittedError, NotFoundError
from milepost.format.digests import digest_of
from milepost.format.manifest import MANIFEST_NAME, STATE_NAME
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.manager.decide import decide
from milepost.manager.resume import patiently, require_sound
from milepost.manager.step_choice import all_damaged, look_at_run, newer_torn

TRAINER_STATE = "trainer_state.json"


def is_milepost(path: str | Path) -> bool:
    """Whether a directory holds a checkpoint that Milepost wrote; alike on all ranks, collective.

    `NotFoundError` when there is no such directory: a mistyped path is never a fresh run.
    `NotCommittedError` for one of Milepost's that has no manifest.
    """
    place = Path(path)

    def look() -> bool:
        if not place.is_dir():
            raise NotFoundError(
                f"{place}: no such checkpoint; correct resume_from_checkpoint", path=place
            )
        if (place / MANIFEST_NAME).is_file():
            return True
        if (place / STATE_NAME).is_file():
            raise NotCommittedError(
                f"{place}: has {STATE_NAME}, but no {MANIFEST_NAME}, which is written last: the "
                "directory was copied incompletely; use another checkpoint",
                path=place,
            )
        return False

    return bool(decide(look))


def newest_checkpoint(run: Path, verify: Verify) -> Path:
    """The newest checkpoint of `run` that is sound; collective.

    One that is proven damaged is passed over for the next older one, with a warning. What cannot be
    read is raised. `NotCommittedError` when there are only torn or foreign directories,
    `NotFoundError` when there is nothing, `DamagedError` when all are damaged.
    """
    told: dict[str, list[str]] = decide(lambda: _candidates(run))
    passed = told["torn"]
    for name in told["names"]:
        damage = _damage(lambda name=name: require_usable(run / name, verify))  # type: ignore[misc]
        if damage is None:
            for text in passed:
                warn_user(f"{run / name} is resumed from, not {text}", CheckpointWarning)
            return run / name
        passed.append(f"{name}: {damage}")
    raise all_damaged(run, passed)


def _candidates(run: Path) -> dict[str, list[str]]:
    """Names of the committed checkpoints, newest first, and what is torn beyond them."""
    listing = look_at_run(run)
    if listing is None or not (listing.committed or listing.torn):
        raise NotFoundError(
            f"{run}: no checkpoint to resume from; correct output_dir, or train without "
            "resume_from_checkpoint to begin anew",
            path=run,
        )
    torn = [f"{entry.name} ({entry.reason})" for entry in listing.torn]
    if not listing.committed:
        raise NotCommittedError(
            f"{run}: nothing was ever committed here, but it holds {'; '.join(torn[:5])}; name a "
            "checkpoint of the stock Trainer by its path, resume_from_checkpoint="
            f"{str(listing.torn[-1].path)!r}, or train without it to begin anew",
            path=run,
        )
    return {
        "names": [entry.name for entry in reversed(listing.current)],
        "torn": [f"{entry.name}: {entry.reason}" for entry in newer_torn(listing)],
    }


def _damage(prove: Callable[[], None]) -> str | None:
    try:
        prove()
    except DamagedError as error:
        return str(error)
    return None


def require_usable(path: Path, verify: Verify) -> None:
    """Prove the bytes of a checkpoint, each rank its share, and that the Trainer's own state is
    there; `DamagedError` on all ranks when it is not. Collective."""
    with converse() as talk, together(talk, "sound"):
        if verify is not Verify.SIZES:  # nothing is read yet that could prove itself
            threads, share = ReadOptions().threads, (talk.rank, talk.world_size)
            patiently(lambda: require_sound(Checkpoint.open(path), threads, share), path)
        _require_trainer_state(path)


def _require_trainer_state(path: Path) -> None:
    """The Trainer reads its step, its logs and the best metric from this file."""
    entry = DirectoryCheckpoint(path).manifest.file(TRAINER_STATE)
    place = path / TRAINER_STATE
    try:
        data = place.read_bytes()
    except FileNotFoundError:
        data = b""
    is_changed = entry is not None and entry.records is None and digest_of(data) != entry.digest
    if entry is None or not data or is_changed:
        raise DamagedError(
            f"{place}: {'is not what was saved' if data else 'is missing'}, and the Trainer goes "
            "on from it; use another checkpoint, or load the weights alone with milepost.load",
            path=place,
        )


def saved_keys(path: Path) -> set[str]:
    """The keys of the state that a checkpoint holds, its models included."""
    manifest = DirectoryCheckpoint(path).manifest
    return {*manifest.state, *manifest.models}


def saved_arguments(path: Path, name: str) -> dict[str, Any]:
    """The training arguments that a checkpoint holds as JSON; empty when it has none."""
    from milepost.format import strictjson

    place = path / name
    try:
        found = strictjson.loads(place.read_bytes(), where=str(place))
    except (FileNotFoundError, DamagedError):
        return {}
    return found if isinstance(found, dict) else {}
