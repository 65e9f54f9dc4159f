"""Resumes under every parallelism: built from the checkpoint, warm, and the best one at the end.

The models are of real architectures and held as transformers holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

import milepost as mp
from milepost_trainer.parallel import MeshSizes, ParallelModel, build
from tests.parallel import expert_models as experts
from tests.parallel.expert_models import EP, EP_FSDP, FSDP, ONE, TP, TP_FSDP, Mode
from tests.worlds import run_world

FAMILY = "Qwen3Moe"
BEST = mp.BestMetric("eval_loss")
CP: Mode = {"cp_size": 2}
MODES = [FSDP, TP, EP, EP_FSDP, TP_FSDP, CP]
Train: TypeAlias = Callable[[torch.optim.Optimizer, range], None]


def world_size(mode: Mode) -> int:
    return experts.world_size(mode) * mode.get("cp_size", 1)


def held(base: Path, mode: Mode) -> tuple[Any, Train]:
    """The model as `mode` says, and what trains it; transformers has no context parallelism."""
    if "cp_size" not in mode:
        model = experts.build(base, mode)
        return model, partial(experts.train, model)
    parallel = build(str(base), MeshSizes(cp=mode["cp_size"]))
    return parallel.model, partial(train_columns, parallel)


def train_columns(parallel: ParallelModel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """As `experts.train`, each rank with its columns of the sequences."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(3, 64, (2, 8), generator=generator)
        parallel.train_step({"input_ids": tokens, "labels": tokens})
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def named(mode: Mode) -> str:
    return "+".join(f"{axis.removesuffix('_size')}{n}" for axis, n in mode.items()) or "one"


def run_of(rank: int, size: int, base: Path, mode: Mode, run: Path) -> Any:
    """Three steps with three saves; every value after the second."""
    model, train = held(base, mode)
    optimizer = experts.optimizer_of(model)
    state = {"model": model, "optimizer": optimizer}
    kept: dict[str, torch.Tensor] = {}
    with mp.CheckpointManager(run, best=BEST) as manager:
        manager.resume(state)
        for step, loss in {1: 0.9, 2: 0.3, 3: 0.5}.items():
            train(optimizer, range(step, step + 1))
            if step == 2:
                kept = experts.values(model, optimizer)
            manager.save(step, state, metrics={"eval_loss": loss})
    return kept, experts.values(model, optimizer)


def built_from_it(rank: int, size: int, base: Path, mode: Mode, run: Path) -> Any:
    """What a trainer does: choose, resolve, build, load without reading weights again."""
    config, parallelism = {"model_name_or_path": str(base)}, dict(mode)
    with mp.CheckpointManager(run, resume=True, best=BEST) as manager:
        source = mp.resolve_resume_weights_source(
            manager.checkpoint_to_resume(), config, parallelism
        )
        assert source.origin is mp.WeightsOrigin.CHECKPOINT and source.path is not None
        model, _ = held(Path(source.path), mode)
        optimizer = experts.optimizer_of(model)
        report = manager.resume(
            {"model": model, "optimizer": optimizer}, weights=mp.Weights.ALREADY_READ
        )
    assert report is not None
    notes = [note for note in report.notes if "weights not read again" in note]
    return len(notes), report.level.value, experts.values(model, optimizer)


def built_from_base(rank: int, size: int, base: Path, mode: Mode, run: Path) -> str:
    model, _ = held(base, mode)
    with (
        mp.CheckpointManager(run, resume=True, best=BEST) as manager,
        pytest.raises(mp.errors.MismatchError, match="so training would go on from weights"),
    ):
        manager.resume({"model": model}, weights=mp.Weights.ALREADY_READ)
    return "refused"


def warm(rank: int, size: int, base: Path, mode: Mode, run: Path) -> Any:
    model, train = held(base, mode)
    optimizer = experts.optimizer_of(model)
    train(optimizer, range(7, 8))
    with mp.CheckpointManager(run, resume=True, best=BEST) as manager:
        report = manager.resume({"model": model, "optimizer": optimizer}, moments=mp.Moments.FRESH)
    assert report is not None
    return report.fresh_moments, len(optimizer.state), experts.weights(model)


def best_of(rank: int, size: int, base: Path, mode: Mode, run: Path) -> Any:
    model, _ = held(base, mode)
    with mp.CheckpointManager(run, resume=True, best=BEST) as manager:
        report = manager.load_best({"model": model})
    return report.step, experts.weights(model)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    differing = [name for name, value in found.items() if not torch.equal(value, expected[name])]
    assert differing == []


@pytest.fixture
def base(tmp_path: Path) -> Path:
    experts.random_model(FAMILY).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES, ids=named)
def test_a_model_built_from_the_checkpoint_goes_on_exactly(
    base: Path, tmp_path: Path, mode: Mode
) -> None:
    saved = run_world(world_size(mode), run_of, base, mode, tmp_path / "run")
    found = run_world(world_size(mode), built_from_it, base, mode, tmp_path / "run")
    for (notes, level, values), (_, expected) in zip(found, saved, strict=True):
        assert (notes, level) == (1, "exact")
        assert_same(values, expected)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [EP, TP_FSDP, CP], ids=named)
def test_a_model_built_from_the_base_is_refused(base: Path, tmp_path: Path, mode: Mode) -> None:
    run_world(world_size(mode), run_of, base, mode, tmp_path / "run")
    found = run_world(world_size(mode), built_from_base, base, mode, tmp_path / "run")
    assert set(found) == {"refused"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(EP, TP), (EP_FSDP, ONE), (TP_FSDP, EP), (CP, TP)],
    ids=lambda mode: named(mode),
)
def test_a_warm_restart_goes_on_from_the_weights_on_another_topology(
    base: Path, tmp_path: Path, saved: Mode, loaded: Mode
) -> None:
    expected = run_world(world_size(saved), run_of, base, saved, tmp_path / "run")[0][1]
    for fresh, states, weights in run_world(
        world_size(loaded), warm, base, loaded, tmp_path / "run"
    ):
        assert (fresh, states) == ({"optimizer": "as asked"}, 0)
        assert_same(weights, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(EP, EP), (EP_FSDP, EP_FSDP), (TP_FSDP, TP_FSDP), (EP_FSDP, TP), (TP_FSDP, ONE)],
    ids=lambda mode: named(mode),
)
def test_the_best_one_comes_back_under_expert_and_tensor_parallelism(
    base: Path, tmp_path: Path, saved: Mode, loaded: Mode
) -> None:
    """Other programs refuse it for these."""
    expected = run_world(world_size(saved), run_of, base, saved, tmp_path / "run")[0][0]
    for step, weights in run_world(world_size(loaded), best_of, base, loaded, tmp_path / "run"):
        assert step == 2
        assert_same(weights, expected)
