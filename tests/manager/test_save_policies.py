"""When to save, and signals sent to real processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

import milepost as mp
from milepost.engine.rendezvous import Rendezvous
from milepost.errors import InvalidInputError
from milepost.manager.cadence import Cadence
from milepost.manager.save_policies import signals_of
from milepost.manager.signals import SignalListener

ROOT = Path(__file__).parents[2]


def context(step: int, **fields: Any) -> mp.SaveContext:
    return mp.SaveContext(step=step, **{"now_s": 0.0, "last_saved_s": 0.0, **fields})


# ---- decisions


def test_every_n_steps_but_not_step_0_and_not_one_twice() -> None:
    policy = mp.EveryNSteps(3)
    assert [step for step in range(10) if policy.should_save(context(step))] == [3, 6, 9]
    assert not policy.should_save(context(6, last_saved_step=6))


def test_every_n_minutes_since_the_last_save() -> None:
    policy = mp.EveryNMinutes(0.5)
    assert not policy.should_save(context(1, now_s=129.9, last_saved_s=100.0))
    assert policy.should_save(context(1, now_s=130.0, last_saved_s=100.0))


def test_any_of_several_policies_is_enough() -> None:
    policy = mp.AnyOf(mp.EveryNSteps(5), mp.OnSignal(signal.SIGUSR1))
    assert policy.should_save(context(5))
    assert policy.should_save(context(1, signals=frozenset({signal.SIGUSR1})))
    assert not policy.should_save(context(1, signals=frozenset({signal.SIGTERM})))
    assert signals_of([policy]) == {signal.SIGUSR1}
    assert signals_of([mp.OnSignal()]) == {signal.SIGTERM, signal.SIGUSR1}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: mp.EveryNSteps(0),
        lambda: mp.EveryNMinutes(0),
        lambda: mp.AnyOf(),
        lambda: mp.OnSignal(signal.SIGKILL),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidInputError):
        wrong()


# ---- the listener


@pytest.fixture
def listener() -> Iterator[SignalListener]:
    made = SignalListener([signal.SIGUSR1])
    yield made
    made.close()


def test_a_signal_is_seen_at_once_and_until_it_is_cleared(listener: SignalListener) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert listener.pending() == {signal.SIGUSR1}
    listener.clear({signal.SIGUSR1})
    assert listener.pending() == frozenset()
    assert listener.seen_s(signal.SIGUSR1) is not None
    assert listener.seen_s(signal.SIGTERM) is None


def test_earlier_handlers_are_called_and_get_their_place_back() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    ours = signal.getsignal(signal.SIGUSR1)
    try:
        listener = SignalListener([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert called == [signal.SIGUSR1]
        assert listener.pending()
        listener.close()
        assert signal.getsignal(signal.SIGUSR1) is ours
        listener.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_came_later_is_left_in_place() -> None:
    listener = SignalListener([signal.SIGUSR1])
    later: Any = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGUSR1, later)
    listener.close()
    assert signal.getsignal(signal.SIGUSR1) is later
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_an_earlier_wakeup_descriptor_still_gets_its_bytes() -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    reader.settimeout(5)
    signal.set_wakeup_fd(writer.fileno())
    try:
        listener = SignalListener([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert reader.recv(10) == bytes([signal.SIGUSR1])
        listener.close()
        assert signal.set_wakeup_fd(-1) == writer.fileno()
    finally:
        signal.set_wakeup_fd(-1)
        reader.close()
        writer.close()


def test_an_event_loop_beside_it_keeps_its_signals() -> None:
    async def wait() -> bool:
        loop = asyncio.get_running_loop()
        got = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR2, got.set)
        listener = SignalListener([signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR2)
        await asyncio.wait_for(got.wait(), 5)
        listener.close()
        loop.remove_signal_handler(signal.SIGUSR2)
        return True

    assert asyncio.run(wait())


def test_signals_are_noted_after_an_event_loop_that_came_and_went(
    listener: SignalListener,
) -> None:
    async def handle() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR2, lambda: None)
        os.kill(os.getpid(), signal.SIGUSR1)  # its byte goes to the loop
        assert listener.pending() == {signal.SIGUSR1}
        loop.remove_signal_handler(signal.SIGUSR2)

    asyncio.run(handle())
    listener.clear({signal.SIGUSR1})
    os.kill(os.getpid(), signal.SIGUSR1)
    assert listener.pending() == {signal.SIGUSR1}


def test_a_pipe_that_was_the_wakeup_descriptor_gets_its_bytes_while_it_is_open() -> None:
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer)
    listener = SignalListener([signal.SIGUSR1])
    try:
        count = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert listener.pending() == {signal.SIGUSR1}
        assert os.read(reader, 9) == 3 * bytes([signal.SIGUSR1])
        assert len(os.listdir("/proc/self/fd")) == count
        os.close(writer)
        other = os.memfd_create("another file of that number")
        assert other == writer
        os.kill(os.getpid(), signal.SIGUSR1)
        assert listener.pending() == {signal.SIGUSR1}
        listener.close()
        assert os.fstat(other).st_size == 0
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        listener.close()
        os.close(reader)
        os.close(writer)


def test_two_listeners_may_be_closed_in_the_order_in_which_they_were_made() -> None:
    first, second = SignalListener([signal.SIGUSR1]), SignalListener([signal.SIGUSR1])
    os.kill(os.getpid(), signal.SIGUSR1)
    assert second.pending() == first.pending() == {signal.SIGUSR1}
    first.clear({signal.SIGUSR1})
    assert first.pending() == frozenset(), "each signal is noted once"
    first.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert second.pending() == {signal.SIGUSR1}
    second.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def run_script(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_with_thousands_of_open_files_is_told_of_its_signals() -> None:
    out = run_script("""
        import os, resource, signal, threading
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        from milepost.manager.signals import SignalListener
        files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        listener, told = SignalListener([signal.SIGUSR1]), threading.Event()
        listener.on_arrival = told.set
        os.kill(os.getpid(), signal.SIGUSR1)
        print(told.wait(10))
        listener.close()
    """)
    assert out == "True\n"


def test_signals_are_never_written_into_a_file_after_a_listener_was_collected_in_a_thread() -> None:
    out = run_script("""
        import os, signal, tempfile, threading
        from milepost.manager.signals import SignalListener
        listener = SignalListener([signal.SIGUSR1])
        thread = threading.Thread(target=listener.close)
        thread.start()
        thread.join()
        del listener
        files = [tempfile.TemporaryFile() for _ in range(8)]
        os.kill(os.getpid(), signal.SIGUSR1)
        print([os.fstat(file.fileno()).st_size for file in files])
    """)
    assert out == f"{[0] * 8}\n"


def test_signals_are_listened_to_by_the_main_thread_alone(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            mp.CheckpointManager(tmp_path, save=mp.OnSignal())
        except InvalidInputError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(errors[0])
    mp.CheckpointManager(tmp_path).close()  # the lease was given back


def test_a_forked_child_notes_nothing_and_dies_of_its_own_signals(
    listener: SignalListener,
) -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    child.start()
    assert child.pid is not None
    time.sleep(0.2)
    os.kill(child.pid, signal.SIGUSR1)
    child.join()
    assert child.exitcode == -signal.SIGUSR1
    assert listener.pending() == frozenset()


# ---- the manager


def test_a_manager_that_takes_the_place_of_another_leaves_no_signal_unanswered(
    tmp_path: Path,
) -> None:
    manager = mp.CheckpointManager(tmp_path / "one", save=mp.OnSignal())
    manager = mp.CheckpointManager(tmp_path / "two", save=mp.OnSignal())  # the first is forgotten
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager.stop_requested
    manager.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_that_came_before_ranks_could_be_told_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Agreement:
        def __init__(self, talk: Rendezvous, **asked: Any) -> None:
            self.rings = 0
            os.kill(os.getpid(), signal.SIGUSR1)

        def ring(self) -> None:
            self.rings += 1

        def close(self) -> None:
            return None

    monkeypatch.setattr("milepost.manager.cadence.StepAgreement", Agreement)
    store: Any = HashStore()
    talk = Rendezvous(store, rank=1, world_size=2, topic="test")
    cadence = Cadence(mp.OnSignal(), 30.0, talk)
    try:
        agreement: Any = cadence.agreement
        assert agreement.rings > 0
    finally:
        cadence.close()


def test_a_signal_saves_once_at_the_next_step(tmp_path: Path) -> None:
    with mp.CheckpointManager(tmp_path, save=mp.OnSignal()) as manager:
        state = {"progress": {"step": 1}}
        assert manager.maybe_save(1, state) is None
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.maybe_save(2, state) is not None
        assert manager.maybe_save(3, state) is None
        os.kill(os.getpid(), signal.SIGTERM)
        stops = [manager.stop_requested]
        assert manager.maybe_save(4, state) is not None
        stops.append(manager.stop_requested)
        assert manager.maybe_save(5, state) is None
        stops.append(manager.stop_requested)
        assert stops == [False, True, True], "only once its save is done"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_loop_without_a_policy_call_is_told_to_stop_at_once(tmp_path: Path) -> None:
    with mp.CheckpointManager(tmp_path, save=mp.OnSignal()) as manager:
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.stop_requested
        manager.save(4, {"progress": {"step": 1}})
        assert manager.stop_requested


def test_a_save_longer_than_the_grace_time_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mp.CheckpointManager(tmp_path, save=mp.OnSignal(), grace_s=0.0) as manager:
        manager.save(1, {"progress": {"step": 1}})
    assert "an emergency save may not finish" in caplog.text


JOB = """
    import sys, time, torch
    import milepost as mp
    from tests.manager.small_training import Training
    run = sys.argv[1]
    training = Training()
    with mp.CheckpointManager(run, save=mp.OnSignal()) as manager:
        report = manager.resume(training.state)
        for step in range((report.step or 0) + 1 if report else 1, 100_000):
            training.step()
            time.sleep(0.01)
            saved = manager.maybe_save(step, training.state)
            if step == 1: print("ready", flush=True)
            if saved: print(step, flush=True)
            if manager.stop_requested: break
    print("left", step, flush=True)
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", process.communicate()
    return process


@pytest.mark.case("V19")
def test_sigusr1_saves_and_goes_on_and_sigterm_saves_and_ends(tmp_path: Path) -> None:
    process = start(JOB, str(tmp_path))
    assert process.stdout is not None
    process.send_signal(signal.SIGUSR1)
    first = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    last, left = out.split("\n")[:2]
    assert left == f"left {last}"
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == [first, int(last)]


WORKERS = """
    import sys, time, torch
    import milepost as mp
    from torch.utils.data import DataLoader, Dataset
    run, where = sys.argv[1:]

    class Slow(Dataset):
        def __len__(self): return 100_000
        def __getitem__(self, index):
            time.sleep(0.05 if where == "data" else 0.001)
            return torch.tensor([float(index)])

    progress = {"seen": 0}
    loader = DataLoader(Slow(), num_workers=2, worker_init_fn=mp.shield_worker)
    with mp.CheckpointManager(run, save=mp.OnSignal()) as manager:
        for micro, batch in enumerate(loader, start=1):
            progress["seen"] += 1
            if micro == 2: print("ready", flush=True)
            if where == "eval": time.sleep(0.1)
            step = (micro + 3) // 4
            if micro % 4:
                with manager.accumulating():
                    time.sleep(0.02)
                    manager.maybe_save(step, {"progress": progress})
            elif manager.maybe_save(step, {"progress": progress}):
                print("saved", progress["seen"], flush=True)
                break
    assert manager.stop_requested
"""


@pytest.mark.case("V19")
@pytest.mark.parametrize("where", ["data", "eval", "accumulation"])
def test_a_signal_to_the_whole_group_saves_at_a_step_boundary(tmp_path: Path, where: str) -> None:
    process = start(WORKERS, str(tmp_path), where)
    os.killpg(process.pid, signal.SIGTERM)
    out, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    seen = int(out.split()[1])
    assert seen % 4 == 0, "never in the middle of an accumulation"
    newest = mp.newest(tmp_path)
    assert newest is not None
    assert mp.Checkpoint.open(newest.path).training_state()["progress"] == {"seen": seen}
    assert len(mp.list_run(tmp_path).committed) == 1
