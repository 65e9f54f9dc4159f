"""What must be the same on all ranks and is not is refused on all of them, naming two; and what is
said about a save does not stay in the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import milepost as mp
from milepost.checkpointing import world as worlds
from milepost.errors import CheckpointError
from tests.parallel.stage_model import Stage
from tests.parallel.test_pipeline_files import make_stage
from tests.worlds import run_world


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return f"{type(caught.value).__name__}: {caught.value}"


# ---- V28: what is meant to be the same


def save_other_schedules(rank: int, size: int, run: Path) -> str:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for _ in range(rank == 2):  # rank 2 has taken a step more
        optimizer.step()
        schedule.step()
    state = {"model": model, "scheduler": schedule}
    return refused(lambda: mp.save(run / "checkpoint-1", state, step=1))


@pytest.mark.case("V28")
def test_schedules_that_drifted_apart_are_refused(tmp_path: Path) -> None:
    (text,) = set(run_world(4, save_other_schedules, tmp_path))
    assert "scheduler: its state differs between rank 0 and rank 2" in text
    assert not list(tmp_path.iterdir())


def own_loader(rank: int, size: int, run: Path) -> dict[str, Any]:
    state: dict[str, Any] = {"loader": {"pos": rank * 10, "buf": [rank]}}
    mp.save(run / "checkpoint-1", state, step=1)
    back: dict[str, Any] = {"loader": {}}
    mp.load(run / "checkpoint-1", back)
    found: dict[str, Any] = back["loader"]
    return found


@pytest.mark.case("V28")
def test_positions_of_four_loaders_come_back_each_to_its_rank(tmp_path: Path) -> None:
    for rank, found in enumerate(run_world(4, own_loader, tmp_path)):
        assert found == {"pos": rank * 10, "buf": [rank]}


# ---- groups of an optimizer, over the stages of a pipeline


def save_stages(rank: int, size: int, run: Path, apart: str) -> str:
    stage: Stage = make_stage(rank, size)
    decay = [p for p in stage.parameters() if p.ndim > 1]
    plain = [p for p in stage.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decay, "name": "decay", "weight_decay": 0.1},
        {"params": plain, "name": "plain", "weight_decay": 0.0},
    ]
    if apart == "a group" and rank == 1:
        groups[0]["weight_decay"] = 0.2
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups)
    if apart == "the class" and rank == 1:
        optimizer = torch.optim.SGD(groups)
    state = {"model": stage, "optimizer": optimizer}
    if not apart:
        mp.save(run / "checkpoint-1", state, step=1)
        found = mp.Checkpoint.open(run / "checkpoint-1").training_state()["optimizer"]
        return str([(g["name"], g["hyper"]["weight_decay"]) for g in found["groups"]])
    return refused(lambda: mp.save(run / "checkpoint-1", state, step=1))


@pytest.mark.parametrize(
    ("apart", "named"), [("a group", "group 'decay'"), ("the class", "class name")]
)
def test_stages_whose_optimizers_are_not_one_are_refused(
    apart: str, named: str, tmp_path: Path
) -> None:
    (text,) = set(run_world(2, save_stages, tmp_path, apart))
    assert named in text and "rank 0" in text and "rank 1" in text, text
    assert not list(tmp_path.iterdir())


def test_groups_of_one_name_are_one_group_over_the_stages(tmp_path: Path) -> None:
    (text,) = set(run_world(2, save_stages, tmp_path, ""))
    assert text == "[('decay', 0.1), ('plain', 0.0)]"


# ---- sums that are not summed up


def save_partial(rank: int, size: int, run: Path) -> str:
    model = nn.Module()
    mesh = init_device_mesh("cpu", (size,))
    model.register_buffer("total", DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    return refused(lambda: mp.save(run / "checkpoint-1", {"model": model}, step=1))


def test_a_value_that_is_not_summed_up_is_refused_by_name(tmp_path: Path) -> None:
    (text,) = set(run_world(2, save_partial, tmp_path))
    assert "total: its placement is" in text and "not summed up yet" in text
    assert not list(tmp_path.iterdir())


# ---- the store


def count_keys(rank: int, size: int, run: Path) -> list[int]:
    """Keys of Milepost's conversations that are in the store after each save, seen by rank 0."""
    store: Any = dist.distributed_c10d._get_default_store()
    torch.manual_seed(0)
    state = {"model": nn.Linear(8, 8), "data": {"rank": rank}}
    counts = []
    for step in range(1, 13):
        save = mp.save if step % 2 else mp.save_async
        done: Any = save(run / f"checkpoint-{step}", state, step=step)
        if isinstance(done, mp.SaveHandle):
            done.wait()
        dist.barrier()
        counts.append(int(store.num_keys()))
        dist.barrier()
    assert worlds._world().count >= 12
    return counts


def test_what_earlier_saves_said_is_removed_from_the_store(tmp_path: Path) -> None:
    for counts in run_world(3, count_keys, tmp_path):
        early, late = counts[4:8], counts[8:]
        assert max(late) <= max(early) + 12, counts  # gloo and barriers leave some of their own
        assert max(late) < 1.5 * max(early), counts
