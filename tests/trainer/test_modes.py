"""Every mode of parallelism trains as one process does, and its checkpoints go anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import milepost as mp
from tests.trainer import modes
from tests.trainer.modes import Mode, alone
from tests.trainer.runs import (
    BRIEF,
    FULL,
    Steps,
    assert_close,
    assert_equal,
    everything,
    plain_checkpoint,
    take_over,
    train,
    trained,
)
from tests.worlds import run_world

FAMILIES = {
    "llama": modes.DENSE_MODES,
    "llama-tied": modes.TIED_MODES,
    "qwen3-moe": modes.EXPERT_MODES,
    "mixtral": modes.MIXTRAL_MODES,
    "gpt-oss": modes.GPT_OSS_MODES,
}
SPREAD = {
    "llama": ["DDP", "FSDP2+TP", "FSDP2+CP", "PP-interleaved"],
    "llama-tied": ["PP"],
    "qwen3-moe": ["EP+FSDP2", "EP=TP", "EP+CP", "EP+ETP", "PP+EP"],
    "mixtral": ["TP"],
    "gpt-oss": ["EP", "CP", "ETP"],
}
QUICK = [m for f, ms in FAMILIES.items() for m in ms if m.name in SPREAD[f]]
EVERY = [m for ms in FAMILIES.values() for m in ms]
CASES = [
    *(pytest.param(m, BRIEF, id=str(m), marks=pytest.mark.brief) for m in QUICK),
    *(pytest.param(m, FULL, id=f"{m}-full", marks=pytest.mark.slow) for m in EVERY),
]

RunOf = Callable[[Mode, Steps], Path]


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """The run of a mode: trained once, with two checkpoints and what every rank saw."""
    made: dict[tuple[str, Steps], Path] = {}

    def run(mode: Mode, steps: Steps) -> Path:
        key = (str(mode), steps)
        if key not in made:
            directory = tmp_path_factory.mktemp(str(mode))
            if mode.sizes.world_size == 1:
                train(0, 1, mode, directory, steps)
            else:
                run_world(mode.sizes.world_size, train, mode, directory, steps)
            made[key] = directory
        return made[key]

    return run


@pytest.mark.parametrize(("mode", "steps"), CASES)
def test_losses_are_those_of_one_process(mode: Mode, steps: Steps, run_of: RunOf) -> None:
    first = trained(run_of(mode, steps))
    reference = trained(run_of(alone(mode.family), steps))
    same = slice(0, steps.dropout)
    assert_close(first.losses[same], reference.losses[same])
    assert_close(first.norms[same], reference.norms[same], within=5e-4)
    assert_close([first.evaluated], [reference.evaluated])
    assert reference.norms[0] > 0.5 and first.losses[0] - first.losses[-1] > 0.05
    for rank in range(1, mode.sizes.world_size):
        other = trained(run_of(mode, steps), rank)
        assert (other.losses, other.norms) == (first.losses, first.norms)
        assert other.evaluated == first.evaluated


@pytest.mark.parametrize(("mode", "steps"), CASES)
def test_transformers_loads_the_gathered_model(mode: Mode, steps: Steps, run_of: RunOf) -> None:
    directory = plain_checkpoint(run_of(mode, steps))
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    weights = {name: param.detach() for name, param in loaded.named_parameters()}
    assert len(weights) > 10
    assert_equal(weights, everything(run_of(mode, steps)))
    assert mp.Checkpoint.open(directory).verify().problems == ()


@pytest.mark.parametrize(("mode", "steps"), CASES)
def test_one_process_takes_over(mode: Mode, steps: Steps, run_of: RunOf) -> None:
    take_over(0, 1, alone(mode.family), None, [run_of(mode, steps)])


@pytest.mark.brief
@pytest.mark.parametrize("mode", QUICK, ids=str)
def test_a_resume_is_exact_on_the_same_shape_and_equal_from_others(
    mode: Mode, run_of: RunOf
) -> None:
    ring = [m for m in QUICK if m.family == mode.family]
    after = ring.index(mode) + 1
    others = [*ring[after:], *ring[: after - 1]][:3] or [alone(mode.family)]
    runs = [run_of(other, BRIEF) for other in others]
    run_world(mode.sizes.world_size, take_over, mode, run_of(mode, BRIEF), runs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", EVERY, ids=str)
def test_a_shape_resumes_exactly_and_takes_over_from_every_other(mode: Mode, run_of: RunOf) -> None:
    others = [alone(mode.family), *(m for m in FAMILIES[mode.family] if m != mode)]
    runs = [run_of(other, FULL) for other in others]
    size = mode.sizes.world_size
    run_world(size, take_over, mode, run_of(mode, FULL), runs, deadline_s=280)
