"""Slices that are plain tensors are saved and loaded as what they are slices of, once declared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard

import milepost as mp
from milepost.errors import CheckpointError, InvalidInputError
from tests.parallel.sliced import (
    PAD,
    PLACEMENTS,
    SHAPES,
    VOCABULARY,
    Sliced,
    everything,
    padded_rows,
    slice_of,
)
from tests.worlds import run_world


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)


def trained(rank: int, ranks: int, mesh: Any) -> tuple[Sliced, torch.optim.Optimizer]:
    """Declared before the optimizer is made and before a cast there and back."""
    model = Sliced(rank, ranks)
    model.declare(mesh)
    model.double().float()
    optimizer = adamw(model)
    model.steps(optimizer, 0, 2)
    return model, optimizer


def save_slices(rank: int, size: int, run: Path) -> dict[str, torch.Tensor]:
    model, optimizer = trained(rank, size, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    mp.save(run / "checkpoint-2", {"model": model, "optimizer": optimizer}, step=2)
    return everything(model, optimizer)


def load_slices(rank: int, size: int, run: Path, steps: int) -> tuple[dict[str, Any], str, Any]:
    model = Sliced(rank, size, seed=5)
    model.declare(init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)) if size > 1 else [0])
    optimizer = adamw(model)
    model.steps(optimizer, 7, 7 + steps)
    report = mp.load(run / "checkpoint-2", {"model": model, "optimizer": optimizer})
    return everything(model, optimizer), report.level.value, report.differences


def whole_trained() -> dict[str, torch.Tensor]:
    """Weights and moments of the model that was never cut, without padding."""
    model = Sliced()
    optimizer = adamw(model)
    model.steps(optimizer, 0, 2)
    found = everything(model, optimizer)
    return {n: t[:VOCABULARY] if n.startswith("embed") else t for n, t in found.items()}


def moments_file(run: Path) -> dict[str, torch.Tensor]:
    found = load_file(run / "checkpoint-2/training/optimizer.safetensors")
    return {n: t for n, t in found.items() if t.ndim}


def assert_slices(found: dict[str, Any], expected: dict[str, Any], rank: int, size: int) -> None:
    """Every real row is the saved one; padding is the model's own in weights, zero in moments."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        param = name.removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
        pad = PAD if param == name else 0.0
        local = slice_of(param, value, rank, size, pad)
        assert torch.equal(found[name], local), (rank, name)


@pytest.mark.case("V40")
@pytest.mark.case("V41")
@pytest.mark.parametrize("size", [2, 4])
def test_slices_are_saved_as_the_whole_model_and_resume_on_other_shapes(
    size: int, tmp_path: Path
) -> None:
    expected = whole_trained()
    run_world(size, save_slices, tmp_path)
    weights = load_file(tmp_path / "checkpoint-2/model.safetensors")
    saved = weights | moments_file(tmp_path)
    assert saved.keys() == expected.keys()
    assert [n for n, t in expected.items() if not torch.equal(saved[n], t)] == []
    assert mp.Checkpoint.open(tmp_path / "checkpoint-2").verify().problems == ()
    for other, steps in ((2, 1), (3, 0), (4, 0), (1, 1)):
        worlds: list[Any] = (
            run_world(other, load_slices, tmp_path, steps)
            if other > 1
            else [load_slices(0, 1, tmp_path, steps)]
        )
        for rank, (found, level, differences) in enumerate(worlds):
            if steps == 0:
                assert_slices(found, expected, rank, other)
            else:  # padding of live moments is the live model's own
                for name, value in expected.items():
                    param = name.removesuffix(".exp_avg").removesuffix(".exp_avg_sq")
                    local = slice_of(param, value, rank, other, 0.0)
                    real = slice_of(param, torch.ones_like(value), rank, other, 0.0) == 1
                    assert torch.equal(found[name][real], local[real]), (rank, name)
            assert level == ("exact" if other == size else "resharded"), differences


def declared_on_two_axes(rank: int, size: int, run: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Sliced(mesh.get_local_rank("tp"), 2)
    model.declare(mesh["tp"])
    optimizer = adamw(model)
    model.steps(optimizer, 0, 2)
    mp.save(run / "checkpoint-2", {"model": model, "optimizer": optimizer}, step=2)
    manifest = mp.Checkpoint.open(run / "checkpoint-2").manifest  # type: ignore[attr-defined]
    return dict(manifest.mesh["axes"])


def test_groups_of_slices_that_are_replicas_share_the_writing(tmp_path: Path) -> None:
    axes = run_world(4, declared_on_two_axes, tmp_path)
    assert axes == [{"tp": 2}] * 4
    expected = whole_trained()
    saved = load_file(tmp_path / "checkpoint-2/model.safetensors") | moments_file(tmp_path)
    assert [n for n, t in expected.items() if not torch.equal(saved[n], t)] == []


def fsdp_over_slices(rank: int, size: int, run: Path) -> Any:
    """Slices by hand on `tp`, then FSDP2 over `dp`: declared with both axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    tp = mesh.get_local_rank("tp")

    def build(seed: int) -> Sliced:
        model = Sliced(tp, 2, seed=seed)
        fully_shard(model, mesh=mesh["dp"])
        for name, placement in PLACEMENTS.items():
            if name == "embed.weight":
                continue
            mp.declare_placement(
                model,
                name,
                global_shape=SHAPES[name],
                mesh=mesh,
                placements=[placement, Shard(0)],
            )
        return model

    model = build(0)
    del model.embed
    optimizer = adamw(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    mp.save(run / "checkpoint-2", {"model": model, "optimizer": optimizer}, step=2)
    other = build(3)
    del other.embed
    fresh = adamw(other)
    mp.load(run / "checkpoint-2", {"model": other, "optimizer": fresh})
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one._local_tensor, two._local_tensor)  # type: ignore[attr-defined]
        for slot in ("exp_avg", "exp_avg_sq"):
            a, b = optimizer.state[one][slot], fresh.state[two][slot]
            assert torch.equal(a._local_tensor, b._local_tensor)
    return None


def test_fsdp_over_slices_is_declared_with_both_axes(tmp_path: Path) -> None:
    run_world(4, fsdp_over_slices, tmp_path)
    saved = load_file(tmp_path / "checkpoint-2/model.safetensors")
    model = Sliced()
    del model.embed
    optimizer = adamw(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(saved[name], param), name


def save_undeclared(rank: int, size: int, run: Path, shape: str) -> str:
    model = nn.Linear(4, 4 if shape == "same" else 3 + rank, bias=False)
    nn.init.constant_(model.weight, float(rank))
    with pytest.raises(CheckpointError) as caught:
        mp.save(run / "checkpoint-1", {"model": model}, step=1)
    return str(caught.value)


@pytest.mark.parametrize("shape", ["same", "uneven"])
def test_a_slice_that_nobody_declared_is_refused_and_the_message_names_the_call(
    shape: str, tmp_path: Path
) -> None:
    for message in run_world(2, save_undeclared, tmp_path, shape):
        assert "milepost.declare_placement" in message
        assert "weight" in message
    assert not (tmp_path / "checkpoint-1").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"global_shape": (10, 6)}, r"rank 0 holds shape \(5, 6\); .* gives it \(10, 6\)"),
        ({"mesh": [1]}, r"on the mesh of ranks \[1\], which it is not on"),
        ({"mesh": [0, 0]}, "distinct global ranks"),
        ({"placements": [Shard(0), Shard(0)]}, "2 placements for a mesh of 1 axes"),
        ({"placements": [Shard(2)]}, "of a tensor of 2 dims"),
        ({"placements": [Partial()]}, "not summed up yet"),
        ({"padded_shape": (4, 6)}, "each at least as long"),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused_at_once(
    change: dict[str, Any], said: str
) -> None:
    model = nn.Linear(6, 5, bias=False)
    arguments: dict[str, Any] = {
        "global_shape": (5, 6),
        "mesh": [0],
        "placements": [Replicate()],
        **change,
    }
    with pytest.raises(InvalidInputError, match=said):
        mp.declare_placement(model, "weight", **arguments)


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no parameter or buffer of Linear"):
        mp.declare_placement(
            nn.Linear(2, 2), "weights", global_shape=(2, 2), mesh=[0], placements=[Replicate()]
        )


@pytest.mark.parametrize(
    "placement", [PLACEMENTS["gate_up.weight"], mp.PackedShard(0, (4, 2))], ids=["equal", "unequal"]
)
def test_packing_and_padding_in_one_dim_are_refused(placement: Any) -> None:
    with pytest.raises(InvalidInputError, match="packed and padded"):
        mp.declare_placement(
            nn.Linear(2, 8, bias=False),
            "weight",
            global_shape=(6, 2),
            mesh=[0],
            placements=[placement],
            padded_shape=(8, 2),
        )


def test_a_declared_tensor_that_changed_its_shape_is_refused_by_name(tmp_path: Path) -> None:
    model = Sliced()
    model.declare([0])
    model.get_submodule("column").weight = nn.Parameter(torch.zeros(3, 6))
    with pytest.raises(
        InvalidInputError, match=r"column\.weight: declared as a slice of \(10, 6\)"
    ):
        mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)


def test_two_declarations_of_a_tied_tensor_that_differ_are_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 2), "head": nn.Linear(2, 8, bias=False)})
    model["head"].weight = model["embed"].weight
    for name, rows in (("embed.weight", 7), ("head.weight", 8)):
        mp.declare_placement(
            model,
            name,
            global_shape=(rows, 2),
            mesh=[0],
            placements=[Shard(0)],
            padded_shape=(8, 2),
        )
    with pytest.raises(InvalidInputError, match=r"embed\.weight and head\.weight are one tensor"):
        mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)


def tied_vocabulary(rank: int, size: int, run: Path) -> tuple[list[str], torch.Tensor]:
    rows = padded_rows(size)
    model = nn.Module()
    model.embed, model.head = nn.Module(), nn.Module()
    values = torch.arange(float(VOCABULARY * 2)).view(VOCABULARY, 2)
    model.embed.weight = nn.Parameter(slice_of("embed.weight", values, rank, size, PAD))
    model.head.weight = model.embed.weight
    mp.declare_placement(
        model,
        "embed.weight",
        global_shape=(VOCABULARY, 2),
        mesh=list(range(size)),
        placements=[Shard(0)],
        padded_shape=(rows, 2),
    )
    mp.save(run / f"of-{size}/checkpoint-1", {"model": model}, step=1)
    with torch.no_grad():
        model.embed.weight.zero_()
    mp.load(run / f"of-{size}/checkpoint-1", {"model": model})
    assert model.head.weight is model.embed.weight
    return list(load_file(run / f"of-{size}/checkpoint-1/model.safetensors")), model.head.weight


@pytest.mark.case("V40")
@pytest.mark.parametrize("size", [2, 4])
def test_a_tied_padded_vocabulary_is_stored_once_without_its_padding(
    size: int, tmp_path: Path
) -> None:
    values = torch.arange(float(VOCABULARY * 2)).view(VOCABULARY, 2)
    for rank, (names, live) in enumerate(run_world(size, tied_vocabulary, tmp_path)):
        assert names == ["embed.weight"]
        assert torch.equal(live, slice_of("embed.weight", values, rank, size, 0.0))
    stored = load_file(tmp_path / f"of-{size}/checkpoint-1/model.safetensors")["embed.weight"]
    assert torch.equal(stored, values)
