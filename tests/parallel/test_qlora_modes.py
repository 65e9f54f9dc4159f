"""Adapters on a base in 4 or 8 bits on every mode: saved, killed, taken over, loaded by peft.

The names of the cases of the first test are cells of docs/guides/kinds-and-modes.md. They need
bitsandbytes, which `make test-8bit` has.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.distributed.tensor import DTensor

import milepost as mp
from milepost_trainer.lora import quantization
from milepost_trainer.lora_settings import LoraSettings
from milepost_trainer.parallel import MeshSizes, Role, build
from milepost_trainer.parallel.dora import dequantize_for_norms
from milepost_trainer.parallel.quantized import lay_out_quantized
from milepost_trainer.training import train
from tests.parallel.models import whole
from tests.parallel.qlora_runs import CELLS, DORA, KINDS, Runs, answers, family_of, quantized
from tests.states import same
from tests.trainer.kind_runs import CHECKS, MODES, name_of
from tests.trainer.lora_runs import adapter_of, logits_of, on_base, token_ids, write_base
from tests.trainer.yaml_runs import (
    SAVED,
    config_of,
    contents,
    look,
    losses,
    ranks_of,
    run,
    write_text,
)
from tests.worlds import run_outcomes, run_world

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes: make test-8bit"
)
LEVELS = ("resharded", "exact-state")  # the latter where ranks hold alike: DDP and one process
ROUNDING = {"fourbit": 1e-4, "eightbit": 0.05}  # inputs are rounded too, to 8 bits


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    ("kind", "mode", "check"), [pytest.param(*cell, id=name_of(*cell)) for cell in CELLS]
)
def test_a_base_in_few_bits_on_a_mode(kind: str, mode: str, check: str, runs: Runs) -> None:
    _CHECKS[check](runs, kind, mode)


def is_an_adapter_and_nothing_else(runs: Runs, kind: str, mode: str) -> None:
    checkpoint = runs.of(kind, mode)
    alone = runs.of(kind, "one", family_of(mode))
    assert mp.checkpoint_kind(checkpoint) is mp.CheckpointKind.ADAPTER
    assert not list(checkpoint.glob("model*"))
    shapes = [{n: t.shape for n, t in adapter_of(path).items()} for path in (checkpoint, alone)]
    assert shapes[0] == shapes[1]
    assert losses(checkpoint) == pytest.approx(losses(alone), abs=1e-3)


def ends_with_the_bits_of_a_run_that_never_stopped(runs: Runs, kind: str, mode: str) -> None:
    end, resumed = runs.of(kind, mode), runs.killed_and_resumed(kind, mode)
    assert same(contents(resumed), contents(end))
    assert same(adapter_of(resumed), adapter_of(end))
    first = adapter_of(end.with_name(f"checkpoint-{SAVED}"))
    assert not any(torch.equal(first[name], value) for name, value in adapter_of(end).items())


def is_taken_over_with_the_same_values(runs: Runs, kind: str, mode: str) -> None:
    """By one process; what one process left, by two of FSDP2."""
    other = "fsdp2" if mode == "one" else "one"
    end = runs.of(kind, mode)
    state = contents(end)["state"]["optimizer"]["tensors"]
    changes = runs.changes(kind, family_of(mode))
    for found in look(end.parent, runs.text, MODES[other], **changes):
        assert found["level"] in LEVELS, found["notes"]
        held = {n: t for n, t in found["moments"].items() if not n.endswith(".step")}
        assert same(dict(sorted(held.items())), dict(sorted(state.items())))
        learning = {n: t for n, t in found["weights"].items() if "lora_" in n}
        assert same(by_bits(learning), by_bits(adapter_of(end)))


def by_bits(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in an order that does not depend on how they are called."""
    return sorted(tensors.values(), key=lambda t: (tuple(t.shape), t.flatten().tolist()))


def look_at_parts_of_a_row(model: Any, count: int) -> None:
    """Let 8-bit layers see the tokens as ranks of context parallelism do: bitsandbytes keeps those
    columns of inputs from rounding in which one of the tokens that it sees is large."""
    for module in model.modules():
        if type(module).__name__ == "Linear8bitLt":
            forward = module.forward
            module.forward = lambda x, forward=forward: torch.cat(
                [forward(part) for part in x.chunk(count, dim=1)], dim=1
            )


def loads_in_peft_on_the_same_base(runs: Runs, kind: str, mode: str) -> None:
    """And answers as the ranks do, each in its columns."""
    end, family = runs.of(kind, mode), family_of(mode)
    bits = kind.removesuffix("-dora")
    # Two models: under DoRA on a CPU peft forgets the scales of 8 bits that were used before.
    plain, adapted = (quantized(runs.base(family), **KINDS[bits]) for _ in range(2))
    if "cp" in mode:
        look_at_parts_of_a_row(plain, 2)
        look_at_parts_of_a_row(adapted, 2)
    before = logits_of(plain)
    expected = logits_of(PeftModel.from_pretrained(adapted, end))
    assert (expected - before).abs().max() > 0.5
    mesh, changes = MODES[mode], runs.changes(kind, family)
    for begin, logits in answers(end.parent, runs.text, ranks_of(mesh), mesh, **changes):
        mine = expected[:, begin : begin + logits.shape[1]]
        assert logits.shape == mine.shape
        assert (logits - mine).abs().max() < ROUNDING[bits]


_CHECKS = {
    "save": is_an_adapter_and_nothing_else,
    "exact": ends_with_the_bits_of_a_run_that_never_stopped,
    "reshard": is_taken_over_with_the_same_values,
    "loads": loads_in_peft_on_the_same_base,
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("mode", ["fsdp2", "tp", "ep", "cp", "fsdp2+tp"])
@pytest.mark.parametrize("kind", DORA)
def test_dora_beside_a_base_in_few_bits_on_a_mode(
    kind: str, mode: str, check: str, runs: Runs
) -> None:
    _CHECKS[check](runs, kind, mode)
    if check == "save":
        names = [name for name in adapter_of(runs.of(kind, mode)) if "magnitude" in name]
        assert len(names) == 6  # q, v and o of two layers


@pytest.mark.parametrize("bits", KINDS)
def test_dora_learns_beside_dropout_as_in_peft(bits: str, runs: Runs) -> None:
    """Where inputs of factors are dropped, the base is asked once more, for what is left."""
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], use_dora=True, lora_dropout=0.3
    )
    found = []
    for changes in ([], [dequantize_for_norms], [lay_out_quantized, dequantize_for_norms]):
        model = quantized(runs.base("llama-128"), **KINDS[bits])
        torch.manual_seed(0)
        model = get_peft_model(model, config)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param.data, std=0.1)
        for change in changes:
            change(model)
        model.train()
        for _ in range(2 if changes else 1):  # on a CPU peft forgets the scales of 8 bits
            model.zero_grad()
            torch.manual_seed(1)
            model(token_ids()).logits.square().mean().backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    expected = found[0]
    assert any("magnitude" in name for name in expected)
    for gradients in found[1:]:
        assert gradients.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", [*KINDS, *DORA])
def test_stages_of_a_pipeline_go_on_bit_for_bit(kind: str, runs: Runs) -> None:
    changes = runs.changes(kind, "llama-128")
    ends = [run(runs.directory / f"{kind}-{n}", runs.text, "pp2", **changes) for n in "ab"]
    assert losses(ends[0]) == pytest.approx(losses(runs.of(kind, "one")), abs=1e-3)
    place = ends[1].parent
    (place / ends[1].name).rename(runs.directory / f"{kind}-away")
    (place / "latest").unlink()
    resumed = run(place, runs.text, "pp2", **changes)
    assert same(contents(resumed), contents(ends[0]))
    assert same(adapter_of(resumed), adapter_of(ends[0]))


# ---- the values of the base


def _values(rank: int, size: int, base: Path, keys: dict[str, Any], mesh: dict[str, int]) -> Any:
    options = quantization(LoraSettings(**keys), torch.float32, torch.device("cpu"))
    sizes = MeshSizes(**mesh)
    built = build(str(base), sizes, role=Role.FROZEN, quantization=options)
    values = {name: whole(param) for name, param in built.named_parameters()}
    held = {
        name: (param.to_local() if isinstance(param, DTensor) else param).numel()
        for name, param in built.named_parameters()
    }
    with built.evaluating():
        return values, held, built.outputs(token_ids())


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"tp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize(
    "keys",
    [
        {"load_in_4bit": True},
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_8bit": True},
    ],
    ids=str,
)
def test_a_mesh_has_the_bits_of_the_base_quantised_whole(
    keys: dict[str, Any], mesh: dict[str, int], runs: Runs
) -> None:
    base = runs.base("llama-128")
    plain = quantized(base, **keys)
    answer = logits_of(plain)
    lay_out_quantized(plain)
    assert torch.equal(logits_of(plain), answer)
    expected = dict(plain.named_parameters())
    packed = [n for n, t in expected.items() if not t.is_floating_point()]
    assert len(packed) == 14  # q, k, v, o, gate, up, down of two layers
    ranks = MeshSizes(**mesh).world_size
    for values, held, logits in run_world(ranks, _values, base, keys, mesh):
        assert same(values, {name: param.data for name, param in expected.items()})
        for name in packed:
            assert held[name] * ranks == expected[name].numel()
        exact = 0.05 if "load_in_8bit" in keys else 1e-4
        assert (logits - answer).abs().max() < exact


def test_blocks_that_run_on_from_row_to_row_are_sharded(runs: Runs) -> None:
    base, keys = runs.base("llama"), KINDS["fourbit"]
    plain = quantized(base, **keys)
    lay_out_quantized(plain)
    expected = {name: param.data for name, param in plain.named_parameters()}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert expected[name].shape == (16 * 16 // 2, 1)
    for values, held, _ in run_world(2, _values, base, keys, {"dp_shard": 2}):
        assert same(values, expected)
        assert held[name] * 2 == expected[name].numel()


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("llama", r"q_proj\.weight has 16 columns, and tp=2 .* cut by rows, .* multiple of 64\."),
        ("llama-wide", r"o_proj\.weight has 64 columns, .* cut by columns, .* multiple of 128\."),
    ],
)
def test_blocks_that_a_cut_would_divide_are_refused(family: str, message: str, runs: Runs) -> None:
    outcomes = run_outcomes(2, _values, runs.base(family), KINDS["fourbit"], {"tp": 2})
    for outcome in outcomes:
        assert outcome.error_class == "ValueError"
        assert re.search(message, str(outcome.error))


def test_an_evaluation_leaves_training_alone(tmp_path: Path) -> None:
    base, text = write_base(tmp_path / "base", "llama-wide"), write_text(tmp_path)
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "load_in_4bit": True}
    evaluating: dict[str, Any] = {"eval_files": [str(text)], "eval_steps": 1}
    found = []
    for name, more in (("trains", {}), ("evaluates", evaluating)):
        config = config_of(tmp_path / name, text, **on_base(base, lora=lora), **more)
        train(config)
        (end,) = (tmp_path / name).glob("checkpoint-6")
        found.append(adapter_of(end))
    assert same(*found)
