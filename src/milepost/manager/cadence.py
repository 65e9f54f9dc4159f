"""When a manager saves: its policy, the signals that came, and what is put off."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from milepost.checkpointing.in_flight import saves
from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import Conversation, Rendezvous, Solo, together
from milepost.errors import InvalidInputError, SaveInFlightError
from milepost.manager.agreement import Signals, StepAgreement
from milepost.manager.save_policies import (
    SaveContext,
    SavePolicy,
    counts_steps_only,
    signals_of,
)
from milepost.manager.saving import Saving
from milepost.manager.signals import SignalListener

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SaveTurn:
    """One save: the signals that it answers, on any rank, and whether it was left out after all."""

    signals: Signals
    is_left_out: bool = False


class Cadence:
    """The decision to save. `grace_s` is how long a job lives after SIGTERM.

    Every rank of `talk` makes one and asks it at the same steps; all get the same answers. With
    `Saving.ASYNC` a save counts from the moment at which its state was copied. When it fails behind
    training the next step is due, so that all ranks are told, and the one after that.
    """

    def __init__(
        self,
        policy: SavePolicy | None,
        grace_s: float,
        talk: Conversation = Solo(),  # noqa: B008
        saving: Saving = Saving.WAIT,
    ) -> None:
        self.policy, self.grace_s = policy, grace_s
        self._is_async = saving is Saving.ASYNC
        self._last_step: int | None = None
        self._last_s = time.monotonic()
        self._asked = False
        self._depth = 0
        self._deferred = False
        self._is_alone = isinstance(talk, Solo)
        self._stops = False
        signals = signals_of([policy] if policy is not None else [])
        self.listener = SignalListener(signals) if signals else None
        self.agreement: StepAgreement | None = None
        needs_word = policy is not None and (self._is_async or not counts_steps_only(policy))
        if isinstance(talk, Rendezvous) and needs_word:
            self.agreement = StepAgreement(talk, wants=self._wants, pending=self._pending)
        if self.listener is not None and self.agreement is not None:
            self.listener.on_arrival = self.agreement.ring
            if self.listener.pending():  # before anybody could be told
                self.agreement.ring()

    @property
    def stop_requested(self) -> bool:
        if not self._is_alone:
            return self._stops
        if self.listener is None or self.listener.seen_s(signal.SIGTERM) is None:
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
        if self._is_alone:
            is_due = self._deferred or self._has_failed
            return is_due or self.policy.should_save(self.context(step))
        is_agreed = self.agreement is not None and self.agreement.reach(step)
        return self._deferred or is_agreed or self.policy.should_save(self._timeless(step))

    @property
    def _has_failed(self) -> bool:
        """Whether the next save will raise what one behind training failed with."""
        return self._is_async and saves.has_failed

    def put_off(self) -> None:
        self._deferred = True

    def context(self, step: int, signals: Signals | None = None) -> SaveContext:
        """What there is to decide by; `signals` when they are not those of this rank."""
        return SaveContext(
            step=step,
            now_s=time.monotonic(),
            last_saved_s=self._last_s,
            last_saved_step=self._last_step,
            signals=self._pending() if signals is None else signals,
            saves_in_flight=saves.count,
        )

    def _timeless(self, step: int) -> SaveContext:
        """What every rank knows alike: no time has passed, no signal came, nothing has ended."""
        return SaveContext(
            step=step,
            now_s=0.0,
            last_saved_s=0.0,
            last_saved_step=self._last_step,
            saves_in_flight=1,
        )

    def _wants(self, step: int, signals: Signals) -> bool:
        """Whether time, signals or a failure behind training ask for a save that the ranks do not
        come to by themselves."""
        assert self.policy is not None, "what is agreed is what a policy wants"
        if self._has_failed:
            return True
        by_themselves = self.policy.should_save(self._timeless(step))
        return not by_themselves and self.policy.should_save(self.context(step, signals))

    def _pending(self) -> Signals:
        return self.listener.pending() if self.listener is not None else frozenset()

    @contextmanager
    def saving(self, step: int) -> Iterator[SaveTurn]:
        """Around a save, of every rank. It answers the signals that came before it, on any rank;
        those that come while it runs ask for another one."""
        start_s = time.monotonic()
        if self.agreement is not None:
            self.agreement.begin_save(step)
        done: int | None = None
        try:
            turn = SaveTurn(self._gathered())
            yield turn
            done = step
        except SaveInFlightError:
            raise
        except Exception:
            self._deferred = self._deferred or self._is_async
            raise
        finally:
            if self.agreement is not None:
                self.agreement.end_save(done)
        self._deferred = False
        if turn.is_left_out:
            return
        self.stands_at(step)
        if self.listener is not None:
            self.listener.clear(turn.signals)
            self._stops = self._stops or signal.SIGTERM in turn.signals
        if not self._is_async:
            self.took(self._last_s - start_s)

    def took(self, seconds: float) -> None:
        """A save took so long from its call until it was committed."""
        if self.listener is not None and seconds > self.grace_s:
            logger.warning(
                "the save took %.1f s, a job is killed %.1f s after SIGTERM: an emergency save "
                "may not finish, and then the one before it counts",
                seconds,
                self.grace_s,
            )

    def _gathered(self) -> Signals:
        """The signals pending on any rank; collective."""
        own = self._pending()
        if self._is_alone or self.listener is None:
            return own
        with converse() as talk, together(talk, "signals"):
            found = talk.gather("pending", json.dumps(sorted(own)).encode())
            union = sorted({number for raw in found for number in json.loads(raw)})
            told = talk.broadcast(
                "came", json.dumps(union).encode() if talk.is_coordinator else None
            )
        return frozenset(signal.Signals(number) for number in json.loads(told))

    def stands_at(self, step: int | None) -> None:
        """The training is at a saved step now."""
        self._last_step, self._last_s = step, time.monotonic()

    @property
    def seconds_left(self) -> float | None:
        """Until this process is killed; None when no SIGTERM came."""
        came_s = None if self.listener is None else self.listener.seen_s(signal.SIGTERM)
        return None if came_s is None else max(0.0, came_s + self.grace_s - time.monotonic())

    def close(self) -> None:
        """Give back the signals, and end what agrees with other ranks. May be called twice."""
        if self.agreement is not None:
            self.agreement.close()
        if self.listener is not None:
            self.listener.close()
