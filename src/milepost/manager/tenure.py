"""What a manager holds while it lives: the lease of its directory, and signals."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

from milepost.manager.signals import SignalListener
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


def hold(
    owner: object, lease: RunLease | None, listener: SignalListener | None
) -> weakref.finalize[[RunLease | None, SignalListener | None, int], object]:
    """Give both back when the result is called, when `owner` is collected, or at the end."""
    return weakref.finalize(owner, _release, lease, listener, os.getpid())


def _release(lease: RunLease | None, listener: SignalListener | None, pid: int) -> None:
    if os.getpid() != pid:  # a forked child holds nothing
        return
    if listener is not None:
        listener.close()
    if lease is not None:
        lease.__exit__(None, None, None)
