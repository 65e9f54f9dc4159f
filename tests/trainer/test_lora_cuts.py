"""Adapters that follow a cut weight, DoRA and those of fused experts: saved, resumed, taken over.

One run of a case is made for all that is asked of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import milepost as mp
from milepost_trainer.lora import adapter
from milepost_trainer.lora_settings import LoraSettings
from milepost_trainer.parallel import MeshSizes
from milepost_trainer.parallel.heads import Head, whole_model
from tests.states import same
from tests.trainer.lora_runs import (
    ATTENTION,
    EXPERTS,
    adapter_config,
    adapter_of,
    live_logits,
    logits_of,
    on_base,
    write_base,
)
from tests.trainer.modes import config_of
from tests.trainer.yaml_runs import SAVED, contents, look, losses, run, run_and_kill, write_text

DORA: dict[str, Any] = {
    "r": 4,
    "lora_alpha": 8,
    "use_dora": True,
    "target_modules": [*ATTENTION, "k_proj", "up_proj", "down_proj", "embed_tokens"],
}
PARAMETERS: dict[str, Any] = {
    "r": 2,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
    "target_parameters": [f"mlp.experts.{name}" for name in EXPERTS],
}


@dataclass(frozen=True)
class Case:
    mesh: str
    family: str
    lora: str
    is_merged: bool = False

    def __str__(self) -> str:
        kind = "merged" if self.is_merged else "alone"
        return f"{self.lora}-{self.mesh.replace(' ', '+')}-{kind}"

    def changes(self, base: Path) -> dict[str, Any]:
        lora = DORA if self.lora == "dora" else PARAMETERS
        return on_base(base, lora=lora, merge_expert_lora_on_save=self.is_merged)


QUICK = [
    Case("tp2", "llama-plain", "dora"),
    Case("dp_shard2 ep2", "moe", "parameters", is_merged=True),
]
SLOW = [
    Case("tp2", "llama-plain", "dora", is_merged=True),
    Case("dp_shard2 tp2", "llama-plain", "dora"),
    Case("dp_shard2 tp2", "llama-plain", "dora", is_merged=True),
    Case("cp2 tp2", "llama-plain", "dora"),
    Case("dp_shard2 ep2", "moe", "parameters"),
    Case("dp_shard4 ep2", "moe", "parameters", is_merged=True),
    Case("cp2 ep2", "moe", "parameters"),
    Case("tp2", "moe", "parameters"),
    Case("tp2", "moe", "parameters", is_merged=True),
    Case("dp_shard2 tp2", "moe", "parameters"),
    Case("tp2 ep2", "moe", "parameters", is_merged=True),
]
CASES = [
    *(pytest.param(case, id=str(case)) for case in QUICK),
    *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW),
]


class Runs:
    """One run of each case, killed after its first save and resumed, and one that never stopped."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.text = write_text(directory)
        self._made: dict[str, tuple[Path, Path]] = {}

    def base(self, family: str) -> Path:
        place = self.directory / f"base-{family}"
        return place if place.is_dir() else write_base(place, family)

    def of(self, case: Case) -> tuple[Path, Path]:
        """The last checkpoints: of the run that never stopped, and of the resumed one."""
        if str(case) not in self._made:
            place, changes = self.directory / str(case), case.changes(self.base(case.family))
            end = run(place / "whole", self.text, case.mesh, **changes)
            run_and_kill(place / "killed", self.text, case.mesh, **changes)
            resumed = run(place / "killed", self.text, case.mesh, **changes)
            self._made[str(case)] = (end, resumed)
        return self._made[str(case)]

    def alone(self, case: Case) -> Path:
        """The last checkpoint of the same run in one process."""
        place = self.directory / f"one-{case.lora}-{case.is_merged}"
        if not place.is_dir():
            run(place, self.text, **case.changes(self.base(case.family)))
        return max(place.glob("checkpoint-*"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_process_and_files_have_its_tensors(case: Case, runs: Runs) -> None:
    end, _ = runs.of(case)
    alone = runs.alone(case)
    assert losses(end) == pytest.approx(losses(alone), rel=1e-4)
    found, wanted = adapter_of(end), adapter_of(alone)
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in wanted.items()}
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=1e-2, atol=2e-3), name
    magnitudes = [name for name in found if name.endswith("lora_magnitude_vector")]
    assert bool(magnitudes) == (case.lora == "dora")


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_with_the_bits_of_one_that_never_stopped(case: Case, runs: Runs) -> None:
    end, resumed = runs.of(case)
    assert same(contents(resumed), contents(end))
    first, last = adapter_of(resumed.with_name(f"checkpoint-{SAVED}")), adapter_of(resumed)
    assert same(last, adapter_of(end))
    assert not any(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("case", CASES)
def test_one_process_takes_it_over_with_the_same_values(case: Case, runs: Runs) -> None:
    end, _ = runs.of(case)
    saved = adapter_of(end)
    (found,) = look(end.parent, runs.text, **case.changes(runs.base(case.family)))
    assert found["level"] == "resharded", found["notes"]
    learning = {n: value for n, value in found["weights"].items() if "lora_" in n}
    assert same(by_bits(learning), by_bits(saved))
    moments = contents(end)["state"]["optimizer"]["tensors"]
    assert {name.removesuffix(".exp_avg") for name in moments if name.endswith(".exp_avg")} == (
        learning.keys()
    )
    assert all(torch.equal(found["moments"][name], value) for name, value in moments.items())


def by_bits(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in an order that does not depend on how they are called."""
    return sorted(tensors.values(), key=lambda t: (tuple(t.shape), t.flatten().tolist()))


@pytest.mark.parametrize("case", CASES)
def test_stock_programs_compute_what_the_run_computes(case: Case, runs: Runs) -> None:
    end, _ = runs.of(case)
    base = AutoModelForCausalLM.from_pretrained(runs.base(case.family))
    before = logits_of(base)
    if case.is_merged:
        found = logits_of(AutoModelForCausalLM.from_pretrained(end))
    else:
        assert adapter_config(end)["peft_type"] == "LORA"
        found = logits_of(PeftModel.from_pretrained(base, end))
    live = live_logits(end.parent, runs.text, **case.changes(runs.base(case.family)))
    assert torch.allclose(found, live, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, before, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"), [(SLOW[5], "tp2"), (SLOW[7], "dp_shard2 ep2"), (SLOW[1], "tp2")], ids=str
)
def test_another_cut_takes_it_over_with_the_same_values(
    before: Case, after: str, runs: Runs
) -> None:
    end, _ = runs.of(before)
    for found in look(end.parent, runs.text, after, **before.changes(runs.base(before.family))):
        assert found["level"] == "resharded", found["notes"]
        learning = {n: value for n, value in found["weights"].items() if "lora_" in n}
        assert same(by_bits(learning), by_bits(adapter_of(end)))


def put_on(settings: dict[str, Any], sizes: MeshSizes, family: str = "qwen3-moe") -> None:
    model = whole_model(config_of(family), Head.LANGUAGE_MODEL, 0, torch.float32, None)
    adapter(LoraSettings(**settings), sizes, seed=0)(model)


def test_adapters_of_parameters_that_a_mesh_has_no_rule_for_are_refused() -> None:
    gate = {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}
    with pytest.raises(ValueError, match=r"weight of .*mlp\.gate is no weight of fused experts"):
        put_on(gate, MeshSizes(tp=2))
    put_on(gate, MeshSizes(dp_shard=2, ep=2))
    both = {"expert_projections": ["down_proj"], "target_parameters": ["experts.gate_up_proj"]}
    with pytest.raises(ValueError, match="target_parameters and expert_projections both adapt"):
        put_on(both, MeshSizes(dp_shard=2, ep=2))
    with pytest.raises(ValueError, match="leave out expert_tp_size"):
        put_on(PARAMETERS, MeshSizes(dp_shard=2, etp=2))


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp_shard": 2, "ep": 2}], ids=str)
@pytest.mark.parametrize("bias", ["gate_up_proj_bias", "down_proj_bias"])
def test_an_adapter_of_a_bias_of_experts_is_refused_where_it_would_be_left_out(
    bias: str, mesh: dict[str, int]
) -> None:
    both: dict[str, Any] = {
        "r": 2,
        "target_parameters": ["mlp.experts.down_proj", f"mlp.experts.{bias}"],
    }
    with pytest.raises(ValueError, match=rf"target_parameters: {bias} of .*layers\.0.* no proj"):
        put_on(both, MeshSizes(**mesh), "gpt-oss")
    put_on(both, MeshSizes(dp_shard=2), "gpt-oss")
    alone = {**both, "target_parameters": ["mlp.experts.down_proj"]}
    put_on(alone, MeshSizes(**mesh), "gpt-oss")


def test_the_newest_of_a_run_is_an_adapter_or_merged_weights(runs: Runs) -> None:
    kinds = {True: mp.CheckpointKind.MERGED_ADAPTER, False: mp.CheckpointKind.ADAPTER}
    for case in QUICK:
        end, _ = runs.of(case)
        assert mp.checkpoint_kind(end) is kinds[case.is_merged]
        assert mp.Checkpoint.open(end).verify().problems == ()
