"""Connections to the key-value store in which ranks meet: further ones, kept, given up in time."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Protocol

from milepost.errors import RankError

_LOOK_S = 0.5


class KeyValueStore(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: bytes, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...


class Connections:
    """Further connections to a store, kept for the next who needs one; from any thread.

    To connect takes a millisecond, or seconds: torch asks the resolver for the other side's name.
    """

    def __init__(self, store: KeyValueStore) -> None:
        self._store = store
        self._spare: list[KeyValueStore] = []

    def borrow(self) -> KeyValueStore:
        """One that nobody else uses; the first one where the store makes no further ones.

        `RankError` when the store is gone.
        """
        try:
            return self._spare.pop()
        except IndexError:
            return clone_store(self._store)

    def give_back(self, connection: KeyValueStore) -> None:
        """It works, and is not used any more."""
        if connection is not self._store:
            self._spare.append(connection)


def clone_store(store: KeyValueStore) -> KeyValueStore:
    """A connection of its own: a blocking call in one thread holds the client's lock. The same one
    where the store makes no further ones, or fails to.

    `RankError` when the store is gone: torch would go on trying to connect for as long as the
    store's own time limit, often many minutes, in which nobody could call it off.
    """
    clone = getattr(store, "clone", None)
    if clone is None:
        return store
    found: Future[KeyValueStore] = Future()

    def connect() -> None:
        try:
            found.set_result(clone())
        except (RuntimeError, NotImplementedError):
            found.set_result(store)
        except BaseException as error:  # noqa: BLE001 - told to who waits
            found.set_exception(error)

    threading.Thread(target=connect, name="milepost-connect", daemon=True).start()
    while True:
        try:
            return found.result(_LOOK_S)
        except TimeoutError:
            try:
                store.check(["milepost"])
            except (RuntimeError, OSError) as error:
                raise store_gone(error) from error


def store_gone(error: BaseException) -> RankError:
    """The error for a store that does not answer any more."""
    return RankError(
        f"the store that the ranks meet in is gone ({str(error).partition(chr(10))[0][:200]}); "
        "rank 0 or its agent died",
        rank=0,
        failed=[0],
    )
