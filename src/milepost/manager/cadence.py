"""When a manager saves: its policy, the signals that came, and what is put off."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from milepost.errors import InvalidInputError
from milepost.manager.save_policies import SaveContext, SavePolicy, signals_of
from milepost.manager.signals import SignalListener

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A save under way: when it began, and the signals that it answers."""

    start_s: float
    signals: frozenset[signal.Signals]


class Cadence:
    """The decision to save. `grace_s` is how long a job lives after SIGTERM."""

    def __init__(self, policy: SavePolicy | None, grace_s: float) -> None:
        self.policy, self.grace_s = policy, grace_s
        self._last_step: int | None = None
        self._last_s = time.monotonic()
        self._asked = False
        self._depth = 0
        self._deferred = False
        signals = signals_of([policy] if policy is not None else [])
        self.listener = SignalListener(signals) if signals else None

    @property
    def stop_requested(self) -> bool:
        if self.listener is None or not self.listener.seen(signal.SIGTERM):
            return False
        # Between a decision and this question a signal may come. Who relies on the decisions gets
        # a save first, and is told to stop after it.
        return not (self._asked and signal.SIGTERM in self.listener.pending())

    @property
    def in_accumulation(self) -> bool:
        return self._depth > 0

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def is_due(self, step: int) -> bool:
        """Whether the policy wants a save, or wanted one that was put off."""
        if self.policy is None:
            raise InvalidInputError(
                "this manager has no save policy; pass one, such as save=EveryNSteps(500), or call "
                "save()"
            )
        self._asked = True
        return self._deferred or self.policy.should_save(self.context(step))

    def put_off(self) -> None:
        self._deferred = True

    def context(self, step: int) -> SaveContext:
        return SaveContext(
            step=step,
            now_s=time.monotonic(),
            last_saved_s=self._last_s,
            last_saved_step=self._last_step,
            signals=self.listener.pending() if self.listener is not None else frozenset(),
        )

    def begin(self) -> Begun:
        pending = self.listener.pending() if self.listener is not None else frozenset()
        return Begun(start_s=time.monotonic(), signals=pending)

    def end(self, step: int, begun: Begun) -> None:
        """A save is done; signals that came while it ran ask for another one."""
        self.stands_at(step)
        self._deferred = False
        if self.listener is None:
            return
        self.listener.clear(begun.signals)
        seconds = self._last_s - begun.start_s
        if seconds > self.grace_s:
            logger.warning(
                "the save took %.1f s, a job is killed %.1f s after SIGTERM: an emergency save "
                "may not finish, and then the one before it counts",
                seconds,
                self.grace_s,
            )

    def stands_at(self, step: int | None) -> None:
        """The training is at a saved step now."""
        self._last_step, self._last_s = step, time.monotonic()
