"""One checkpoint for all ranks: the coordinator names it, the others see the same one, all load."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from milepost._env import env_int
from milepost.checkpointing.capture import State
from milepost.checkpointing.fresh_moments import files_of_optimizers
from milepost.checkpointing.load import Verify, load
from milepost.checkpointing.load_request import Moments
from milepost.checkpointing.report import LoadReport
from milepost.checkpointing.world import converse
from milepost.engine.read import ReadOptions
from milepost.engine.rendezvous import together
from milepost.errors import DamagedError, LoadTornError, MismatchError, NotFoundError
from milepost.layouts.checkpoint import Checkpoint
from milepost.layouts.directory import DirectoryCheckpoint
from milepost.manager.resume import patiently, require_sound
from milepost.manager.schedules import schedule_notes, settings_of

T = TypeVar("T")

_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True)
class Damage:
    """What is proven wrong with a checkpoint."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A checkpoint of the run as the coordinator sees it; `name` is its entry in the run."""

    name: str
    checkpoint_id: str
    generation: int


def load_from(
    path: Path, state: State, options: dict[str, Any], proof: Proof | None, named: Named | None
) -> LoadReport:
    """Prove what has not been proven yet, then load: only that touches the state. Collective.

    `options` are keywords of `milepost.load`. With `named`, every rank must see that checkpoint at
    its `path`. `DamagedError` on all ranks when one finds wrong bytes; what a rank cannot read is
    tried again, then raised on all.
    """
    before = {key: settings_of(value) for key, value in state.items()}
    torn = prove(path, proof, named) if proof is not None else None
    if torn is not None:
        options = {**options, "moments": Moments.FRESH}
    is_proven_late = proof is not None and proof.verify is Verify.WHILE_READING
    verify = Verify.WHILE_READING if is_proven_late else Verify.SIZES
    report = patiently(lambda: load(path, state, verify=verify, **options), path)
    if torn is not None:
        report.fresh_moments = dict.fromkeys(report.fresh_moments, f"as allowed, after {torn}")
    for key, settings in before.items():
        report.notes += schedule_notes(key, settings, settings_of(state[key]))
    return report


@dataclass(frozen=True, slots=True)
class Proof:
    """What to prove of a checkpoint, and what will become of its optimizer state."""

    verify: Verify
    moments: Moments


def prove(path: Path, proof: Proof, named: Named | None) -> str | None:
    """Return when the checkpoint at `path` is sound; collective.

    Optimizer state is not asked for where moments begin afresh. Where they may, the text says what
    is wrong with it, and it alone.
    """
    is_fresh = proof.moments is Moments.FRESH
    try:
        _prove(path, proof.verify, named, with_optimizers=not is_fresh)
    except DamagedError as error:
        if proof.moments is not Moments.FRESH_IF_UNUSABLE:
            raise
        _prove(path, proof.verify, named, with_optimizers=False)
        return str(error)
    return None


def _prove(path: Path, verify: Verify, named: Named | None, *, with_optimizers: bool) -> None:
    threads = ReadOptions().threads
    with converse() as talk:
        if named is not None and talk.world_size > 1:
            with together(talk, "seen"):
                require_seen(path, named)
        if verify is Verify.DIGESTS:
            with together(talk, "sound"):
                share = (talk.rank, talk.world_size)
                patiently(lambda: _require_sound(path, threads, share, with_optimizers), path)


def _require_sound(path: Path, threads: int, share: tuple[int, int], with_optimizers: bool) -> None:
    checkpoint = Checkpoint.open(path)
    leave_out: frozenset[str] = frozenset()
    if isinstance(checkpoint, DirectoryCheckpoint) and not with_optimizers:
        leave_out = files_of_optimizers(checkpoint.manifest)
    require_sound(checkpoint, threads, share, leave_out)


def damage_of(action: Callable[[], T]) -> T | Damage:
    """The result, or what is proven wrong with the checkpoint; the same on all ranks."""
    try:
        return action()
    except DamagedError as error:
        return Damage(str(error))
    except LoadTornError as error:
        if not isinstance(error.__cause__, DamagedError):
            raise
        return Damage(str(error.__cause__))


def require_seen(path: Path, named: Named) -> None:
    """Return once this rank sees the checkpoint that the coordinator named, whole.

    A network file system shows a name, or the files behind it, to other hosts a while later, so
    what is missing is waited for. `MismatchError` when this rank goes on seeing something else:
    the coordinator sees it whole, so it is not damaged.
    """
    deadline_s = time.monotonic() + env_int("MILEPOST_VISIBLE_S")
    while (found := _seen_instead(path, named)) is not None:
        if time.monotonic() > deadline_s:
            raise MismatchError(
                f"{path}: rank 0 resumes from checkpoint {named.checkpoint_id} of generation "
                f"{named.generation}, here {found}; give all ranks the same directory"
            )
        time.sleep(_PAUSE_S)


def _seen_instead(path: Path, named: Named) -> str | None:
    """What is at `path` in place of the named checkpoint; None when it is there."""
    try:
        checkpoint = DirectoryCheckpoint(path)
        manifest = checkpoint.manifest
        damage = [f"{entry.name} {how}" for entry, how in checkpoint.damage if entry.role != "info"]
    except NotFoundError:
        return "is none"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return "is none"
        raise
    if manifest.checkpoint_id != named.checkpoint_id:
        return f"is {manifest.checkpoint_id} of generation {manifest.generation}"
    return f"{'; '.join(damage[:3])}" if damage else None
