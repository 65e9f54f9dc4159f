"""Models on the meta device get memory for their own shards, their values, and nothing else."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import milepost as mp
from milepost.errors import InvalidInputError, KeyMismatchError
from tests.parallel.models import (
    FSDP2,
    FSDP3,
    FSDP4,
    FSDP_TP,
    ONE,
    TP2,
    Shape,
    build,
    gathered,
    start,
    whole,
)
from tests.parallel.sliced import Sliced, everything
from tests.worlds import run_world

TOKENS = torch.arange(12).view(1, 12)


def on_meta(shape: Shape, *, tied: bool = False) -> nn.Module:
    with torch.device("meta"):
        return build(shape, tied=tied)


def meta_names(model: nn.Module) -> set[str]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name for name, tensor in tensors if tensor.device.type == "meta"}


def save_llama(run: Path, *, tied: bool = False) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Saved by one process after two steps: weights and moments, and logits."""
    training = start(ONE, tied=tied)
    training.step()
    training.step()
    mp.save(run / "checkpoint-2", training.state(), step=2)
    training.model.eval()
    return gathered(training), training.model(input_ids=TOKENS).logits.detach()


def load_on_meta(rank: int, size: int, shape: Shape, run: Path, tied: bool) -> Any:
    """The optimizer is made before the load, of parameters on meta."""
    model = on_meta(shape, tied=tied)
    assert meta_names(model) >= {n for n, _ in model.named_parameters()}
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    report = mp.load(run / "checkpoint-2", {"model": model, "optimizer": optimizer})
    assert meta_names(model) == set()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(a is b for a, b in zip(parameters, optimizer.param_groups[0]["params"], strict=True))
    head, embed = model.lm_head.weight, model.model.embed_tokens.weight  # type: ignore[union-attr]
    assert (head is embed) == tied
    found = {name: whole(p) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, param in model.named_parameters():
        for slot, value in optimizer.state[param].items():
            found[f"{name}.{slot}"] = whole(value)
    model.eval()
    logits = whole(model(input_ids=TOKENS).logits)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    return found, logits, report.models["model"].rebuilt


@pytest.mark.case("V04")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("shape", [ONE, FSDP2, FSDP3, FSDP4, TP2, FSDP_TP], ids=str)
def test_a_model_on_meta_is_filled_in_its_placement_and_keeps_its_parameters(
    shape: Shape, tied: bool, tmp_path: Path
) -> None:
    expected, logits = save_llama(tmp_path, tied=tied)
    arguments = (shape, tmp_path, tied)
    results = (
        [load_on_meta(0, 1, *arguments)]
        if shape is ONE
        else run_world(shape.world_size, load_on_meta, *arguments)
    )
    for found, seen, rebuilt in results:
        assert found.keys() == expected.keys()
        assert [n for n, t in expected.items() if not torch.equal(found[n], t)] == []
        if "tp" in shape.mode:  # sums in another order
            torch.testing.assert_close(seen, logits)
        else:
            assert torch.equal(seen, logits)
        assert set(rebuilt) == {
            "model.rotary_emb.inv_freq",
            "model.rotary_emb.original_inv_freq",
        }


def load_emptied(rank: int, size: int, run: Path) -> torch.Tensor:
    """As torch tells FSDP2 users to: meta, shard, `to_empty`, load."""
    model = on_meta(FSDP2)
    model.to_empty(device="cpu")
    with torch.no_grad():
        garbage = torch.full_like(model.model.rotary_emb.inv_freq, 1e9 + rank)  # type: ignore[union-attr, arg-type]
        model.model.rotary_emb.inv_freq = garbage.detach()  # type: ignore[union-attr]
    mp.load(run / "checkpoint-2", {"model": model})
    model.eval()
    return whole(model(input_ids=TOKENS).logits)


@pytest.mark.case("V04")
def test_a_model_that_was_emptied_gets_its_buffers_back(tmp_path: Path) -> None:
    _, logits = save_llama(tmp_path)
    for seen in run_world(2, load_emptied, tmp_path):
        assert torch.equal(seen, logits)


def test_a_buffer_that_was_changed_on_purpose_is_left_alone(tmp_path: Path) -> None:
    save_llama(tmp_path)
    model = build(ONE, seed=1)
    scaled = model.model.rotary_emb.inv_freq * 2  # type: ignore[union-attr, operator]
    model.model.rotary_emb.inv_freq = scaled  # type: ignore[union-attr]
    report = mp.load(tmp_path / "checkpoint-2", {"model": model})
    assert model.model.rotary_emb.inv_freq is scaled  # type: ignore[union-attr]
    assert report.models["model"].rebuilt == ()


class Table(nn.Module):
    """A weight, and a table that only code can make."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.table = torch.arange(4.0).sin()


class Careless(Table):
    """Forgets half of its table."""

    def reset_parameters(self) -> None:
        self.table[:2] = 1.0


class Unaided(nn.Module):
    """Its constructor alone makes the table."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


@pytest.mark.case("V04")
def test_a_module_computes_its_buffers_by_reset_parameters_without_drawing(tmp_path: Path) -> None:
    source = Table()
    mp.save(tmp_path / "checkpoint-1", {"model": source}, step=1)
    with torch.device("meta"):
        model = Table()
    before = torch.get_rng_state()
    mp.load(tmp_path / "checkpoint-1", {"model": model}, rng=mp.RngRestore.LATER)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.table, torch.arange(4.0).sin())
    assert torch.equal(model.weight, source.weight)


@pytest.mark.case("V04")
@pytest.mark.parametrize("kind", [Careless, Unaided])
def test_a_buffer_that_nothing_computes_is_refused_and_the_model_stays_on_meta(
    kind: Callable[[], nn.Module], tmp_path: Path
) -> None:
    mp.save(tmp_path / "checkpoint-1", {"model": nn.Sequential(kind())}, step=1)
    with torch.device("meta"):
        model = nn.Sequential(kind())
    with pytest.raises(InvalidInputError, match=r"1 tensors .* values: 0\.table; build the model"):
        mp.load(tmp_path / "checkpoint-1", {"model": model})
    assert meta_names(model) == {"0.weight", "0.table"}


def test_a_parameter_that_the_checkpoint_lacks_cannot_stay_on_meta(tmp_path: Path) -> None:
    mp.save(tmp_path / "checkpoint-1", {"model": nn.Linear(2, 3, bias=False)}, step=1)
    model = nn.Linear(2, 3, device="meta")
    with pytest.raises(KeyMismatchError, match="bias"):
        mp.load(tmp_path / "checkpoint-1", {"model": model})
    with pytest.raises(InvalidInputError, match=r"1 tensors .* meta device .* values: bias"):
        mp.load(tmp_path / "checkpoint-1", {"model": model}, missing=mp.Missing.KEEP)
    assert meta_names(model) == {"weight", "bias"}
    model.bias = nn.Parameter(torch.ones(3))
    mp.load(tmp_path / "checkpoint-1", {"model": model}, missing=mp.Missing.KEEP)
    assert model.bias.tolist() == [1, 1, 1]
    assert meta_names(model) == set()


def test_a_tensor_with_weak_references_is_refused_before_anything_happens(tmp_path: Path) -> None:
    mp.save(tmp_path / "checkpoint-1", {"model": nn.Linear(2, 3)}, step=1)
    model = nn.Linear(2, 3, device="meta")
    reference = weakref.ref(model.weight)
    with pytest.raises(InvalidInputError, match=r"weak references.*: weight; load before"):
        mp.load(tmp_path / "checkpoint-1", {"model": model})
    assert reference() is model.weight
    assert meta_names(model) == {"weight", "bias"}


def test_the_device_is_the_callers(tmp_path: Path) -> None:
    mp.save(tmp_path / "checkpoint-1", {"model": nn.Linear(2, 3)}, step=1)
    model = nn.Linear(2, 3, device="meta")
    mp.load(tmp_path / "checkpoint-1", {"model": model}, device=torch.device("cpu", 0))
    assert model.weight.device.type == "cpu"


@pytest.mark.case("V40")
def test_padding_of_a_declared_slice_on_meta_becomes_zero(tmp_path: Path) -> None:
    source = Sliced()
    source.declare([0])
    optimizer = torch.optim.AdamW(source.parameters())
    source.steps(optimizer, 0, 1)
    mp.save(tmp_path / "checkpoint-1", {"model": source, "optimizer": optimizer}, step=1)
    model = Sliced(seed=4).to("meta")
    model.declare([0])
    fresh = torch.optim.AdamW(model.parameters())
    mp.load(tmp_path / "checkpoint-1", {"model": model, "optimizer": fresh})
    expected = everything(source, optimizer)
    expected["embed.weight"][65:] = 0
    found = everything(model, fresh)
    assert found.keys() == expected.keys()
    assert [n for n, t in expected.items() if not torch.equal(found[n], t)] == []


WIDTH = 1024
LAYERS = 16  # 64 MiB of float32


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def peak_nbytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as refs:
        refs.write("5")
    return peak_nbytes()


def load_counted(rank: int, size: int, run: Path, warm: Path) -> tuple[int, bool]:
    mesh = init_device_mesh("cpu", (size,))
    small = nn.Linear(8, 8, device="meta")
    mp.load(warm / "checkpoint-1", {"model": small})  # imports and buffers of the first load
    with torch.device("meta"):
        model = wide()
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    before = reset_peak()
    mp.load(run / "checkpoint-1", {"model": model})
    grown = peak_nbytes() - before
    rows = WIDTH // size
    whole_model = torch.load(run / "whole.pt", mmap=True)
    return grown, all(
        torch.equal(p._local_tensor, whole_model[name][rank * rows : (rank + 1) * rows])  # type: ignore[attr-defined]
        for name, p in model.named_parameters()
    )


@pytest.mark.case("V43")
def test_no_rank_holds_the_model_whole_while_it_is_filled(tmp_path: Path) -> None:
    model = wide()
    nbytes = sum(p.numel() * 4 for p in model.parameters())
    mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    mp.save(tmp_path / "warm/checkpoint-1", {"model": nn.Linear(8, 8)}, step=1)
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    for grown, is_equal in run_world(4, load_counted, tmp_path, tmp_path / "warm"):
        assert is_equal
        assert nbytes / 4 * 0.9 < grown < nbytes / 4 + 24 * 2**20, grown
