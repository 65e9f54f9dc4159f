"""Signals noted when they arrive, whatever the main thread is doing.

Python runs a signal handler only between two steps of its interpreter, so one may come late: in a
long kernel, or in a collective that waits. The wakeup descriptor is written at once; a thread of
ours reads it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
from typing import Any

from milepost.errors import InvalidInputError

SAVE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class SignalListener:
    """Notes `signals` until `close`. Made and closed in the main thread.

    A handler that was there before is called as well, and gets its place back at `close`. In a
    forked child (a worker of a data loader) nothing is noted and the earlier handlers are back.
    """

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidInputError(
                "signals can be listened to only by the main thread; make the CheckpointManager "
                "there, or leave OnSignal out of its save policy"
            )
        self._guard = threading.RLock()  # a listener may be collected, and so closed, anywhere
        self._pending: set[signal.Signals] = set()
        self._seen_s: dict[signal.Signals, float] = {}
        self._closed = False
        self._signals = frozenset(signals)
        self.on_arrival: Callable[[], None] | None = None
        """Called after each signal, from whichever thread notices it."""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._earlier_wakeup = _Wakeup(
            signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        )
        self._earlier: dict[int, Any] = {}
        self._handler: Callable[[int, FrameType | None], None] = self._chain
        for number in self._signals:
            self._earlier[number] = signal.signal(number, self._handler)
        _active.add(self)
        self._thread = threading.Thread(target=self._read_on, name="milepost-signals", daemon=True)
        self._thread.start()

    def pending(self) -> frozenset[signal.Signals]:
        """Signals that came and were not `clear`ed yet."""
        self._drain()
        with self._guard:
            return frozenset(self._pending)

    def seen_s(self, number: signal.Signals) -> float | None:
        """When this signal came first, in seconds of `time.monotonic()`; None when it did not."""
        self._drain()
        with self._guard:
            return self._seen_s.get(number)

    def clear(self, signals: Collection[signal.Signals]) -> None:
        """These signals were answered."""
        with self._guard:
            self._pending.difference_update(signals)

    def close(self) -> None:
        """Give signals back to whoever had them. A second call does nothing.

        Only the main thread can give them back. Closed in another one, where what was forgotten may
        be collected, its descriptors stay open: signals go on being written there, and would go
        into the next file that gets the number.
        """
        if self._closed:
            return
        self._drain()
        self._closed = True
        _active.discard(self)
        is_in_main = threading.current_thread() is threading.main_thread()
        if is_in_main:
            self._give_back()
        self._writer.send(b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if is_in_main:
            self._reader.close()
            self._writer.close()
        else:
            _kept_open.append(self)

    def _give_back(self) -> None:
        for later in list(_active):
            later._forget_earlier(self)
        current = signal.set_wakeup_fd(self._earlier_wakeup.usable)
        if current != self._writer.fileno():  # somebody took it over after us, and keeps it
            signal.set_wakeup_fd(current)
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._handler:
                signal.signal(number, signal.SIG_DFL if earlier is None else earlier)

    def _forget_earlier(self, gone: SignalListener) -> None:
        """Have before this listener what was before `gone`, where that was `gone`."""
        if self._earlier_wakeup.descriptor == gone._writer.fileno():
            self._earlier_wakeup = gone._earlier_wakeup
        for number, earlier in self._earlier.items():
            if earlier == gone._handler:
                self._earlier[number] = gone._earlier[number]

    def _chain(self, number: int, frame: FrameType | None) -> None:
        """What Python runs in the main thread: the handler that was there before, if there was."""
        if not self._closed:
            self._make_good(number)
        earlier = self._earlier[number]
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def _make_good(self, number: int) -> None:
        """Note a signal whose byte went past us: an event loop that comes takes the descriptor
        over, and one that goes takes it with it."""
        ours = self._writer.fileno()
        current = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
        if current == ours:
            return
        if current >= 0:
            signal.set_wakeup_fd(current)
        if current not in {each._writer.fileno() for each in _active}:  # which pass it on
            with suppress(BlockingIOError):
                self._writer.send(bytes([number]))

    def _read_on(self) -> None:
        ready = select.poll()  # `select` takes no descriptor above 1023
        ready.register(self._reader, select.POLLIN)
        while not self._closed:
            ready.poll()
            self._drain()

    def _drain(self) -> None:
        with self._guard:
            if self._closed:
                return
            try:
                raw = self._reader.recv(4096)
            except BlockingIOError:
                return
            came = {signal.Signals(byte) for byte in raw if byte in self._signals}
            self._pending |= came
            self._seen_s = dict.fromkeys(came, time.monotonic()) | self._seen_s
            self._earlier_wakeup.write(raw.strip(b"\0"))
        if came and self.on_arrival is not None:
            self.on_arrival()

    def _leave_child(self) -> None:
        """In a forked child: the descriptors are the parent's, and so is what they carry."""
        self._closed, self._guard = True, threading.RLock()
        _active.discard(self)
        self._give_back()


class _Wakeup:
    """A wakeup descriptor that somebody set; -1 is none. It may be closed meanwhile, and its number
    another file's, which must get no bytes of signals."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._file = self._behind()

    def _behind(self) -> tuple[int, int] | None:
        try:
            status = os.fstat(self.descriptor)
        except OSError:
            return None
        return status.st_dev, status.st_ino

    @property
    def usable(self) -> int:
        """The descriptor while it is what it was; else -1."""
        return self.descriptor if self._file is not None and self._behind() == self._file else -1

    def write(self, raw: bytes) -> None:
        """Pass on what came."""
        if raw and self.usable >= 0:
            with suppress(OSError):
                os.write(self.descriptor, raw)


def shield_worker(worker_id: int) -> None:
    """Make a worker of a data loader deaf to SIGTERM and SIGUSR1: its `worker_init_fn`.

    A scheduler signals the whole process group. A worker that dies of it makes the loader raise in
    the main process before the next step, and the save that the signal asked for never happens.

    >>> loader = DataLoader(data, num_workers=2, worker_init_fn=shield_worker)  # doctest: +SKIP
    """
    for number in SAVE_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


_active: weakref.WeakSet[SignalListener] = weakref.WeakSet()
_kept_open: list[SignalListener] = []


def _after_fork() -> None:
    for listener in list(_active):
        listener._leave_child()


os.register_at_fork(after_in_child=_after_fork)
