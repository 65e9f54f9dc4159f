"""Saves behind training, in one process: what they hold, when they wait, and how they fail."""

from __future__ import annotations

import errno
import gc
import io
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.state.tensors import same_bits
from tests.slow_disk import failing_writes, held_writes
from tests.states import train, training

FAST = mp.WriteOptions(durability=mp.Durability.PAGE_CACHE)
MIB = 2**20


def values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = {f"model.{name}": t.clone() for name, t in state["model"].state_dict().items()}
    for number, slots in enumerate(state["optimizer"].state.values()):
        found |= {f"{number}.{name}": value.clone() for name, value in slots.items()}
    return found


def assert_loads(path: Path, expected: dict[str, torch.Tensor]) -> None:
    other = training(seed=9, steps=1)
    mp.load(path, other)
    found = values(other)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


# ---- what is in it


@pytest.mark.case("V32")
@pytest.mark.parametrize("overlap", mp.Overlap)
def test_it_has_the_state_at_the_call_although_training_goes_on(
    tmp_path: Path, overlap: mp.Overlap
) -> None:
    state = training(steps=2)
    with held_writes() as gate:
        expected = values(state)
        handle = mp.save_async(tmp_path / "checkpoint-2", state, step=2, overlap=overlap)
        train(state, 3)
        assert not handle.done()
        gate.set()
        report = handle.wait()
    assert report.written and report.step == 2 and handle.held_s > 0
    assert_loads(tmp_path / "checkpoint-2", expected)


def test_it_writes_what_save_writes(tmp_path: Path) -> None:
    state = training(steps=2)
    mp.save(tmp_path / "a" / "checkpoint-2", state, step=2, metrics={"loss": 1.5})
    mp.save_async(tmp_path / "b" / "checkpoint-2", state, step=2, metrics={"loss": 1.5}).wait()
    one, two = (tmp_path / run / "checkpoint-2" for run in "ab")
    names = [p.relative_to(one) for p in sorted(one.rglob("*")) if p.is_file()]
    assert names == [p.relative_to(two) for p in sorted(two.rglob("*")) if p.is_file()]
    manifest = Path("milepost.json")
    assert manifest in names
    others = [name for name in names if name != manifest]
    assert [n for n in others if (one / n).read_bytes() != (two / n).read_bytes()] == []
    first, second = (json.loads((place / manifest).read_text()) for place in (one, two))
    own = {"checkpoint_id", "created", "phases", "phase_nbytes", "self_digest"}
    assert {key for key in first if first[key] != second[key]} == own
    assert second["phase_nbytes"]["snapshot"] > 0


def test_views_shared_memory_and_tiny_dtypes_are_copied_bit_for_bit(tmp_path: Path) -> None:
    base = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    held = {
        "transposed": base.t(),
        "strided": base[::2, 1:5],
        "whole": base,
        "small": torch.arange(7, dtype=torch.float32).to(torch.float8_e4m3fn),
        "conjugate": torch.complex(base, -base).conj(),
        "scalar": torch.tensor(3),
    }
    expected = {name: tensor.clone() for name, tensor in held.items()}
    with held_writes():
        mp.save_async(tmp_path / "checkpoint-1", {"held": held}, step=1)
        base.zero_()
        held["small"].view(torch.uint8).zero_()
    found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    mp.load(tmp_path / "checkpoint-1", {"held": found})
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


def test_live_tensors_are_let_go_when_they_have_been_copied(tmp_path: Path) -> None:
    model = nn.Linear(300, 300)
    weight = weakref.ref(model.weight)
    with held_writes():
        mp.save_async(tmp_path / "checkpoint-1", {"model": model}, step=1)
        del model
        gc.collect()
        assert weight() is None


# ---- one in flight


def test_wait_returns_when_the_one_in_flight_has_ended(tmp_path: Path) -> None:
    state = training()
    with held_writes() as gate:
        first = mp.save_async(tmp_path / "checkpoint-1", state, step=1)
        threading.Timer(0.05, gate.set).start()
        second = mp.save_async(tmp_path / "checkpoint-2", state, step=2)
        assert first.done() and second.wait().written


def test_queue_copies_now_and_writes_when_the_last_one_is_committed(tmp_path: Path) -> None:
    state = training(steps=1)
    with held_writes() as gate:
        mp.save_async(tmp_path / "checkpoint-1", state, step=1)
        train(state, 1)
        expected = values(state)
        second = mp.save_async(
            tmp_path / "checkpoint-2", state, step=2, in_flight=mp.InFlight.QUEUE
        )
        train(state, 1)
        assert not second.done()
        gate.set()
        second.wait()
    one, two = mp.list_run(tmp_path).committed
    assert two.manifest.parent_id == one.manifest.checkpoint_id
    assert_loads(tmp_path / "checkpoint-2", expected)


def test_skip_leaves_the_save_out_and_says_so(tmp_path: Path) -> None:
    state, told = training(), list[mp.SaveEvent]()
    with held_writes():
        mp.save_async(tmp_path / "checkpoint-1", state, step=1)
        report = mp.save_async(
            tmp_path / "checkpoint-2",
            state,
            step=2,
            in_flight=mp.InFlight.SKIP,
            on_event=told.append,
        ).wait()
    assert not report.written and "step 2 was left out" in report.notes[0]
    assert [event.kind for event in told] == [mp.EventKind.LEFT_OUT]
    again = mp.save_async(tmp_path / "checkpoint-3", state, step=3, in_flight=mp.InFlight.SKIP)
    assert again.wait().written
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == [1, 3]


def test_error_refuses_while_one_is_in_flight(tmp_path: Path) -> None:
    state = training()
    with held_writes():
        mp.save_async(tmp_path / "checkpoint-1", state, step=1)
        with pytest.raises(mp.errors.SaveInFlightError, match=r"checkpoint-2: an earlier save"):
            mp.save_async(tmp_path / "checkpoint-2", state, step=2, in_flight=mp.InFlight.ERROR)
    handle = mp.save_async(tmp_path / "checkpoint-2", state, step=2, in_flight=mp.InFlight.ERROR)
    assert handle.wait().written


@pytest.mark.parametrize("in_flight", [mp.InFlight.SKIP, mp.InFlight.ERROR])
def test_a_save_that_was_waited_for_is_not_in_flight(tmp_path: Path, in_flight: Any) -> None:
    state = training()
    for step in range(1, 11):
        target = tmp_path / f"checkpoint-{step}"
        handle = mp.save_async(target, state, step=step, in_flight=in_flight, options=FAST)
        assert handle.wait().written, f"step {step} was left out"


def test_a_load_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    state = training(steps=1)
    with held_writes() as gate:
        expected = values(state)
        mp.save_async(tmp_path / "checkpoint-1", state, step=1)
        threading.Timer(0.05, gate.set).start()
        assert_loads(tmp_path / "checkpoint-1", expected)


def test_a_handle_waits_no_longer_than_it_is_told(tmp_path: Path) -> None:
    with held_writes() as gate:
        handle = mp.save_async(tmp_path / "checkpoint-1", training(), step=1)
        with pytest.raises(TimeoutError, match=r"checkpoint-1: still being written after 0\.01 s"):
            handle.wait(0.01)
        gate.set()
        assert handle.wait().written


def test_what_exists_already_is_kept_as_by_save(tmp_path: Path) -> None:
    state = training()
    first = mp.save(tmp_path / "checkpoint-1", state, step=1)
    with pytest.raises(mp.errors.ExistsError):
        mp.save_async(tmp_path / "checkpoint-1", state, step=1)
    kept = mp.save_async(tmp_path / "checkpoint-1", state, step=1, on_existing=mp.OnExisting.KEEP)
    assert not kept.wait().written and kept.wait().checkpoint_id == first.checkpoint_id


# ---- failures behind training


@pytest.mark.case("V18")
@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, mp.errors.NoSpaceError), (errno.EIO, mp.errors.StorageError)],
)
def test_a_failure_is_raised_by_the_next_save_and_counts_for_nothing(
    tmp_path: Path, number: int, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    state = training()
    mp.save(tmp_path / "checkpoint-1", state, step=1)
    with failing_writes(number):
        mp.save_async(tmp_path / "checkpoint-2", state, step=2)
        mp.wait_for_saves()
    assert "step 2 was not saved" in caplog.text
    newest = mp.list_run(tmp_path).newest
    assert newest is not None and newest.step == 1
    with pytest.raises(error, match=r"step 2 was not saved behind training"):
        mp.save_async(tmp_path / "checkpoint-3", state, step=3)
    assert mp.save_async(tmp_path / "checkpoint-3", state, step=3).wait().written
    listing = mp.list_run(tmp_path)
    assert [entry.step for entry in listing.committed] == [1, 3]
    assert listing.unfinished == () and listing.torn == ()


def test_who_waited_for_a_handle_was_told(tmp_path: Path) -> None:
    state, told = training(), list[mp.SaveEvent]()
    with failing_writes(errno.EIO):
        handle = mp.save_async(tmp_path / "checkpoint-1", state, step=1, on_event=told.append)
        with pytest.raises(mp.errors.StorageError, match="step 1 was not saved"):
            handle.wait()
    assert told[-1].kind is mp.EventKind.FAILED and told[-1].error is not None
    assert mp.save(tmp_path / "checkpoint-2", state, step=2).written


def test_two_failures_are_raised_one_by_one(tmp_path: Path) -> None:
    state = training()
    with failing_writes(errno.EIO), held_writes() as gate:
        for step in (1, 2):
            mp.save_async(
                tmp_path / f"checkpoint-{step}", state, step=step, in_flight=mp.InFlight.QUEUE
            )
        gate.set()
        mp.wait_for_saves()
    for step in (1, 2):
        with pytest.raises(mp.errors.StorageError, match=f"step {step} was not saved"):
            mp.save(tmp_path / "checkpoint-3", state, step=3)
    mp.save(tmp_path / "checkpoint-3", state, step=3)


# ---- staging that overlaps training


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((24 * MIB,), 1.0))


@pytest.mark.case("V32")
def test_a_step_waits_for_the_copies_of_what_it_changes(tmp_path: Path) -> None:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.weight.grad = torch.ones_like(model.weight)
    state = {"model": model, "optimizer": optimizer}
    for step in (1, 2):  # the hook is there once, and works every time
        mp.save_async(
            tmp_path / f"checkpoint-{step}",
            state,
            step=step,
            overlap=mp.Overlap.UNTIL_STEP,
            options=FAST,
        )
        optimizer.step()
        mp.wait_for_saves()
        saved = mp.Checkpoint.open(tmp_path / f"checkpoint-{step}").read("weight")
        assert (float(saved.min()), float(saved.max())) == (2.0 - step, 2.0 - step)
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(tmp_path: Path) -> None:
    state = training()
    handle = state["model"].norm.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(mp.errors.InvalidInputError, match=r"optimizer-in-backward.*Overlap.NONE"):
        mp.save_async(tmp_path / "checkpoint-1", state, step=1, overlap=mp.Overlap.UNTIL_STEP)
    assert list(tmp_path.iterdir()) == []
    handle.remove()
    mp.save_async(tmp_path / "checkpoint-1", state, step=1, overlap=mp.Overlap.UNTIL_STEP).wait()


@contextmanager
def changing(tensor: torch.Tensor) -> Iterator[None]:
    """Another thread counts the tensor up, over and over."""
    stop, begun = threading.Event(), threading.Event()

    def count() -> None:
        with torch.no_grad():
            while not stop.is_set():
                tensor.add_(1.0)
                begun.set()

    thread = threading.Thread(target=count)
    thread.start()
    assert begun.wait(10)
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.case("V32")
@pytest.mark.parametrize("overlap", mp.Overlap)
def test_a_tensor_that_changed_while_it_was_copied_is_named(
    tmp_path: Path, overlap: mp.Overlap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILEPOST_CHECK_STAGING", "1")
    racing = nn.Linear(2048, 2048)
    model = nn.ModuleDict({"calm": nn.Linear(64, 64), "racing": racing})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}

    def save(step: int) -> mp.SaveReport:
        path = tmp_path / f"checkpoint-{step}"
        return mp.save_async(path, state, step=step, overlap=overlap, options=FAST).wait()

    with changing(racing.weight), pytest.raises(mp.errors.StateChangedError) as raised:
        for step in range(50):  # a thread that gets no turn in the meantime changes nothing
            save(step)
    assert "1 tensors changed while they were copied: racing.weight;" in str(raised.value)
    optimizer.step()
    assert save(50).written
    assert step not in [entry.step for entry in mp.list_run(tmp_path).committed]


# ---- memory


def test_what_has_no_room_in_the_buffers_is_written_before_the_call_returns(
    tmp_path: Path,
) -> None:
    buffers = mp.HostBuffers(max_nbytes=2 * MIB)
    model = nn.ModuleList(nn.Linear(512, 600) for _ in range(5))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    handle = mp.save_async(
        tmp_path / "checkpoint-1", {"model": model}, step=1, buffers=buffers, options=FAST
    )
    for parameter in model.parameters():
        parameter.data.zero_()
    handle.wait()
    assert 0 < buffers.nbytes <= 2 * MIB
    saved = mp.Checkpoint.open(tmp_path / "checkpoint-1")
    assert all(torch.equal(saved.read(name), value) for name, value in expected.items())


def test_buffers_are_used_again_and_can_be_made_ready(tmp_path: Path) -> None:
    buffers = mp.HostBuffers()
    state = training(steps=1)
    buffers.reserve(4 * MIB)
    ready = buffers.nbytes
    for step in range(1, 11):
        overlap = list(mp.Overlap)[step % 2]
        mp.save_async(
            tmp_path / f"checkpoint-{step}",
            state,
            step=step,
            buffers=buffers,
            overlap=overlap,
            options=FAST,
        )
        train(state, 1)
    with failing_writes(errno.EIO), pytest.raises(mp.errors.StorageError):
        mp.save_async(tmp_path / "checkpoint-11", state, step=11, buffers=buffers).wait()
    assert buffers.nbytes == ready > 0
    buffers.close()
    assert buffers.nbytes == 0


# ---- the end of the process

SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
import milepost as mp
from milepost.state.tensors import same_bits
from milepost.storage import fileops
from tests.slow_disk import failing_writes, held_writes
from tests.states import train, training

run, way = Path(sys.argv[1]), sys.argv[2]
state = training(steps=1)
mp.save(run / "checkpoint-1", state, step=1)
written = threading.Event()

def hook(name, target, function, arguments):
    if way == "killed" and name == "write" and target.endswith(".safetensors"):
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "forked" and name == "write":
        written.wait(60)
    return function(*arguments)

with fileops.hooked(hook):
    mp.save_async(run / "checkpoint-2", state, step=2)
    if way == "forked":
        child = os.fork()
        if child == 0:
            mp.wait_for_saves()
            written.set()
            mp.save_async(run / "of-child" / "checkpoint-7", training(seed=7), step=7).wait()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        written.set()
    train(state, 2)
    if way == "killed":
        mp.wait_for_saves()
    if way == "raised":
        raise ValueError("training failed")
"""


def end_of_process(run: Path, way: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run), way],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )


def test_the_interpreter_commits_the_save_in_flight_before_it_exits(tmp_path: Path) -> None:
    done = end_of_process(tmp_path, "returned")
    assert done.returncode == 0, done.stderr
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == [1, 2]


def test_so_it_does_after_an_uncaught_exception(tmp_path: Path) -> None:
    done = end_of_process(tmp_path, "raised")
    assert done.returncode == 1 and "ValueError: training failed" in done.stderr
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == [1, 2]


def test_a_process_killed_in_the_middle_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    done = end_of_process(tmp_path, "killed")
    assert done.returncode == -signal.SIGKILL
    newest = mp.list_run(tmp_path).newest
    assert newest is not None and newest.step == 1
    mp.load(newest.path, training(seed=5, steps=1))
    mp.save(tmp_path / "checkpoint-3", training(), step=3)
    listing = mp.list_run(tmp_path)
    assert [entry.step for entry in listing.committed] == [1, 3] and listing.unfinished == ()


def test_a_forked_process_knows_nothing_of_saves_in_flight(tmp_path: Path) -> None:
    done = end_of_process(tmp_path, "forked")
    assert done.returncode == 0, done.stderr
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == [1, 2]
    mp.load(tmp_path / "checkpoint-2", training(seed=5, steps=1))
    assert mp.list_run(tmp_path / "of-child").newest is not None


# ---- telling


@pytest.mark.parametrize("call", ["save", "save_async"])
def test_events_tell_of_phases_and_bytes(
    tmp_path: Path, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[mp.SaveEvent] = []
    state = training(steps=1)
    with caplog.at_level("INFO", logger="milepost"):
        done = getattr(mp, call)(tmp_path / "checkpoint-1", state, step=1, on_event=told.append)
        report = done if isinstance(done, mp.SaveReport) else done.wait()
    phases = {event.phase: event for event in told if event.kind is mp.EventKind.PHASE}
    assert {"capture", "plan", "stage", "write", "commit"} <= set(phases)
    assert ("snapshot" in phases) == (call == "save_async")
    (started,) = [event for event in told if event.kind is mp.EventKind.STARTED]
    written = sum(event.nbytes for event in told if event.kind is mp.EventKind.WRITTEN)
    assert started.nbytes == written == phases["write"].nbytes == report.phase_nbytes["write"]
    rate = phases["write"].gib_per_s
    assert rate is not None and rate > 0 and phases["plan"].gib_per_s is None
    last = told[-1]
    assert last.kind is mp.EventKind.COMMITTED and last.nbytes == report.nbytes
    assert (last.step, last.rank, last.path) == (1, 0, tmp_path / "checkpoint-1")
    manifest = mp.list_run(tmp_path).committed[0].manifest
    assert manifest.phase_nbytes["write"] == written
    assert "write 0." in caplog.text and "GiB/s" in caplog.text


def test_a_callback_that_raises_fails_no_save_and_is_called_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[mp.SaveEvent] = []

    def callback(event: mp.SaveEvent) -> None:
        told.append(event)
        raise KeyError("tracker")

    assert mp.save(tmp_path / "checkpoint-1", training(), step=1, on_event=callback).written
    assert len(told) == 1 and "on_event raised" in caplog.text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_progress_bar_is_shown_on_terminals_alone(
    tmp_path: Path, stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    bar = mp.progress_bar()
    for step in (1, 2):
        mp.save_async(tmp_path / f"checkpoint-{step}", training(), step=step, on_event=bar).wait()
    options = mp.WriteOptions(on_bytes=bar)
    mp.save(tmp_path / "checkpoint-3", training(), step=3, options=options)
    bar.close()
    text = shown.getvalue()
    assert ("step 1" in text and "step 2" in text and "saving" in text) == (stream is Terminal)
    assert stream is Terminal or text == ""
