"""What a manager holds while it lives: the lease of its directory, signals, helper threads."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import together
from milepost.manager.cadence import Cadence
from milepost.manager.mirror import Mirroring
from milepost.manager.resume import Resume
from milepost.manager.save_policies import SavePolicy
from milepost.manager.saving import Saving
from milepost.manager.step_choice import nothing_there
from milepost.storage.intent import finish_intent
from milepost.storage.lease import RunLease
from milepost.storage.space import storage_error


def take_lease(directory: Path) -> RunLease:
    """The lease of a directory, made when it is missing; an unfinished change is finished."""
    lease = RunLease.of(directory)
    try:
        lease.__enter__()
        try:
            finish_intent(directory)
        except BaseException:
            lease.__exit__(None, None, None)
            raise
    except OSError as error:
        raise storage_error(error, directory) from error
    return lease


def take(
    directory: Path,
    resume: Resume | Path,
    mirroring: Mirroring | None,
    save: SavePolicy | None,
    grace_s: float,
    saving: Saving,
) -> tuple[RunLease | None, Cadence]:
    """The coordinator takes the lease, all ranks listen; or none of them does. Collective."""
    lease: RunLease | None = None
    cadence: Cadence | None = None
    try:
        with converse() as talk, together(talk, "manager"):
            if talk.is_coordinator:
                mirrors = mirroring.mirrors if mirroring is not None else ()
                places = [directory, *(mirror.directory for mirror in mirrors)]
                if resume is Resume.MUST and not any(place.is_dir() for place in places):
                    raise nothing_there(directory)
                lease = take_lease(directory)
                if mirroring is not None:
                    mirroring.claim()
            cadence = Cadence(save, grace_s, talk, saving)
    except BaseException:
        if cadence is not None:
            cadence.close()
        if lease is not None:
            lease.__exit__(None, None, None)
        raise
    return lease, cadence


def hold(
    owner: object, lease: RunLease | None, cadence: Cadence
) -> weakref.finalize[[RunLease | None, Cadence, int], object]:
    """Give both back when the result is called, when `owner` is collected, or at the end."""
    return weakref.finalize(owner, _release, lease, cadence, os.getpid())


def _release(lease: RunLease | None, cadence: Cadence, pid: int) -> None:
    if os.getpid() != pid:  # a forked child holds nothing
        return
    cadence.close()
    if lease is not None:
        lease.__exit__(None, None, None)
