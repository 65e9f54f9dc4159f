"""Saves behind training on several ranks: agreed policies, failures on all, no collective."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import milepost as mp
from milepost.checkpointing.world import converse
from milepost.engine.rendezvous import together
from milepost.storage import fileops
from tests.parallel.models import (
    DDP2,
    FSDP2,
    FSDP_TP,
    HSDP,
    TP2,
    Shape,
    gathered,
    start,
)
from tests.worlds import run_outcomes, run_world, silence_of


class Held:
    """Writes behind training wait until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def hook(self, name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name in ("write", "map") and threading.current_thread() is not threading.main_thread():
            assert self.go.wait(60)
        return function(*arguments)


def raised_by(action: Callable[[], Any]) -> str:
    try:
        action()
    except mp.errors.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one | two if not torch.equal(one[name], two[name])]


# ---- what is in it


def save_and_go_on(
    rank: int, world_size: int, shape: Shape, run: Path
) -> list[tuple[list[str], list[str], int]]:
    os.environ["MILEPOST_AGGREGATE_BELOW"] = "1"
    training = start(shape)
    training.step()
    found = []
    for step, overlap in enumerate((*mp.Overlap, *mp.Overlap), start=1):
        expected, held = gathered(training), Held()
        sync = run / f"sync-{step}"
        mp.save(sync, training.state(), step=step, rng=mp.Rng.LEAVE_OUT)
        told: list[mp.SaveEvent] = []
        with fileops.hooked(held.hook):
            handle = mp.save_async(
                run / f"checkpoint-{step}",
                training.state(),
                step=step,
                overlap=overlap,
                rng=mp.Rng.LEAVE_OUT,
                on_event=told.append,
            )
            training.step()  # with collectives of its own
            training.step()
            assert not handle.done()
            held.go.set()
            handle.wait()
        other = start(shape, seed=7)
        other.step()
        mp.load(run / f"checkpoint-{step}", other.state())
        files = [p.relative_to(sync) for p in sorted(sync.rglob("*")) if p.is_file()]
        unlike = [
            str(name)
            for name in files
            if name.name != "milepost.json"
            and (sync / name).read_bytes() != (run / f"checkpoint-{step}" / name).read_bytes()
        ]
        snapshot = sum(event.nbytes for event in told if event.phase == "snapshot")
        found.append((differing(gathered(other), expected), unlike, snapshot))
    return found


@pytest.mark.case("V32")
@pytest.mark.parametrize("shape", [FSDP2, TP2, FSDP_TP, HSDP], ids=str)
def test_it_has_the_state_at_the_call_and_the_files_of_save(shape: Shape, tmp_path: Path) -> None:
    for saves in run_world(shape.world_size, save_and_go_on, shape, tmp_path):
        assert [save[:2] for save in saves] == [([], [])] * 4


def snapshot_share(rank: int, world_size: int, run: Path) -> tuple[int, int]:
    training = start(DDP2)
    training.step()
    handle = mp.save_async(run / "checkpoint-1", training.state(), step=1, rng=mp.Rng.LEAVE_OUT)
    report = handle.wait()
    whole = sum(tensor.numel() * tensor.element_size() for tensor in gathered(training).values())
    return report.phase_nbytes["snapshot"], whole


def test_replicas_copy_only_what_they_write(tmp_path: Path) -> None:
    shares = run_world(2, snapshot_share, tmp_path)
    whole = shares[0][1]
    copied = sum(share for share, _ in shares)
    assert whole <= copied < 1.05 * whole  # positions in the data are there too
    assert all(share > 0 for share, _ in shares)


# ---- one in flight


def policies(rank: int, world_size: int, run: Path) -> dict[str, Any]:
    training, held = start(FSDP2), Held()
    if rank == 1:
        held.go.set()  # this rank alone would think that it is done
    found: dict[str, Any] = {}

    def save(step: int, in_flight: mp.InFlight) -> mp.SaveHandle:
        path = run / f"checkpoint-{step}"
        return mp.save_async(path, training.state(), step=step, in_flight=in_flight)

    with fileops.hooked(held.hook):
        save(1, mp.InFlight.WAIT)
        found["skip"] = save(2, mp.InFlight.SKIP).wait().written
        found["error"] = raised_by(lambda: save(3, mp.InFlight.ERROR))
        training.step()
        queued = save(4, mp.InFlight.QUEUE)
        expected = gathered(training)
        training.step()
        found["queued done"] = queued.done()
        threading.Timer(0.05, held.go.set).start()
        save(5, mp.InFlight.QUEUE)  # one waits already: so does this one
        save(6, mp.InFlight.WAIT).wait()
    mp.load(run / "checkpoint-4", training.state())
    found["queued"] = differing(gathered(training), expected)
    return found


def test_policies_for_one_in_flight_are_those_of_rank_0(tmp_path: Path) -> None:
    for found in run_world(2, policies, tmp_path):
        assert found.pop("error").startswith("SaveInFlightError")
        assert found == {"skip": False, "queued done": False, "queued": []}
    entries = mp.list_run(tmp_path).committed
    assert [entry.step for entry in entries] == [1, 4, 5, 6]
    parents = [entry.manifest.parent_id for entry in entries]
    assert parents == [None, *(entry.manifest.checkpoint_id for entry in entries[:-1])]


def many_conversations(rank: int, world_size: int, run: Path) -> bool:
    training, held = start(TP2), Held()
    with fileops.hooked(held.hook):
        handle = mp.save_async(run / "checkpoint-1", training.state(), step=1)
        for _ in range(12):  # as a manager that asks all ranks for signals at every step
            with converse() as talk, together(talk, "signals"):
                pass
        held.go.set()
        return handle.wait(30).written


def test_what_ranks_talk_about_meanwhile_does_not_disturb_a_save(tmp_path: Path) -> None:
    assert run_world(2, many_conversations, tmp_path) == [True, True]


# ---- failures


def fail_behind(rank: int, world_size: int, shape: Shape, run: Path) -> list[str]:
    os.environ["MILEPOST_AGGREGATE_BELOW"] = "1"
    training = start(shape)
    training.step()
    mp.save(run / "checkpoint-1", training.state(), step=1)
    count = [0]

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        count[0] += name == "write"
        if rank == 1 and name == "write" and count[0] == 2:
            raise OSError(28, "No space left on device", target)
        return function(*arguments)

    with fileops.hooked(hook):
        mp.save_async(run / "checkpoint-2", training.state(), step=2)
        training.step()
        if rank == 1:
            time.sleep(0.2)  # rank 0 may be at the next save before this one has failed here
        errors = [raised_by(lambda: mp.save(run / "checkpoint-3", training.state(), step=3))]
        errors.append(raised_by(lambda: mp.save(run / "checkpoint-3", training.state(), step=3)))
    return errors


@pytest.mark.case("V18")
@pytest.mark.parametrize("shape", [FSDP2, FSDP_TP], ids=str)
def test_a_failure_of_one_rank_is_raised_by_the_next_save_of_all(
    shape: Shape, tmp_path: Path
) -> None:
    for first, second in run_world(shape.world_size, fail_behind, shape, tmp_path):
        assert first.startswith("NoSpaceError: rank 1: "), first
        assert "step 2 was not saved behind training" in first and second == ""
    listing = mp.list_run(tmp_path)
    assert [entry.step for entry in listing.committed] == [1, 3]
    assert listing.unfinished == () and listing.torn == ()


def fail_an_exchange(rank: int, world_size: int, run: Path) -> list[str]:
    os.environ["MILEPOST_AGGREGATE_BELOW"] = "1"
    training, held = start(TP2), Held()

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        thread = threading.current_thread().name
        if rank == 0 and name == "write" and thread.startswith("milepost-exchange"):
            raise OSError(5, "Input/output error", target)
        return held.hook(name, target, function, arguments)

    with fileops.hooked(hook):
        one = mp.save_async(run / "checkpoint-1", training.state(), step=1)
        queue = mp.InFlight.QUEUE
        two = mp.save_async(run / "checkpoint-2", training.state(), step=2, in_flight=queue)
        held.go.set()
        errors = [raised_by(one.wait), raised_by(two.wait)]
    expected = gathered(training)
    mp.save_async(run / "checkpoint-3", training.state(), step=3).wait()
    training.step()
    mp.load(run / "checkpoint-3", training.state())
    return errors + differing(gathered(training), expected)


def test_a_queued_save_does_not_take_the_connections_of_an_exchange_that_failed(
    tmp_path: Path,
) -> None:
    for one, two in run_world(2, fail_an_exchange, tmp_path):
        assert one.startswith("StorageError: rank 0: ") and "step 1 was not saved" in one
        assert "queued on the same connections" in two
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == [3]


def refuse_on_one(rank: int, world_size: int, run: Path) -> tuple[str, int, bool]:
    training, buffers = start(FSDP2), mp.HostBuffers()
    training.step()
    mp.save_async(run / "checkpoint-1", training.state(), step=1, buffers=buffers).wait()
    parameter = next(training.model.parameters())
    hook: Any = parameter.register_post_accumulate_grad_hook
    handle = hook(lambda p: None) if rank == 1 else None
    until_step = mp.Overlap.UNTIL_STEP

    def save(step: int) -> mp.SaveHandle:
        path = run / f"checkpoint-{step}"
        return mp.save_async(path, training.state(), step=step, buffers=buffers, overlap=until_step)

    before, message = buffers.nbytes, raised_by(lambda: save(2))
    if handle is not None:
        handle.remove()
    training.step()
    written = save(3).wait().written
    return message, buffers.nbytes - before, written


def test_a_snapshot_that_fails_on_one_rank_fails_on_all_and_frees_the_buffers(
    tmp_path: Path,
) -> None:
    for message, grown, written in run_world(2, refuse_on_one, tmp_path):
        assert message.startswith("InvalidInputError: rank 1: Overlap.UNTIL_STEP: ")
        assert grown == 0 and written


def die_behind(rank: int, world_size: int, run: Path) -> str:
    os.environ["MILEPOST_AGGREGATE_BELOW"] = "1"
    training = start(FSDP2)
    mp.save(run / "checkpoint-1", training.state(), step=1)

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if rank == 1 and name == "write":
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    with fileops.hooked(hook), silence_of(6):
        handle = mp.save_async(run / "checkpoint-2", training.state(), step=2)
        return raised_by(handle.wait)


def test_a_rank_killed_in_a_save_behind_training_leaves_the_previous_checkpoint(
    tmp_path: Path,
) -> None:
    alive, dead = run_outcomes(2, die_behind, tmp_path)
    assert dead.exit_code == -signal.SIGKILL
    assert alive.value.startswith("RankTimeoutError: rank 0: rank 1 has shown no sign of life") or (
        alive.value.startswith("RankTimeoutError: rank 1 has shown no sign of life")
    ), alive
    newest = mp.list_run(tmp_path).newest
    assert newest is not None and newest.step == 1


def change_a_tensor_that_travels(rank: int, world_size: int, run: Path) -> str:
    os.environ["MILEPOST_CHECK_STAGING"] = "1"
    training, held = start(TP2), Held()
    weights = dict(training.model.named_parameters())
    with fileops.hooked(held.hook):
        mp.save_async(run / "checkpoint-1", training.state(), step=1)
        handle = mp.save_async(
            run / "checkpoint-2",
            training.state(),
            step=2,
            in_flight=mp.InFlight.QUEUE,
            overlap=mp.Overlap.UNTIL_STEP,
        )
        if rank == 1:
            with torch.no_grad():  # not by the optimizer, which would have waited
                weights["model.layers.1.mlp.down_proj.weight"]._local_tensor.add_(1.0)  # type: ignore[attr-defined]
        dist.barrier()  # nobody writes, and so ends the first save, before that
        held.go.set()
        return raised_by(handle.wait)


@pytest.mark.case("V32")
def test_a_tensor_that_travels_between_ranks_is_named_when_it_changed_too_early(
    tmp_path: Path,
) -> None:
    for text in run_world(2, change_a_tensor_that_travels, tmp_path):
        assert text.startswith("StateChangedError: rank 1: 1 tensors changed"), text
        assert "model.layers.1.mlp.down_proj.weight" in text
    assert [entry.step for entry in mp.list_run(tmp_path).committed] == [1]


# ---- beside training


def wait_in_a_collective(rank: int, world_size: int, run: Path) -> bool:
    training = start(TP2)
    handle = mp.save_async(run / "checkpoint-1", training.state(), step=1)
    if rank == 0:
        dist.all_reduce(torch.zeros(3))  # in it until rank 1 has seen the save committed
    else:
        handle.wait(60)
        dist.all_reduce(torch.zeros(3))
    return handle.wait(60).written


def test_a_save_ends_while_the_training_sits_in_a_collective(tmp_path: Path) -> None:
    assert run_world(2, wait_in_a_collective, tmp_path) == [True, True]


def destroy_in_flight(rank: int, world_size: int, shape: Shape, run: Path) -> bool:
    os.environ["MILEPOST_AGGREGATE_BELOW"] = "1"
    training, held = start(shape), Held()
    with fileops.hooked(held.hook):
        handle = mp.save_async(run / "checkpoint-1", training.state(), step=1)
        store = dist.distributed_c10d._get_default_store()  # the harness parts by it
        dist.destroy_process_group()
        held.go.set()
        written = handle.wait(60).written
    store.set(f"left/{rank}", "1")
    store.wait(["left/0", "left/1"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    return written and mp.save(run / "checkpoint-2", training.state(), step=2).written


@pytest.mark.parametrize("shape", [FSDP2, TP2], ids=str)
def test_a_save_outlives_the_process_group(shape: Shape, tmp_path: Path) -> None:
    outcomes = run_outcomes(2, destroy_in_flight, shape, tmp_path)
    assert [outcome.value for outcome in outcomes] == [True, True], outcomes
