"""Optimizer state on ranks that is no plain shard: quantised, of another shape, on some ranks only.

Models are single matrices, so that every cut and every block can be counted by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import milepost as mp
from tests.state.quantised import Codes, QuantisedAdam, parts_of
from tests.worlds import run_world


class Weights(nn.Module):
    """Matrices by name, each cut over all ranks along a dim of its own; whole in one process."""

    def __init__(self, cuts: dict[str, tuple[tuple[int, int], int]], *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, (shape, dim) in cuts.items():
            value = torch.randn(shape, generator=generator)
            if dist.is_initialized() and dist.get_world_size() > 1:
                mesh = init_device_mesh("cpu", (dist.get_world_size(),))
                value = distribute_tensor(value, mesh, [Shard(dim)])
            self.register_parameter(name, nn.Parameter(value))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Gradients that depend on the step and the place of an element, not on the cut."""
    for number in steps:
        for name, param in model.named_parameters():
            generator = torch.Generator().manual_seed(1000 * number + sum(map(ord, name)))
            grad = torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = grad
        optimizer.step()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    return {
        f"{name}.{slot}": parts_of(value)
        for name, param in model.named_parameters()
        for slot, value in optimizer.state.get(param, {}).items()
    }


def same(found: dict[str, dict[str, Tensor]], expected: dict[str, dict[str, Tensor]]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].keys() == parts.keys()
        and all(
            found[name][p].dtype == t.dtype and torch.equal(found[name][p], t)
            for p, t in parts.items()
        )
        for name, parts in expected.items()
    )


QUANTISED = {
    "rows": ((24, 32), 0),  # blocks of 16 end with rows
    "columns": ((6, 64), 1),  # 32 columns on each of two ranks
    "divided": ((8, 24), 1),  # 12 columns: blocks of the shards are no blocks of the whole
    "narrow": ((32, 8), 0),  # a block is two rows
    "uneven": ((21, 16), 0),
    "empty": ((1, 64), 0),  # the second rank has nothing
}


def save_quantised(rank: int, size: int, run: Path) -> Any:
    model = Weights(QUANTISED)
    optimizer = QuantisedAdam(model.parameters())
    step(model, optimizer, range(3))
    mp.save(run / "checkpoint-3", {"model": model, "optimizer": optimizer}, step=3)
    other = Weights(QUANTISED, seed=1)
    resumed = QuantisedAdam(other.parameters())
    report = mp.load(run / "checkpoint-3", {"model": other, "optimizer": resumed})
    saved, loaded = states(model, optimizer), states(other, resumed)
    for each in ((model, optimizer), (other, resumed)):
        step(*each, range(3, 5))
    return {
        "level": report.level.value,
        "same": same(loaded, saved),
        "goes on": same(states(other, resumed), states(model, optimizer)),
        "requantised": report.optimizers["optimizer"].requantised,
        "saved": saved,
        "kinds": [type(s["exp_avg"]._local_tensor) is Codes for s in optimizer.state.values()],
    }


def load_quantised(rank: int, size: int, run: Path) -> Any:
    model = Weights(QUANTISED, seed=2)
    optimizer = QuantisedAdam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(mp.errors.CheckpointError) as refused:
        mp.load(run / "checkpoint-3", state)
    untouched = not optimizer.state
    report = mp.load(run / "checkpoint-3", state, blocks=mp.BlockPolicy.REQUANTISE)
    found = states(model, optimizer)
    step(model, optimizer, range(3, 5))
    return {
        "error": str(refused.value),
        "untouched": untouched,
        "found": found,
        "level": report.level.value,
        "requantised": report.optimizers["optimizer"].requantised,
        "lines": report.lines(),
    }


def joined(saved: list[Any], name: str, part: str, dim: int) -> Tensor:
    return torch.cat([each["saved"][name][part] for each in saved], dim)


@pytest.mark.case("V37")
@pytest.mark.spec("v1#optim-6")
def test_quantised_state_is_bit_equal_on_the_same_ranks_and_where_no_block_is_divided(
    tmp_path: Path,
) -> None:
    saved = run_world(2, save_quantised, tmp_path)
    for each in saved:
        assert (each["level"], each["same"], each["goes on"]) == ("exact", True, True)
        assert each["requantised"] == ()
    assert [each["kinds"] for each in saved] == [
        [True, True, True, True, True, True],
        [True, True, True, True, True, False],
    ]
    alone = run_world(1, load_quantised, tmp_path)[0]
    assert alone["untouched"] and alone["level"] == "warm-restart"
    assert "2 quantised states have blocks that the live cut divides" in alone["error"]
    assert (
        "divided.exp_avg (blocks of 16 elements of each shard of [(2, 1, 1)]; shape (8, 24)"
        in (alone["error"])
    )
    assert alone["requantised"] == ("divided.exp_avg", "divided.exp_avg_sq")
    assert any("2 states quantised anew: divided.exp_avg" in line for line in alone["lines"])
    for name in ("rows", "narrow", "uneven", "empty"):
        codes = joined(saved[:1] if name == "empty" else saved, f"{name}.exp_avg", "codes", 0)
        scale = joined(saved[:1] if name == "empty" else saved, f"{name}.exp_avg", "scale", 0)
        assert torch.equal(alone["found"][f"{name}.exp_avg"]["codes"], codes), name
        assert torch.equal(alone["found"][f"{name}.exp_avg"]["scale"], scale), name
    codes = joined(saved, "columns.exp_avg", "codes", 1)
    assert torch.equal(alone["found"]["columns.exp_avg"]["codes"], codes)
    blocks = [each["saved"]["columns.exp_avg"]["scale"].view(6, 2) for each in saved]
    assert torch.equal(alone["found"]["columns.exp_avg"]["scale"].view(6, 4), torch.cat(blocks, 1))


@pytest.mark.case("V37")
def test_divided_blocks_are_quantised_anew_within_one_rounding(tmp_path: Path) -> None:
    saved = run_world(2, save_quantised, tmp_path)
    alone = run_world(1, load_quantised, tmp_path)[0]
    parts = alone["found"]["divided.exp_avg"]
    before = torch.cat([floats(each["saved"]["divided.exp_avg"], (8, 12)) for each in saved], 1)
    assert (floats(parts, (8, 24)) - before).abs().max() <= before.abs().max() / 254 * 1.01
    four = run_world(4, load_quantised, tmp_path)
    assert {each["level"] for each in four} == {"warm-restart"}
    for each in four:  # 6 columns of 8 rows are no whole number of the 16 columns of "columns"
        assert "divided.exp_avg" in each["requantised"]
    quarters = [each["found"]["columns.exp_avg"] for each in four]
    assert torch.equal(
        torch.cat([q["codes"] for q in quarters], 1), alone["found"]["columns.exp_avg"]["codes"]
    )


def floats(parts: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    values = parts["table"][parts["codes"].int()].view(-1, 16) * parts["scale"].view(-1, 1)
    return values.view(shape)


class LocalNorms(torch.optim.Optimizer):
    """Keeps the norms of its own rows, a number of its own, and one that is the same everywhere."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            local = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            state = self.state[param]
            state["norms"] = state.get("norms", 0) + local.norm(dim=1)
            state["shape"] = torch.tensor(param.shape)
            state["moment"] = param.grad.clone()


def save_own(rank: int, size: int, run: Path) -> Any:
    model = Weights({"w": ((5, 4), 0), "v": ((4, 4), 0)})
    optimizer = LocalNorms(model.parameters())
    step(model, optimizer, range(2))
    state = {"model": model, "optimizer": optimizer}
    mp.save(run / "checkpoint-2", state, step=2)
    step(model, optimizer, range(2, 3))
    mp.save(run / "checkpoint-3", state, step=3)
    other = Weights({"w": ((5, 4), 0), "v": ((4, 4), 0)}, seed=1)
    resumed = LocalNorms(other.parameters())
    report = mp.load(run / "checkpoint-3", {"model": other, "optimizer": resumed})
    own = report.optimizers["optimizer"].per_rank
    return same(states(other, resumed), states(model, optimizer)), report.level.value, own


def load_own(rank: int, size: int, run: Path) -> Any:
    model = Weights({"w": ((5, 4), 0), "v": ((4, 4), 0)}, seed=1)
    optimizer = LocalNorms(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(mp.errors.CheckpointError) as refused:
        mp.load(run / "checkpoint-3", state)
    report = mp.load(run / "checkpoint-3", state, missing=mp.Missing.KEEP)
    found = report.optimizers["optimizer"]
    with pytest.raises(mp.errors.MismatchError, match="2 optimizer states were kept by each rank"):
        mp.load_checkpoint(run / "checkpoint-3")
    return str(refused.value), found.not_carried, list(optimizer.state), report.lines()


@pytest.mark.spec("v1#optim-7")
def test_state_of_another_shape_is_kept_by_each_rank_unless_all_have_the_same(
    tmp_path: Path,
) -> None:
    for is_same, level, own in run_world(2, save_own, tmp_path):
        assert is_same and level == "exact"
        assert own == ("w.norms", "v.norms")
    for size in (1, 4):
        for error, fresh, left, lines in run_world(size, load_own, tmp_path):
            assert "2 states belong to the parts of parameters that the saving ranks held" in error
            assert "w.norms, v.norms" in error and "missing=Missing.KEEP" in error
            assert fresh == ("w", "v") and left == []
            assert any("2 states of another topology, afresh: w, v" in line for line in lines)


def save_on_some(rank: int, size: int, run: Path) -> list[str]:
    errors = []
    for slot, value in (("exp_avg", None), ("count", 3)):
        model = Weights({"w": ((4, 4), 0)})
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        step(model, optimizer, range(1))
        if rank == 1:
            param = next(model.parameters())
            optimizer.state[param][slot] = torch.zeros_like(param) if value is None else value
        with pytest.raises(mp.errors.CheckpointError) as refused:
            mp.save(run / "checkpoint-1", {"model": model, "optimizer": optimizer}, step=1)
        errors.append(str(refused.value))
    assert list(run.iterdir()) == []
    return errors


@pytest.mark.case("V36")
def test_a_slot_that_only_some_holders_have_is_refused_naming_the_ranks(tmp_path: Path) -> None:
    for first, second in run_world(2, save_on_some, tmp_path):
        assert "the slot 'exp_avg' of w is absent on rank 0 and tensor on rank 1" in first
        assert "count" in second and "rank 0" in second and "rank 1" in second


MIXED = {"w": ((21, 16), 0)}  # on four ranks the last has 48 elements, too few for blocks


def save_mixed(rank: int, size: int, run: Path) -> Any:
    model = Weights(MIXED)
    optimizer = QuantisedAdam(model.parameters())
    step(model, optimizer, range(2))
    mp.save(run / "checkpoint-2", {"model": model, "optimizer": optimizer}, step=2)
    other = Weights(MIXED, seed=1)
    resumed = QuantisedAdam(other.parameters())
    report = mp.load(run / "checkpoint-2", {"model": other, "optimizer": resumed})
    for each in ((model, optimizer), (other, resumed)):
        step(*each, range(2, 4))
    found = states(other, resumed)
    own = report.optimizers["optimizer"].per_rank
    return same(found, states(model, optimizer)), list(found["w.exp_avg"]), own


def test_state_that_is_quantised_on_some_ranks_only_is_kept_by_each(tmp_path: Path) -> None:
    found = run_world(4, save_mixed, tmp_path)
    assert all(is_same for is_same, _, _ in found)
    assert [kind for _, kind, _ in found] == [["codes", "scale", "table"]] * 3 + [[""]]
    assert found[0][2] == ("w.exp_avg", "w.exp_avg_sq")


def save_fresh(rank: int, size: int, run: Path) -> bool:
    """A save of an optimizer that has not stepped, and a load into one that has."""
    model = Weights({"w": ((4, 4), 0)})
    optimizer = torch.optim.AdamW(model.parameters())
    mp.save(run / "checkpoint-1", {"model": model, "optimizer": optimizer}, step=1)
    assert dict(optimizer.state) == {}
    other = Weights({"w": ((4, 4), 0)}, seed=1)
    resumed = torch.optim.AdamW(other.parameters())
    step(other, resumed, range(1))
    mp.load(run / "checkpoint-1", {"model": other, "optimizer": resumed})
    return dict(resumed.state) == {}


def test_nothing_is_initialised_by_saving_and_no_state_is_restored_as_none(tmp_path: Path) -> None:
    assert run_world(2, save_fresh, tmp_path) == [True, True]


def never_had_a_gradient(rank: int, size: int, run: Path) -> Any:
    cuts = dict.fromkeys(("routed", "frozen", "never"), ((4, 4), 0))
    model, other = Weights(cuts), Weights(cuts, seed=1)
    optimizer, resumed = (torch.optim.Adam(m.parameters()) for m in (model, other))

    def route(each: nn.Module, own: torch.optim.Optimizer, *names: str) -> None:
        own.zero_grad()
        for name in names:
            getattr(each, name).grad = torch.ones_like(getattr(each, name))
        own.step()

    route(model, optimizer, "routed", "frozen")
    for each in (model, other):
        each.get_parameter("frozen").requires_grad_(False)
    before = {param: set(slots) for param, slots in optimizer.state.items()}
    mp.save(run / "checkpoint-1", {"model": model, "optimizer": optimizer}, step=1)
    untouched = before == {param: set(slots) for param, slots in optimizer.state.items()}
    mp.load(run / "checkpoint-1", {"model": other, "optimizer": resumed})
    absent = other.get_parameter("never") not in resumed.state
    kept = "exp_avg" in resumed.state[other.get_parameter("frozen")]
    for each, own in ((model, optimizer), (other, resumed)):
        route(each, own, "routed", "never")
    first = resumed.state[other.get_parameter("never")]["step"].item()
    return untouched, absent, kept, first, same(states(other, resumed), states(model, optimizer))


@pytest.mark.case("V36")
def test_what_never_had_a_gradient_stays_without_state_on_every_rank(tmp_path: Path) -> None:
    assert run_world(2, never_had_a_gradient, tmp_path) == [(True, True, True, 1.0, True)] * 2
