"""The files of a pipeline: parts of each stage, one index, ties across stages, what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import milepost as mp
from milepost.errors import CheckpointIncompleteError, DamagedError, MismatchError
from tests.parallel.stage_model import Stage, loss_of
from tests.worlds import run_outcomes, run_world

LAYERS = 4
VOCABULARY, BATCH, LENGTH = 64, 4, 8


def config(*, tied: bool = False) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )


def make_stage(number: int, count: int, *, tied: bool = False, seed: int = 0) -> Stage:
    torch.manual_seed(seed)
    return Stage(LlamaForCausalLM(config(tied=tied)).train(), number, count)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return (tensor if full is None else full()).detach().clone()


def values(modules: list[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for module in modules:
        for name, param in module.named_parameters():
            found[name] = whole(param)
            for slot, value in optimizer.state.get(param, {}).items():
                found[f"{name}.{slot}"] = whole(value)
    return found


def step_without_pipeline(modules: list[nn.Module], optimizer: torch.optim.Optimizer) -> None:
    """Gradients that depend on the values alone, so that ranks need not talk."""
    for module in modules:
        for param in module.parameters():
            param.grad = param.detach().clone() * 0.1
    optimizer.step()
    optimizer.zero_grad()


def assert_loadable(path: Path, saved: dict[str, torch.Tensor], *, tied: bool = False) -> None:
    """Milepost, safetensors and transformers all find the whole model."""
    checkpoint = mp.Checkpoint.open(path)
    assert checkpoint.verify().problems == ()
    weights = checkpoint.read_weights()
    names = set(dict(LlamaForCausalLM(config(tied=tied)).named_parameters()))
    assert names <= weights.keys()
    for part in path.glob("*.safetensors"):
        with safe_open(part, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    if not (path / "config.json").exists():
        config(tied=tied).save_pretrained(path)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, param in loaded.named_parameters():
        assert torch.equal(param, saved[name]), name
        assert torch.equal(weights[name], saved[name]), name


# ---- FSDP2 inside two stages


def save_pp_fsdp(rank: int, size: int, run: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    stage = make_stage(rank // 2, 2)
    layers: Any = stage.model.layers
    for layer in layers.values():
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(stage, mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(stage.parameters())
    step_without_pipeline([stage], optimizer)
    state = {"model": stage, "optimizer": optimizer}
    mp.save_pp_checkpoint(run / "checkpoint-1", state, step=1, max_shard_size=30_000)
    mp.save(run / "checkpoint-2", state, step=2)
    saved = values([stage], optimizer)
    for param in stage.parameters():
        param.data.zero_()
    report = mp.load(run / "checkpoint-1", state)
    assert {n: v.sum() for n, v in values([stage], optimizer).items()} == {
        n: v.sum() for n, v in saved.items()
    }
    return saved, report.level.value, report.fingerprint


@pytest.mark.spec("v1#pipeline-1", "v1#pipeline-2")
@pytest.mark.spec("v1#fingerprint-2")
def test_parts_of_each_stage_have_its_number_and_one_index(tmp_path: Path) -> None:
    outcomes = run_world(4, save_pp_fsdp, tmp_path)
    everything = {**outcomes[0][0], **outcomes[2][0]}
    assert {(level, str(fields)) for _, level, fields in outcomes} == {("exact", "{}")}
    path = tmp_path / "checkpoint-1"
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    assert set(index["metadata"]) == {"total_size"}
    by_stage: dict[str, set[str]] = {}
    for name, part in index["weight_map"].items():
        by_stage.setdefault(part[:13], set()).add(name)
    assert by_stage["model-pp00000"] == {n for n in outcomes[0][0] if n in index["weight_map"]}
    assert by_stage["model-pp00001"] == {n for n in outcomes[2][0] if n in index["weight_map"]}
    assert (path / "model-pp00001-of-00002-00003.safetensors").exists()  # split by size
    assert_loadable(path, everything)
    short = {part.name for part in (tmp_path / "checkpoint-2").glob("*.safetensors")}
    assert short == {f"model-pp0000{n}-of-00002-00001.safetensors" for n in (0, 1)}
    manifest = json.loads((path / "milepost.json").read_bytes())
    assert manifest["pp_stage_partition"] == {"model": [[0, 2], [2, 4]]}
    fingerprint = manifest["fingerprint"]
    assert (fingerprint["pp_size"], fingerprint["world_size"]) == (2, 4)
    model: Any = LlamaForCausalLM(config())
    optimizer = torch.optim.AdamW(model.parameters())
    report = mp.load(path, {"model": model, "optimizer": optimizer})
    assert report.level is mp.Level.RESHARDED
    assert report.fingerprint["pp_size"] == (2, 1)
    assert any("fingerprint.pp_size: saved 2, now 1" in line for line in report.lines())
    for name, param in model.named_parameters():
        assert torch.equal(optimizer.state[param]["exp_avg"], everything[f"{name}.exp_avg"])


def test_an_index_that_names_absent_files_is_refused(tmp_path: Path) -> None:
    run_world(4, save_pp_fsdp, tmp_path)
    path = tmp_path / "checkpoint-2"
    (path / "model-pp00001-of-00002-00001.safetensors").unlink()
    with pytest.raises(DamagedError, match="model-pp00001-of-00002-00001"):
        mp.load(path, {"model": LlamaForCausalLM(config())})
    (path / "milepost.json").unlink()  # what one node with a disk of its own would have copied
    with pytest.raises(CheckpointIncompleteError, match="model-pp00001-of-00002-00001"):
        mp.Checkpoint.open(path).tensors()


# ---- interleaved stages in a real schedule


class Interleaved:
    """Two virtual stages on each of two ranks."""

    def __init__(self, rank: int, seed: int) -> None:
        self.modules: list[nn.Module] = [make_stage(n, 4, seed=seed) for n in (rank, rank + 2)]
        params = [param for module in self.modules for param in module.parameters()]
        self.optimizer = torch.optim.AdamW(params, lr=1e-2)
        stages: list[Any] = [
            PipelineStage(module, number, 4, torch.device("cpu"))
            for module, number in zip(self.modules, (rank, rank + 2), strict=True)
        ]
        self.schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=loss_of)
        self.rank, self.position = rank, 0

    def step(self) -> list[float]:
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        losses: list[torch.Tensor] = []
        if self.rank == 0:
            self.schedule.step(tokens)
        else:
            self.schedule.step(target=tokens, losses=losses)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return [float(loss.detach()) for loss in losses]

    def state(self) -> dict[str, Any]:
        return {"model": self.modules, "optimizer": self.optimizer}


def train_interleaved(rank: int, size: int, run: Path) -> Any:
    first = Interleaved(rank, seed=0)
    for _ in range(2):
        first.step()
    mp.save(run / "checkpoint-2", first.state(), step=2)
    saved = values(first.modules, first.optimizer)
    losses = [first.step() for _ in range(3)]
    second = Interleaved(rank, seed=5)
    second.step()
    report = mp.load(run / "checkpoint-2", second.state())
    second.position = 2
    assert [second.step() for _ in range(3)] == losses
    return saved, report.level.value


def test_virtual_stages_of_a_rank_are_its_stage_and_training_goes_on_exactly(
    tmp_path: Path,
) -> None:
    outcomes = run_world(2, train_interleaved, tmp_path)
    assert {level for _, level in outcomes} == {"exact"}
    path = tmp_path / "checkpoint-2"
    manifest = json.loads((path / "milepost.json").read_bytes())
    assert manifest["pp_stage_partition"] == {"model": [[0, 1, 2, 3], [1, 2, 3, 4]]}
    assert_loadable(path, {**outcomes[0][0], **outcomes[1][0]})


# ---- a pair that is tied across stages


def tied_stages(rank: int, size: int, run: Path, drift: float) -> Any:
    """Each stage on `size / 2` ranks, sharded where there are several."""
    per_stage = size // 2
    stage = make_stage(rank // per_stage, 2, tied=True)
    if per_stage > 1:
        mesh = init_device_mesh("cpu", (2, per_stage), mesh_dim_names=("pp", "dp_shard"))
        fully_shard(stage, mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(stage.parameters())
    step_without_pipeline([stage], optimizer)
    if drift and stage.last:
        stage.lm_head.weight.data.add_(drift)
    state = {"model": stage, "optimizer": optimizer}
    mp.save(run / "checkpoint-1", state, step=1)
    saved = values([stage], optimizer)
    for param in stage.parameters():
        param.data.zero_()
    report = mp.load(run / "checkpoint-1", state)
    loaded = values([stage], optimizer)
    assert loaded.keys() == saved.keys()
    assert [n for n, v in saved.items() if not torch.equal(loaded[n], v)] == []
    return saved, report.level.value


@pytest.mark.spec("v1#pipeline-3")
@pytest.mark.parametrize("size", [2, 4])
def test_a_pair_tied_across_stages_is_written_once(size: int, tmp_path: Path) -> None:
    outcomes = run_world(size, tied_stages, tmp_path, 0.0)
    assert {level for _, level in outcomes} == {"exact"}
    path = tmp_path / "checkpoint-1"
    checkpoint = mp.Checkpoint.open(path)
    assert "lm_head.weight" not in checkpoint.tensors()
    assert checkpoint.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    part = checkpoint.tensors()["model.embed_tokens.weight"].file
    assert part == "model-pp00000-of-00002-00001.safetensors"
    saved = {**outcomes[0][0], **outcomes[-1][0]}
    assert_loadable(path, saved, tied=True)
    model: Any = LlamaForCausalLM(config(tied=True))
    optimizer = torch.optim.AdamW(model.parameters())
    mp.load(path, {"model": model, "optimizer": optimizer})
    moment = optimizer.state[model.lm_head.weight]["exp_avg"]
    assert torch.equal(moment, saved["lm_head.weight.exp_avg"])


@pytest.mark.spec("v1#pipeline-3")
@pytest.mark.parametrize("size", [2, 4])
def test_a_tied_pair_of_different_bytes_is_refused_on_every_rank(size: int, tmp_path: Path) -> None:
    for outcome in run_outcomes(size, tied_stages, tmp_path, 0.5):
        assert outcome.error_class == MismatchError.__name__
        assert "model.embed_tokens.weight" in str(outcome.error)
        assert "ties across pipeline stages is not equal" in str(outcome.error)
    assert list(tmp_path.glob("checkpoint-*")) == []


class Twins(nn.Module):
    """A stage whose own two names are one tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(rank): nn.Linear(4, 4)})
        if rank == 1:
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight


def save_twins(rank: int, size: int, run: Path) -> None:
    model = Twins(rank)
    mp.save(run / "checkpoint-1", {"model": model}, step=1)
    saved = {name: whole(param) for name, param in model.named_parameters()}
    mp.load(run / "checkpoint-1", {"model": model})
    assert all(torch.equal(param, saved[name]) for name, param in model.named_parameters())


def test_a_tie_that_only_a_later_stage_knows_is_recorded(tmp_path: Path) -> None:
    run_world(2, save_twins, tmp_path)
    checkpoint = mp.Checkpoint.open(tmp_path / "checkpoint-1")
    assert checkpoint.tied == {"second.weight": "first.weight"}
    assert torch.equal(checkpoint.read("second.weight"), checkpoint.read("first.weight"))


class Tower(nn.Module):
    """A stage with a part that every stage has: no stage owns it."""

    def __init__(self, rank: int, drift: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.vision = nn.Linear(4, 4)
        self.layers = nn.ModuleDict({str(rank): nn.Linear(4, 4)})
        with torch.no_grad():
            self.vision.bias.add_(drift * rank)


def save_tower(rank: int, size: int, run: Path, drift: float) -> None:
    mp.save(run / "checkpoint-1", {"model": Tower(rank, drift)}, step=1)


def test_what_no_stage_owns_lies_in_a_wrapper_part(tmp_path: Path) -> None:
    run_world(2, save_tower, tmp_path, 0.0)
    checkpoint = mp.Checkpoint.open(tmp_path / "checkpoint-1")
    assert checkpoint.tensors()["vision.bias"].file == "model-wrapper-00001.safetensors"
    assert checkpoint.verify().problems == ()


def test_a_part_that_drifted_between_stages_is_refused(tmp_path: Path) -> None:
    for outcome in run_outcomes(2, save_tower, tmp_path, 1.0):
        assert outcome.error_class == MismatchError.__name__
        assert "vision.bias" in str(outcome.error)
