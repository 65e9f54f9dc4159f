"""A save behind training rests while nobody waits for it, and hurries as soon as somebody does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import milepost as mp
from milepost.checkpointing.pace import Pace
from milepost.engine.write import WriteOptions
from milepost.storage import fileops


def state() -> dict[str, Any]:
    return {"model": torch.nn.Linear(64, 64)}


def keep_a_core_for(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def rested_s(pace: Pace) -> float:
    """How long a thread is held at a write after it has kept a core for 20 ms."""
    on_bytes = pace.paced(WriteOptions()).on_bytes
    assert on_bytes is not None
    on_bytes(1)  # from here on its work is counted
    keep_a_core_for(0.02)
    begin = time.monotonic()
    on_bytes(1)
    return time.monotonic() - begin


@pytest.fixture
def _on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


@pytest.fixture
def held(_on_the_processor: None) -> Iterator[threading.Event]:
    """Writes of other threads wait until it is set."""
    go = threading.Event()

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == "write" and threading.current_thread() is not threading.main_thread():
            assert go.wait(60)
        return function(*arguments)

    with fileops.hooked(hook):
        yield go
        go.set()
        mp.wait_for_saves()


@pytest.mark.usefixtures("_on_the_processor")
def test_a_writer_rests_longer_than_it_has_kept_a_core() -> None:
    pace = Pace()
    pace.ease(threads=os.cpu_count() or 1)
    assert rested_s(pace) >= 0.04


def test_a_save_that_is_not_behind_training_never_rests() -> None:
    assert not Pace().rests


@pytest.mark.usefixtures("_on_the_processor")
def test_who_waits_ends_the_rest_of_a_writer_at_once() -> None:
    pace, told = Pace(), threading.Event()
    pace.ease(threads=os.cpu_count() or 1)
    on_bytes = pace.paced(WriteOptions()).on_bytes
    assert on_bytes is not None

    def write() -> None:
        while pace.rests:  # each rest ends by itself after a while; this only with a hurry
            on_bytes(1)
            keep_a_core_for(0.001)
        pace.finish()
        told.set()

    writer = threading.Thread(target=write)
    writer.start()
    pace.wait()
    writer.join(60)
    assert told.is_set() and not pace.rests


def test_with_an_accelerator_cores_are_free_and_nobody_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    pace = Pace()
    pace.ease(threads=os.cpu_count() or 1)
    assert not pace.rests


def behind(root: Path) -> mp.SaveHandle:
    """The next save, in the queue."""
    return mp.save_async(root / "checkpoint-2", state(), step=2, in_flight=mp.InFlight.QUEUE)


@pytest.mark.parametrize(
    "waiting",
    [
        lambda handle, root: handle.wait(),
        lambda handle, root: behind(root).wait(),
        lambda handle, root: mp.wait_for_saves(),
        lambda handle, root: mp.save(root / "checkpoint-2", state(), step=2),
        lambda handle, root: mp.save_async(root / "checkpoint-2", state(), step=2),
        lambda handle, root: mp.load(root / "checkpoint-1", state()),
    ],
    ids=[
        "its handle",
        "the handle of one behind it",
        "the end",
        "a save",
        "the next behind training",
        "a load",
    ],
)
def test_a_save_behind_training_hurries_once_something_waits_for_it(
    waiting: Callable[[mp.SaveHandle, Path], Any], tmp_path: Path, held: threading.Event
) -> None:
    handle = mp.save_async(tmp_path / "checkpoint-1", state(), step=1)
    assert handle.pace.rests and not handle.done()

    def go_on_when_it_hurries() -> None:
        while handle.pace.rests:
            time.sleep(0.001)
        held.set()

    watcher = threading.Thread(target=go_on_when_it_hurries)
    watcher.start()
    waiting(handle, tmp_path)  # would wait for ever if the save did not hurry
    watcher.join(60)
    mp.wait_for_saves()
    assert handle.done() and mp.Checkpoint.open(tmp_path / "checkpoint-1").verify().ok


def test_a_save_that_the_caller_waits_for_at_once_does_not_rest(
    tmp_path: Path, held: threading.Event
) -> None:
    held.set()
    buffers = mp.HostBuffers(max_nbytes=4096)  # the weights have no room
    handle = mp.save_async(tmp_path / "checkpoint-1", state(), step=1, buffers=buffers)
    assert not handle.pace.rests
    assert handle.wait().written
