"""The real 8-bit optimizers: torchao on ranks and alone, bitsandbytes alone.

Both print warnings wherever they are imported, so they are not in the development environment;
`make test-8bit` makes one that has them and runs this file.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import milepost as mp
from milepost.state.tensors import same_bits
from tests.parallel.models import whole
from tests.worlds import run_world

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao: make test-8bit"
)
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes: make test-8bit"
)
TORCHAO = ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"]
INNER = 384  # on two slices of 192 columns, the blocks of 256 elements are no blocks of the whole


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(64, INNER)
        self.down = nn.Linear(INNER, 64, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, data: Tensor) -> Tensor:
        found: Tensor = self.norm(self.down(torch.tanh(self.up(data))))
        return found


@contextmanager
def uncompiled() -> Iterator[None]:
    """torchao compiles its update; that takes seconds for each shape and changes no state."""
    compile_, torch.compile = torch.compile, lambda function=None, **_: function  # type: ignore[assignment]
    yield
    torch.compile = compile_


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    with uncompiled():
        for step in steps:
            data = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            net(data).pow(2).mean().backward()
            optimizer.step()


def parts(value: Any) -> dict[str, Tensor]:
    local = getattr(value, "_local_tensor", value)
    if not hasattr(local, "__tensor_flatten__"):
        return {"": local.detach().clone()}
    return {part: getattr(local, part).clone() for part in local.__tensor_flatten__()[0]}


def own_values(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, param in net.named_parameters():
        found[name] = parts(param)
        for slot, value in optimizer.state[param].items():
            is_tensor = isinstance(value, Tensor)
            found[f"{name}.{slot}"] = parts(value) if is_tensor else value
            local = getattr(value, "_local_tensor", value)
            if hasattr(local, "__tensor_flatten__"):
                found[f"{name}.{slot} made of"] = (type(local), local.__tensor_flatten__()[1])
    return found


def differences(found: Any, expected: Any, at: str = "") -> list[str]:
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [f"{at}: {sorted(found.keys() ^ expected.keys())}"]
        return [d for k, v in expected.items() for d in differences(found[k], v, f"{at} {k}")]
    if isinstance(expected, Tensor):
        return [] if same_bits(found, expected) else [at]
    return [] if found == expected else [at]


def stop_and_go_on(
    make: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]], path: Path
) -> list[str]:
    net, optimizer = make(0)
    train(net, optimizer, range(3))
    saved = own_values(net, optimizer)
    mp.save(path, {"model": net, "optimizer": optimizer}, step=3)
    problems = differences(own_values(net, optimizer), saved, "saving changed")
    other, resumed = make(7)
    report = mp.load(path, {"model": other, "optimizer": resumed})
    problems += [] if report.level is mp.Level.EXACT else report.lines()
    problems += differences(own_values(other, resumed), saved, "loading changed")
    for each in ((net, optimizer), (other, resumed)):
        train(*each, range(3, 6))
    end = own_values(net, optimizer)
    return problems + differences(own_values(other, resumed), end, "going on differs")


def build(name: str, ways: tuple[int, ...], seed: int) -> tuple[nn.Module, Any]:
    """`ways`: () in one process, (n,) under FSDP2, (n, m) under FSDP2 over tensor parallelism."""
    optimizers = importlib.import_module("torchao.optim")
    net: Any = Net(seed)
    if len(ways) == 2:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", ways, mesh_dim_names=("dp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(net, mesh["tp"], plan)
        shard(net, mesh["dp"])
    elif ways:
        from torch.distributed.device_mesh import init_device_mesh

        shard(net, init_device_mesh("cpu", ways))
    return net, getattr(optimizers, name)(net.parameters(), lr=1e-3)


def shard(net: nn.Module, mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(net, mesh=mesh)


def torchao_on_ranks(rank: int, size: int, ways: tuple[int, ...], run: Path) -> list[str]:
    problems = []
    for name in TORCHAO:
        path = run / name / "checkpoint-3"
        found = stop_and_go_on(partial(build, name, ways), path)
        problems += [f"{name}: {problem}" for problem in found]
    return problems


@needs_torchao
@pytest.mark.case("V37")
@pytest.mark.parametrize("ways", [(), (2,), (2, 2)], ids=str)
def test_torchao_goes_on_bit_for_bit(ways: tuple[int, ...], tmp_path: Path) -> None:
    size = 1 if not ways else ways[0] if len(ways) == 1 else ways[0] * ways[1]
    assert run_world(size, torchao_on_ranks, ways, tmp_path) == [[]] * size


def torchao_elsewhere(rank: int, size: int, ways: tuple[int, ...], run: Path) -> Any:
    found = {}
    for name in TORCHAO:
        net, optimizer = build(name, ways, 5)
        report = mp.load(run / name / "checkpoint-3", {"model": net, "optimizer": optimizer})
        values = {}
        for key, param in net.named_parameters():
            values[key] = whole(param)
            for slot in ("exp_avg", "exp_avg_sq"):
                state = optimizer.state[param][slot]
                local = getattr(state, "_local_tensor", state)
                floats = local.dequantize() if hasattr(local, "dequantize") else local
                values[f"{key}.{slot}"] = floats.clone()
        train(net, optimizer, range(3, 4))
        found[name] = (report.level.value, values, report.optimizers["optimizer"].requantised)
    return found


@needs_torchao
@pytest.mark.case("V37")
def test_torchao_moves_between_shards_where_no_block_is_divided(tmp_path: Path) -> None:
    run_world(4, torchao_on_ranks, (4,), tmp_path)
    two = run_world(2, torchao_elsewhere, (2,), tmp_path)
    one = run_world(1, torchao_elsewhere, (), tmp_path)[0]
    for name in TORCHAO:
        level, values, anew = one[name]
        assert (level, anew) == ("resharded", ())
        for key, value in values.items():
            shards = [each[name][1][key] for each in two]
            is_moment = key.endswith(("exp_avg", "exp_avg_sq"))
            found = torch.cat(shards) if is_moment else shards[0]
            assert torch.equal(found, value), (name, key)


def torchao_divided(rank: int, size: int, run: Path) -> Any:
    found = []
    for name in TORCHAO:
        net, optimizer = build(name, (), 5)
        state = {"model": net, "optimizer": optimizer}
        with pytest.raises(mp.errors.MismatchError) as refused:
            mp.load(run / name / "checkpoint-3", state)
        report = mp.load(run / name / "checkpoint-3", state, blocks=mp.BlockPolicy.REQUANTISE)
        train(net, optimizer, range(3, 4))
        found.append((str(refused.value), report.optimizers["optimizer"].requantised))
    return found


@needs_torchao
@pytest.mark.case("V37")
def test_torchao_blocks_that_a_cut_divides_are_refused_or_quantised_anew(tmp_path: Path) -> None:
    run_world(4, torchao_on_ranks, (2, 2), tmp_path)
    for error, anew in run_world(1, torchao_divided, tmp_path)[0]:
        assert "down.weight.exp_avg (blocks of " in error and "shape (64, 384)" in error
        assert anew == ("down.weight.exp_avg", "down.weight.exp_avg_sq")


@needs_bitsandbytes
@pytest.mark.case("V37")
@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit", "AdamW"])
def test_bitsandbytes_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    optimizers = importlib.import_module("bitsandbytes.optim")

    def make(seed: int) -> tuple[nn.Module, Any]:
        net = Net(seed)
        return net, getattr(optimizers, name)(net.parameters(), lr=1e-3)

    assert stop_and_go_on(make, tmp_path / "checkpoint-3") == []


def bitsandbytes_on_replicas(rank: int, size: int, run: Path) -> list[str]:
    from torch.nn.parallel import DistributedDataParallel

    optimizers = importlib.import_module("bitsandbytes.optim")

    def make(seed: int) -> tuple[nn.Module, Any]:
        net = DistributedDataParallel(Net(seed))
        return net, optimizers.AdamW8bit(net.parameters(), lr=1e-3)

    return stop_and_go_on(make, run / "checkpoint-3")


@needs_bitsandbytes
@pytest.mark.case("V37")
def test_bitsandbytes_goes_on_bit_for_bit_on_replicas(tmp_path: Path) -> None:
    assert run_world(2, bitsandbytes_on_replicas, tmp_path) == [[], []]


@needs_bitsandbytes
@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_adapters_on_a_base_in_few_bits_resume_and_load_in_stock_peft(
    key: str, tmp_path: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from milepost_trainer.lora import quantization
    from milepost_trainer.parallel.quantized import use_kernels_of_training
    from milepost_trainer.training import train as train_run
    from tests.states import same
    from tests.trainer import lora_runs, yaml_runs

    base = lora_runs.write_base(tmp_path / "base", "llama-wide")
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], key: True}
    changes = lora_runs.on_base(base, lora=lora)
    text = yaml_runs.write_text(tmp_path)
    config = yaml_runs.config_of(tmp_path / "whole", text, **changes)
    train_run(config)
    end = f"checkpoint-{yaml_runs.END}"
    whole_run = yaml_runs.contents(tmp_path / "whole" / end)
    (tmp_path / "whole" / end).rename(tmp_path / "away")
    (tmp_path / "whole" / "latest").unlink()
    train_run(config)
    checkpoint = tmp_path / "whole" / end
    assert same(yaml_runs.contents(checkpoint), whole_run)
    assert not list(checkpoint.glob("model*.safetensors"))

    assert config.lora is not None
    options: Any = quantization(config.lora, torch.float32, torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(base, **options)
    use_kernels_of_training(plain)
    before = lora_runs.logits_of(plain)
    logits = lora_runs.logits_of(PeftModel.from_pretrained(plain, checkpoint))
    live = lora_runs.live_logits(tmp_path / "whole", text, **changes)
    assert torch.allclose(logits, live, atol=1e-5)
    assert not torch.allclose(logits, before, atol=1e-3)


@needs_bitsandbytes
@pytest.mark.parametrize("task", ["sft", "dpo"])
@pytest.mark.parametrize("key", ["load_in_4bit", "load_in_8bit"])
def test_replicas_on_a_base_in_few_bits_that_are_killed_end_like_those_that_never_stopped(
    key: str, task: str, tmp_path: Path
) -> None:
    from tests.states import same
    from tests.trainer import lora_runs, task_runs, yaml_runs

    base = lora_runs.write_base(tmp_path / "base", "llama-wide")
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], key: True}
    changes = lora_runs.on_base(base, lora=lora)
    lines = task_runs.write_lines(tmp_path, task)
    whole_run = task_runs.run_task(tmp_path / "whole", lines, task, "ddp2", **changes)
    task_runs.kill_task(tmp_path / "killed", lines, task, "ddp2", **changes)
    resumed = task_runs.run_task(tmp_path / "killed", lines, task, "ddp2", **changes)
    history = task_runs.history(resumed)
    assert history == task_runs.history(whole_run)
    assert same(yaml_runs.contents(resumed), yaml_runs.contents(whole_run))
    ends = [lora_runs.adapter_of(end) for end in (resumed, whole_run)]
    assert same(*ends)
    first = lora_runs.adapter_of(whole_run.with_name(f"checkpoint-{yaml_runs.SAVED}"))
    assert not any(torch.equal(first[name], value) for name, value in ends[1].items())
    if task == "dpo":  # its policy begins as the base, but for other kernels where gradients are
        rewards = [entry["rewards/chosen"] for entry in history if "learning_rate" in entry]
        assert abs(rewards[0]) < 5e-3 and len({*rewards}) == len(rewards)
