from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from milepost._collector import collector_paused


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Whatever a test does to it, the collector runs afterwards."""
    yield
    gc.enable()


def test_the_collector_rests_in_the_block_and_runs_after_it() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_runs_again_after_an_error() -> None:
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_who_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()


def test_the_last_thread_to_leave_turns_it_on() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collector_paused():
            entered.set()
            assert leave.wait(30)

    thread = threading.Thread(target=other)
    with collector_paused():
        thread.start()
        assert entered.wait(30)
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_it_runs_in_a_child_forked_while_a_thread_of_the_parent_paused_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    def plan() -> None:
        with collector_paused():
            entered.set()
            assert leave.wait(30)

    thread = threading.Thread(target=plan)
    thread.start()
    assert entered.wait(30)
    child = os.fork()
    if child == 0:
        runs = gc.isenabled()
        with collector_paused():
            rests = not gc.isenabled()
        os._exit(0 if runs and rests and gc.isenabled() else 1)
    leave.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    assert gc.isenabled()
