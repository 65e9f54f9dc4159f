"""At which step all ranks save, when a clock or a signal of one of them says that it is time.

Only the coordinator decides. Helper threads do the talking, so that a rank whose main thread waits
in a collective answers too: each posts the last step that its loop has decided, and all save at the
first step after the highest one. A rank that has answered decides no further step before it knows
the verdict. Between agreements a step costs a lock and nothing on the network.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

from milepost.engine.connections import clone_store, store_gone
from milepost.engine.rendezvous import Rendezvous
from milepost.engine.verdicts import pack_error, shared_error, unpack_error
from milepost.errors import CheckpointError, RankTimeoutError

logger = logging.getLogger(__name__)

WATCH_S = 0.2
"""How often the coordinator looks at its clock, and at whether a rank got a signal."""
_CLOSE_S = 5.0
_FOREVER = timedelta(days=3650)
_POLL_S = 0.01

Signals = frozenset[signal.Signals]


class StepAgreement:
    """The agreement of one manager, made by every rank; `close` it on every rank.

    `wants(step, signals)` says whether the policy wants a save at `step` now, with `signals`
    pending; only the coordinator's is asked. `pending()` are the signals of this rank.
    """

    def __init__(
        self,
        talk: Rendezvous,
        *,
        wants: Callable[[int, Signals], bool],
        pending: Callable[[], Signals],
    ) -> None:
        self.rank, self.world_size = talk.rank, talk.world_size
        self._topic, self._limit_s = f"{talk.topic}/steps", talk.limit_s
        self._wants, self._pending = wants, pending
        self._turn = threading.Condition()
        self._step = -1  # the last one that the loop decided
        self._answered = False  # and the verdict is not known yet
        self._agreed: int | None = None
        self._error: CheckpointError | None = None
        self._saving = False
        self._closing = False
        self._round = 0
        self._to_say: SimpleQueue[Callable[[Any], object] | None] = SimpleQueue()
        self._store = talk.store
        self._threads = [self._start(self._answer_rounds, "answer"), self._start(self._say, "say")]
        if self.rank == 0:
            self._threads.append(self._start(self._watch, "watch"))

    def _start(self, target: Callable[[Any], None], name: str) -> threading.Thread:
        """Run `target` in a thread, with a connection of its own that it makes itself: that may
        take seconds, for which nothing should wait."""

        def run() -> None:
            try:
                target(clone_store(self._store))
            except CheckpointError as error:
                self._fail(error)
            except (RuntimeError, OSError) as error:
                self._fail(store_gone(error))
            except Exception as error:  # noqa: BLE001 - the loop must not wait for a dead thread
                self._fail(shared_error(error, self.rank))

        thread = threading.Thread(target=run, name=f"milepost-{name}", daemon=True)
        thread.start()
        return thread

    # ---- the loop's side

    def reach(self, step: int) -> bool:
        """Whether all ranks save at `step`, or were to save before it and did not.

        Waits for the verdict of an agreement that is under way. Raises what made one fail, which is
        the same on all ranks.
        """
        with self._turn:
            while self._answered and self._error is None:
                self._turn.wait()
            if self._error is not None:
                raise self._error
            self._step = max(self._step, step)
            return self._agreed is not None and step >= self._agreed

    def begin_save(self, step: int) -> None:
        """A save at `step` begins, whoever asked for it: until its end nothing new is agreed."""
        self.reach(step)
        with self._turn:
            self._saving = True

    def end_save(self, step: int | None) -> None:
        """The save at `step` is done, and with it what was agreed until then; None: it failed."""
        with self._turn:
            self._saving = False
            if self._agreed is not None and step is not None and step >= self._agreed:
                self._agreed = None

    def ring(self) -> None:
        """Tell the coordinator that this rank got a signal; from any thread."""
        self._to_say.put(lambda store: store.add(f"{self._topic}/bell", 1))

    def close(self) -> None:
        """End the threads. A round to which this rank has not answered goes on without it."""
        with self._turn:
            self._closing = True
            ask = self._ask(self._round, self.rank)
            self._turn.notify_all()
        self._to_say.put(lambda store: store.set(ask, b"close"))
        self._to_say.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # which may collect a manager
                thread.join(_CLOSE_S)

    # ---- the helper threads

    def _ask(self, number: int, rank: int) -> str:
        return f"{self._topic}/{number}/ask/{rank}"

    def _say(self, store: Any) -> None:
        while (say := self._to_say.get()) is not None:
            say(store)

    def _watch(self, store: Any) -> None:
        """The coordinator's: begin a round when its policy, or a signal somewhere, asks for one."""
        rung = 0
        while not self._closing and self._error is None:
            time.sleep(WATCH_S)
            with self._turn:
                idle = not (self._answered or self._saving) and self._agreed is None
                number, step = self._round, self._step
            if not idle:
                continue
            rings = int(store.add(f"{self._topic}/bell", 0))
            # An error of the policy begins a round too, which tells it to all.
            wanted = step >= 0 and self._asked(step, self._pending()) is not False
            if (rings != rung or wanted) and not self._closing:
                rung = rings
                self._begin_round(store, number)

    def _asked(self, step: int, signals: Signals) -> bool | CheckpointError:
        """What the policy wants; what it raises, which is the caller's code, as all ranks do."""
        try:
            return bool(self._wants(step, signals))
        except Exception as error:  # noqa: BLE001 - a policy raises what it likes
            return shared_error(error, self.rank)

    def _begin_round(self, store: Any, number: int) -> None:
        for rank in range(self.world_size):
            store.set(self._ask(number, rank), b"ask")
        with self._turn:  # until the verdict, which the other thread makes
            self._turn.wait_for(
                lambda: self._round > number or self._closing or self._error is not None
            )

    def _answer_rounds(self, store: Any) -> None:
        while self._error is None and not self._is_over(store):
            store.wait([self._ask(self._round, self.rank)], _FOREVER)
            if self._is_over(store):
                return
            with self._turn:
                step, self._answered = self._step, True
            self._take(json.loads(self._hold_round(store, self._round, step)))

    def _is_over(self, store: Any) -> bool:
        """Whether the manager was closed; then the others are told at which step."""
        with self._turn:
            if self._closing:
                store.set(f"{self._topic}/closed/{self.rank}", str(self._step).encode())
            return self._closing

    def _hold_round(self, store: Any, number: int, step: int) -> bytes:
        """Answer, and learn the verdict; the coordinator makes it of all answers."""
        topic = f"{self._topic}/{number}"
        answer = {"step": step, "signals": sorted(self._pending())}
        store.set(f"{topic}/answer/{self.rank}", json.dumps(answer).encode())
        if self.rank == 0:
            verdict = json.dumps(self._verdict(store, topic)).encode()
            store.set(f"{topic}/verdict", verdict)
            self._forget(store, number - 2)
            return verdict
        # The coordinator gives up after the limit, and says so.
        store.wait([f"{topic}/verdict"], timedelta(seconds=2 * self._limit_s))
        return bytes(store.get(f"{topic}/verdict"))

    def _verdict(self, store: Any, topic: str) -> dict[str, Any]:
        try:
            answers = [self._answer_of(store, topic, rank) for rank in range(self.world_size)]
            step = max(answer["step"] for answer in answers) + 1
            came = frozenset(signal.Signals(n) for answer in answers for n in answer["signals"])
            wanted = self._asked(step, came)
        except RankTimeoutError as error:
            wanted = error
        if isinstance(wanted, CheckpointError):
            return {"error": pack_error(wanted)}
        return {"at": step if wanted else None}

    def _answer_of(self, store: Any, topic: str, rank: int) -> dict[str, Any]:
        """What `rank` answers, or the step at which it closed its manager."""
        deadline_s = time.monotonic() + self._limit_s
        closed = f"{self._topic}/closed/{rank}"
        while not store.check([f"{topic}/answer/{rank}"]):
            if store.check([closed]):
                return {"step": int(store.get(closed)), "signals": []}
            if time.monotonic() > deadline_s:
                raise RankTimeoutError(
                    f"rank {rank} has not said for {self._limit_s:.0f} s at which step it is; it "
                    "died or hangs",
                    rank=rank,
                    failed=[rank],
                )
            time.sleep(_POLL_S)
        found: dict[str, Any] = json.loads(store.get(f"{topic}/answer/{rank}"))
        return found

    def _forget(self, store: Any, number: int) -> None:
        """Delete the keys of a round that everybody has left."""
        if number < 0:
            return
        topic = f"{self._topic}/{number}"
        for rank in range(self.world_size):
            store.delete_key(f"{topic}/ask/{rank}")
            store.delete_key(f"{topic}/answer/{rank}")
        store.delete_key(f"{topic}/verdict")

    def _take(self, verdict: dict[str, Any]) -> None:
        if "error" in verdict:
            self._fail(unpack_error(verdict["error"]))
            return
        with self._turn:
            self._agreed = verdict["at"]
            self._answered = False
            self._round += 1
            self._turn.notify_all()
        if verdict["at"] is not None:
            logger.info("all ranks save at step %d", verdict["at"])

    def _fail(self, error: CheckpointError) -> None:
        """Every further step raises `error`."""
        with self._turn:
            if self._error is None:
                self._error = error
            self._turn.notify_all()
