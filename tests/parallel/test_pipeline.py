"""Pipeline stages: each rank knows only its layers; the checkpoint is the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import milepost as mp
from tests.parallel.models import VOCABULARY, config
from tests.parallel.stage_model import Stage, loss_of
from tests.worlds import run_world

BATCH, LENGTH, MICROBATCHES = 4, 8, 2


class Pipeline:
    """One rank of a pipeline in training."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.stage_module = Stage(LlamaForCausalLM(config()).train(), rank, size)
        self.optimizer = torch.optim.AdamW(self.stage_module.parameters(), lr=1e-2)
        stage = PipelineStage(self.stage_module, rank, size, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=loss_of)
        torch.manual_seed(50 + rank)
        self.position = 0

    def step(self) -> list[float]:
        generator = torch.Generator().manual_seed(self.position)
        self.position += 1
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        losses: list[torch.Tensor] = []
        if self.stage_module.first:
            self.schedule.step(tokens)
        elif self.stage_module.last:
            self.schedule.step(target=tokens, losses=losses)
        else:
            self.schedule.step()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return [float(loss.detach()) for loss in losses]

    def values(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, param in self.stage_module.named_parameters():
            found[name] = param.detach().clone()
            for slot, value in self.optimizer.state.get(param, {}).items():
                found[f"{name}.{slot}"] = value.clone()
        return found


def save_in_the_middle(rank: int, size: int, run: Path) -> Any:
    pipeline = Pipeline(seed=0)
    for _ in range(2):
        pipeline.step()
    state = {"model": pipeline.stage_module, "optimizer": pipeline.optimizer}
    mp.save(run / "checkpoint-2", state, step=2)
    saved = pipeline.values()
    return saved, [pipeline.step() for _ in range(3)], pipeline.values()


def resume(rank: int, size: int, run: Path) -> Any:
    pipeline = Pipeline(seed=9)
    pipeline.step()
    state = {"model": pipeline.stage_module, "optimizer": pipeline.optimizer}
    report = mp.load(run / "checkpoint-2", state)
    pipeline.position = 2
    loaded = pipeline.values()
    return loaded, [pipeline.step() for _ in range(3)], pipeline.values(), report.level.value


def test_a_pipeline_resumes_exactly_and_saves_the_whole_model(tmp_path: Path) -> None:
    first = run_world(2, save_in_the_middle, tmp_path)
    for (saved, losses, end), (loaded, again, end2, level) in zip(
        first, run_world(2, resume, tmp_path), strict=True
    ):
        assert level == "exact" and losses == again
        assert loaded.keys() == saved.keys() and end.keys() == end2.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)
        assert all(torch.equal(end[name], end2[name]) for name in end)
    model: Any = LlamaForCausalLM(config())
    optimizer = torch.optim.AdamW(model.parameters())
    report = mp.load(tmp_path / "checkpoint-2", {"model": model, "optimizer": optimizer})
    everything = {**first[0][0], **first[1][0]}
    for name, param in model.named_parameters():
        assert torch.equal(param, everything[name]), name
        assert torch.equal(optimizer.state[param]["exp_avg"], everything[f"{name}.exp_avg"])
    assert report.level.value == "resharded"
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {f for f in files if f.endswith(".safetensors")} == {
        f"model-pp0000{stage}-of-00002-00001.safetensors" for stage in (0, 1)
    }
    checkpoint = mp.Checkpoint.open(tmp_path / "checkpoint-2")
    assert checkpoint.verify().problems == ()
    weights = checkpoint.read_weights()
    assert weights.keys() == set(dict(model.named_parameters()))
    model.config.save_pretrained(tmp_path / "checkpoint-2")
    loaded_model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    for name, param in loaded_model.named_parameters():
        assert torch.equal(param, everything[name]), name


def load_one_process(rank: int, size: int, run: Path) -> Any:
    pipeline = Pipeline(seed=9)
    report = mp.load(run / "checkpoint-1", {"model": pipeline.stage_module})
    return pipeline.values(), report.level.value


def test_a_checkpoint_of_one_process_becomes_stages(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = LlamaForCausalLM(config())
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    weights = dict(model.named_parameters())
    for values, _ in run_world(2, load_one_process, tmp_path):
        assert all(torch.equal(values[name], weights[name]) for name in values)
