"""Ranks agree on a save or a load through the process group's key-value store, never a collective.

All traffic is small values under keys of one conversation. Every wait has a limit, counted as time
without a sign of life, and names who is missing. One rank that fails makes all of them fail, with
one error: the outcome is a single key, set once. Values are at most 4 MiB; longer ones are cut.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TypeAlias

from milepost.engine.connections import Connections, KeyValueStore, store_gone
from milepost.engine.verdicts import pack_error, shared_error, unpack_error
from milepost.errors import CheckpointError, RankError, RankTimeoutError, SaveOutcomeUnknownError

MAX_VALUE_NBYTES = 4 * 2**20
HEARTBEAT_S = 2.0
DEFAULT_LIMIT_S = 600.0
_SHORTEST_PAUSE_S = 0.00005
_PROMPT_S = 0.005
_LONGEST_PAUSE_S = 0.5
_PARTING_S = 1.0
_COMMIT = b"commit"


class Rendezvous:
    """One conversation of all ranks, under the key prefix `topic`.

    Rank 0 is the coordinator. Used as a context manager: a heartbeat tells the others that this
    rank lives for as long as the block runs. `limit_s` bounds how long a silent rank is waited for.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        rank: int,
        world_size: int,
        topic: str,
        limit_s: float = DEFAULT_LIMIT_S,
        connections: Connections | None = None,
    ) -> None:
        self.store, self.rank, self.world_size = store, rank, world_size
        self._first, self._connections = store, connections or Connections(store)
        self.topic, self.limit_s = topic, limit_s
        self.knows_outcome = True
        """False once the store is gone, or the coordinator fell silent after `claim`: what it was
        about to make visible may be there or not."""
        self.heard_all = False
        """Whether every rank has said something: at the coordinator, where it gathers."""
        self._own_keys: list[str] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> Rendezvous:
        self._look(self._outcome)  # a store that is gone says so here
        self._thread = threading.Thread(target=self._beat, name="milepost-heartbeat", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_PARTING_S)  # unless it is still connecting
        self._connections.give_back(self.store)
        self.store = self._first

    def hand_over(self) -> None:
        """Go on in this thread: through a connection of its own from here on.

        The first one is kept: at rank 0 it may be all that keeps the server alive. `RankError` when
        the store is gone.
        """
        self.store = self._connections.borrow()

    def _beat(self) -> None:
        """Say at once that this rank has come, then every now and again that it lives."""
        key, count = f"{self.topic}/beat/{self.rank}", 1
        with suppress(RuntimeError, OSError, RankError):  # gone: who waits on the store will say so
            self.store.set(key, b"1")  # before there is another connection, which may take seconds
            store = self._connections.borrow()
            while not self._stop.wait(min(HEARTBEAT_S, self.limit_s / 4)):
                count += 1
                store.set(key, str(count).encode())
            self._connections.give_back(store)

    def gather(self, name: str, value: bytes) -> list[bytes]:
        """Every rank's value, in order of rank, at the coordinator; empty elsewhere."""
        if not self.is_coordinator:
            self._put(f"{name}/{self.rank}", value)
            return []
        others = [self._get(f"{name}/{rank}", rank) for rank in range(1, self.world_size)]
        self.heard_all = True
        return [value, *others]

    def broadcast(self, name: str, value: bytes | None = None) -> bytes:
        """The coordinator's value, on every rank; only the coordinator passes one."""
        if self.is_coordinator:
            assert value is not None, "the coordinator has something to say"
            self._put(name, value)
            return value
        return self._get(name, 0)

    def post(self, name: str, value: bytes) -> None:
        """Leave a value for whoever asks by `fetch`."""
        self._put(name, value)

    def fetch(self, name: str, rank: int) -> bytes:
        """A value that `rank` posts."""
        return self._get(name, rank)

    def settle(self, name: str, error: BaseException | None) -> None:
        """Return when every rank has come here without an error; collective.

        A rank that brings one tells all who wait, anywhere in this conversation; all of them raise
        it, of the same class and with the same message, which names the rank that began. Of several
        errors at once, all raise the one that was told first.
        """
        if error is not None:
            self._raise_everywhere(error)
        self.gather(f"{name}/done", b"")
        self.broadcast(f"{name}/settled", b"" if self.is_coordinator else None)

    def announce(self, name: str, error: BaseException | None) -> None:
        """Return when the coordinator has come here without an error; nobody waits for others."""
        if error is not None:
            self._raise_everywhere(error)
        self.broadcast(f"{name}/announced", b"" if self.is_coordinator else None)

    def claim(self) -> None:
        """The coordinator's, before it makes anything visible: nobody can call it off any more.

        Raises what a rank called it off with, if one did.
        """
        try:
            found = self.store.compare_set(self._outcome, "", _COMMIT.decode())
        except (RuntimeError, OSError) as error:
            raise self._store_gone(error) from error
        if found != _COMMIT:
            raise unpack_error(found)

    @property
    def _outcome(self) -> str:
        return f"{self.topic}/outcome"

    @property
    def _failure(self) -> str:
        """What the coordinator says when it fails after `claim`."""
        return f"{self.topic}/failure"

    def _put(self, name: str, value: bytes) -> None:
        """Store a value, the last piece under its own key, after those that a long one is cut into
        and with their number in front."""
        key = f"{self.topic}/{name}"
        cuts = range(0, max(len(value), 1), MAX_VALUE_NBYTES)
        *first, last = (value[start : start + MAX_VALUE_NBYTES] for start in cuts)
        try:
            for number, piece in enumerate(first):
                self.store.set(f"{key}/{number}", piece)
                self._own_keys.append(f"{key}/{number}")
            self.store.set(key, b"%d " % len(first) + last)
        except (RuntimeError, OSError) as error:
            raise self._store_gone(error) from error
        self._own_keys.append(key)

    def _get(self, name: str, rank: int) -> bytes:
        key = f"{self.topic}/{name}"
        self._wait(key, rank)
        try:
            count, _, last = self.store.get(key).partition(b" ")
            first = (self.store.get(f"{key}/{number}") for number in range(int(count)))
            return b"".join((*first, last))
        except (RuntimeError, OSError) as error:
            raise self._store_gone(error) from error

    def _wait(self, key: str, rank: int) -> None:
        """Wait for a key that `rank` sets, as long as that rank shows signs of life."""
        start = last_sign = time.monotonic()
        seen = b""
        while not self._is_set(key):
            # Later looks are rarer: thousands of ranks wait for one that writes for minutes.
            waited = time.monotonic() - start
            time.sleep(min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, waited / 20)))
            if waited < _PROMPT_S:
                continue  # most answers come at once
            self._raise_if_called_off()
            beat = self._look(f"{self.topic}/beat/{rank}")
            if beat != seen:
                seen, last_sign = beat, time.monotonic()
            if time.monotonic() - last_sign > self.limit_s:
                self._raise_missing(key, rank)

    def _raise_missing(self, key: str, rank: int) -> None:
        message = (
            f"rank {rank} has shown no sign of life for {self.limit_s:.0f} s while rank "
            f"{self.rank} waited for {key}; it died, hangs, or never made this call"
        )
        found = self._call_off(RankTimeoutError(message, rank=rank, failed=[rank]))
        self._raise_if_called_off()
        if found == _COMMIT:
            self.knows_outcome = False
            raise SaveOutcomeUnknownError(message)

    def _raise_everywhere(self, error: BaseException) -> None:
        own = shared_error(error, self.rank)
        found = self._call_off(own)
        if found in (b"", _COMMIT, pack_error(own).encode()):
            if own is error:
                raise own
            raise own from error
        raise unpack_error(found) from error

    def _call_off(self, error: CheckpointError) -> bytes:
        """Tell everybody who waits that it is in vain; the outcome in force, empty if unknown."""
        verdict = pack_error(error)
        try:
            found = self.store.compare_set(self._outcome, "", verdict)
            if found == _COMMIT and self.is_coordinator:
                self.store.set(self._failure, verdict.encode())
        except (RuntimeError, OSError):  # the store is gone: the others will find that out
            return b""
        return bytes(found)

    def _raise_if_called_off(self) -> None:
        found = self._look(self._outcome)
        if found == _COMMIT:
            found = self._look(self._failure)
        if found:
            raise unpack_error(found)

    def _look(self, key: str) -> bytes:
        """The value of a key now, empty when it has none."""
        try:
            return self.store.get(key) if self.store.check([key]) else b""
        except (RuntimeError, OSError) as error:
            raise self._store_gone(error) from error

    def _is_set(self, key: str) -> bool:
        try:
            return self.store.check([key])
        except (RuntimeError, OSError) as error:
            raise self._store_gone(error) from error

    def forget(self) -> None:
        """Delete this rank's keys; called when all have read them."""
        shared = [self._outcome, self._failure] if self.is_coordinator else []
        for key in [*self._own_keys, f"{self.topic}/beat/{self.rank}", *shared]:
            with suppress(RuntimeError, OSError):
                self.store.delete_key(key)
        self._own_keys.clear()

    def _store_gone(self, error: BaseException) -> RankError:
        self.knows_outcome = False
        return store_gone(error)


class Solo:
    """The conversation of a process that is alone: it says everything to itself."""

    rank = 0
    world_size = 1
    is_coordinator = True
    knows_outcome = True

    def __enter__(self) -> Solo:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def gather(self, name: str, value: bytes) -> list[bytes]:
        return [value]

    def broadcast(self, name: str, value: bytes | None = None) -> bytes:
        assert value is not None, "the coordinator has something to say"
        return value

    def post(self, name: str, value: bytes) -> None:
        return None

    def fetch(self, name: str, rank: int) -> bytes:
        raise AssertionError("a process that is alone has nobody to ask")

    def settle(self, name: str, error: BaseException | None) -> None:
        if error is not None:
            raise error

    announce = settle

    def hand_over(self) -> None:
        return None

    def claim(self) -> None:
        return None


Conversation: TypeAlias = Rendezvous | Solo


@contextmanager
def together(talk: Conversation, name: str) -> Iterator[None]:
    """Run a block that every rank runs; one that fails makes all of them fail, as `settle`."""
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - where one rank's failure becomes everybody's
        failure = error
    talk.settle(name, failure)


@contextmanager
def led(talk: Conversation, name: str) -> Iterator[None]:
    """Run a block in which only the coordinator acts; the others wait for it, as `announce`."""
    failure: BaseException | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - where the coordinator's failure becomes everybody's
        failure = error
    talk.announce(name, failure)
