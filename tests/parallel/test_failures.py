"""One rank in trouble: all ranks raise the same, in bounded time, and nothing committed is lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import milepost as mp
from milepost.checkpointing.world import converse
from milepost.engine import rendezvous
from milepost.engine.rendezvous import together
from milepost.state.tensors import same_bits
from milepost.storage import fileops
from tests.parallel.models import FSDP2, FSDP_TP, Shape, start
from tests.worlds import run_outcomes, run_world, silence_of


def failing(operation: str, number: int, error: Exception) -> Any:
    """A hook that raises at the `number`-th `operation`."""
    seen = [0]

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if name == operation:
            seen[0] += 1
            if seen[0] == number:
                raise error
        return function(*arguments)

    return fileops.hooked(hook)


def fail_in_a_write(rank: int, world_size: int, shape: Shape, run: Path) -> list[str]:
    os.environ["MILEPOST_AGGREGATE_BELOW"] = "1"  # every rank writes, however small its shards are
    training = start(shape)
    training.step()
    mp.save(run / "checkpoint-1", training.state(), step=1)
    errors = []
    with failing("write", 2 if rank == 1 else 10**9, OSError(28, "No space left on device")):
        try:
            mp.save(run / "checkpoint-2", training.state(), step=2)
        except mp.errors.CheckpointError as error:
            errors.append(f"{type(error).__name__}: {error}")
    mp.save(run / "checkpoint-3", training.state(), step=3)
    return errors


@pytest.mark.parametrize("shape", [FSDP2, FSDP_TP], ids=str)
@pytest.mark.case("V18")
def test_a_full_disk_on_one_rank_fails_all_and_the_next_save_works(
    shape: Shape, tmp_path: Path
) -> None:
    results = run_world(shape.world_size, fail_in_a_write, shape, tmp_path)
    for (message,) in results:
        assert message.startswith("NoSpaceError: rank 1: ")
        assert "earlier checkpoints are untouched" in message
    listing = mp.list_run(tmp_path)
    assert [entry.step for entry in listing.committed] == [1, 3]
    assert listing.unfinished == () and listing.torn == ()


def die_in_a_write(rank: int, world_size: int, run: Path) -> tuple[str, float]:
    os.environ["MILEPOST_AGGREGATE_BELOW"] = "1"
    training = start(FSDP2)
    training.step()
    mp.save(run / "checkpoint-1", training.state(), step=1)
    begin = time.monotonic()

    def hook(name: str, target: str, function: Callable[..., Any], arguments: Any) -> Any:
        if rank == 1 and name == "write":
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    with fileops.hooked(hook), silence_of(8):
        try:
            mp.save(run / "checkpoint-2", training.state(), step=2)
        except mp.errors.RankError as error:
            return str(error), time.monotonic() - begin
    return "nothing", 0.0


def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_previous_checkpoint(
    tmp_path: Path,
) -> None:
    survivor, dead = run_outcomes(2, die_in_a_write, tmp_path, deadline_s=90)
    assert dead.exit_code == -signal.SIGKILL
    message, seconds = survivor.value
    assert "rank 1 has shown no sign of life" in message
    assert seconds < 60
    listing = mp.list_run(tmp_path)
    assert [entry.step for entry in listing.committed] == [1]
    assert mp.Checkpoint.open(tmp_path / "checkpoint-1").verify().ok


def save_different_steps(rank: int, world_size: int, run: Path) -> str:
    step = 5 + rank
    try:
        mp.save(run / f"checkpoint-{step}", {"value": {"a": 1}}, step=step)
    except mp.errors.CheckpointError as error:
        return str(error)
    return "nothing"


def test_ranks_that_save_different_steps_are_told_so(tmp_path: Path) -> None:
    for message in run_world(2, save_different_steps, tmp_path):
        assert "every rank must make the same call" in message
    assert mp.list_run(tmp_path).committed == ()


def drift(rank: int, world_size: int, run: Path) -> str:
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        model.bias[2] += rank
    try:
        mp.save(run / "checkpoint-1", {"model": model}, step=1)
    except mp.errors.MismatchError as error:
        return str(error)
    return "nothing"


def test_replicas_that_are_not_equal_are_refused_by_name(tmp_path: Path) -> None:
    for message in run_world(2, drift, tmp_path):
        assert "1 plain tensors differ between ranks 0 and 1: model: bias" in message


def load_other_checkpoints(rank: int, world_size: int, run: Path) -> str:
    model = torch.nn.Linear(2, 2)
    for step in (1, 2):
        mp.save(run / f"checkpoint-{step}", {"model": model}, step=step)
    try:
        mp.load(run / f"checkpoint-{1 + rank}", {"model": model})
    except mp.errors.CheckpointError as error:
        return str(error)
    return "nothing"


def test_ranks_that_load_different_checkpoints_are_refused(tmp_path: Path) -> None:
    for message in run_world(2, load_other_checkpoints, tmp_path):
        assert "give every rank the same path" in message


def own_values(rank: int, world_size: int, run: Path) -> Any:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    for _ in range(rank + 1):
        torch.rand(3)
    model = torch.nn.Linear(2, 2)
    dist.broadcast(model.weight.data, 0)
    dist.broadcast(model.bias.data, 0)
    loader = {"pos": rank * 10, "buf": [rank] * (rank + 1), "ids": torch.arange(rank)}
    state = {"model": model, "loader": loader, "same": {"epoch": 3}}
    mp.save(run / "checkpoint-1", state, step=1)
    expected = (random.random(), float(np.random.rand()), torch.rand(2).tolist())
    back: dict[str, Any] = {"model": model, "loader": {}, "same": {}}
    report = mp.load(run / "checkpoint-1", back)
    found = (random.random(), float(np.random.rand()), torch.rand(2).tolist())
    return expected == found, back["loader"], back["same"], report.level.value


@pytest.mark.case("V28")
@pytest.mark.case("V29")
def test_every_rank_gets_back_its_own_values_and_random_state(tmp_path: Path) -> None:
    for rank, (equal, loader, same, level) in enumerate(run_world(3, own_values, tmp_path)):
        assert equal and level == "exact"
        assert (loader["pos"], loader["buf"], same) == (
            rank * 10,
            [rank] * (rank + 1),
            {"epoch": 3},
        )
        assert loader["ids"].tolist() == list(range(rank))


def other_world_size(rank: int, world_size: int, run: Path) -> Any:
    model = torch.nn.Linear(2, 2)
    refused = ""
    try:
        mp.load(run / "checkpoint-1", {"model": model, "loader": {}, "same": {}})
    except mp.errors.CheckpointError as error:
        refused = str(error)
    kept = {"pos": -1}
    state = {"model": model, "loader": kept, "same": {}}
    report = mp.load(run / "checkpoint-1", state, missing=mp.Missing.KEEP)
    draw = torch.rand(2).tolist()
    mp.load(run / "checkpoint-1", state, missing=mp.Missing.KEEP)
    return refused, kept, report.kept, draw, torch.rand(2).tolist(), report.notes


@pytest.mark.spec("v1#rank-2")
@pytest.mark.case("V27")
@pytest.mark.case("V29")
def test_state_of_each_rank_is_never_quietly_given_to_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    run_world(3, own_values, tmp_path)
    results = run_world(2, other_world_size, tmp_path)
    for refused, kept, names, draw, again, notes in results:
        assert "saved by 3 ranks" in refused and "2 ranks load it" in refused
        assert kept == {"pos": -1} and names == ["loader"]
        assert draw == again
        assert any("every rank was seeded from it anew" in note for note in notes)
    assert results[0][3] != results[1][3]


def piece(value: torch.Tensor, dim: int) -> torch.Tensor:
    """What `torch.chunk` gives this rank of `value`; nothing when it has no piece left."""
    parts = torch.chunk(value.view(torch.uint8) if value.element_size() == 1 else value,
                        dist.get_world_size(), dim)  # fmt: skip
    part = parts[dist.get_rank()] if dist.get_rank() < len(parts) else parts[0].narrow(dim, 0, 0)
    return part.contiguous().view(value.dtype)


def cut(value: torch.Tensor, mesh: Any, dim: int) -> DTensor:
    """`value` on the mesh without communication: gloo cannot move every dtype."""
    return DTensor.from_local(
        piece(value, dim),
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


DIMS = {
    "uneven": 0, "one_row": 0, "columns": 1, "deep": 2, "half_precision": 1, "eight_bits": 1,
}  # fmt: skip


class Holder(torch.nn.Module):
    """Parameters with placements that are awkward: uneven, empty, strided, cut on inner dims."""

    def __init__(self, mesh: Any, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        values = {
            "uneven": torch.randn(5, 3),
            "one_row": torch.randn(1, 6),
            "columns": torch.randn(6, 7),
            "deep": torch.randn(3, 4, 5),
            "half_precision": torch.randn(9, 4).to(torch.bfloat16),
            "eight_bits": torch.randn(7, 8).to(torch.float8_e4m3fn),
        }
        for name, value in values.items():
            held = cut(value, mesh, DIMS[name]) if mesh else value
            if value.dtype == torch.float8_e4m3fn:
                self.register_buffer(name, held)
            else:
                self.register_parameter(name, torch.nn.Parameter(held))
        self.register_buffer("count", torch.tensor(3))


def save_awkward(rank: int, world_size: int, run: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    mp.save(run / "checkpoint-1", {"model": Holder(mesh, 0)}, step=1)


def load_awkward(rank: int, world_size: int, run: Path) -> bool:
    model = Holder(init_device_mesh("cpu", (world_size,)), 5)
    mp.load(run / "checkpoint-1", {"model": model})
    expected = Holder(None, 0).state_dict()
    for name, value in model.state_dict().items():
        wanted, found = expected[name], value
        if isinstance(value, DTensor):
            wanted, found = piece(expected[name], DIMS[name]), value.to_local()
        if not same_bits(found, wanted):
            return False
    return True


@pytest.mark.case("V39")
def test_uneven_empty_and_inner_shards_of_any_dtype_are_ordinary(tmp_path: Path) -> None:
    run_world(4, save_awkward, tmp_path)
    checkpoint = mp.Checkpoint.open(tmp_path / "checkpoint-1")
    assert checkpoint.verify().problems == ()
    stored = checkpoint.read_weights()
    for name, value in Holder(None, 0).state_dict().items():
        assert same_bits(stored[name], value), name
    for world_size in (2, 3):
        assert all(run_world(world_size, load_awkward, tmp_path))


def call_off_many(rank: int, world_size: int, count: int) -> list[tuple[str, str]]:
    if rank == 1:
        seldom = time.sleep
        slow = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: seldom(2))
        vars(rendezvous)["time"] = slow
    found = []
    for number in range(count):
        try:
            with converse() as talk, together(talk, "sound"):
                if rank == 0:
                    time.sleep(0.5 * (number == 0))  # until the other rank waits
                    raise mp.errors.DamagedError(f"candidate {number}")
        except mp.errors.CheckpointError as error:
            found.append((type(error).__name__, str(error)))
    dist.barrier()  # rank 0 has the store
    return found


def test_a_rank_that_looks_seldom_learns_of_every_call_that_was_called_off_meanwhile() -> None:
    for outcome in run_outcomes(2, call_off_many, 7):
        assert outcome.error is None
        kinds, texts = zip(*outcome.value, strict=True)
        assert set(kinds) == {"DamagedError"}
        assert [f"candidate {n}" in text for n, text in enumerate(texts)] == [True] * 7
