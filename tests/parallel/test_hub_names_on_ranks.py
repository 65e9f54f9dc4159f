"""Fused experts in memory, hub names on disk: under every parallelism, both ways, in slices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import milepost as mp
from tests.parallel.expert_models import (
    EP,
    EP_FSDP,
    EP_TP_FSDP,
    FSDP,
    ONE,
    SETTINGS,
    TP,
    TP_FSDP,
    Mode,
    build,
    optimizer_of,
    random_model,
    train,
    values,
    weights,
    world_size,
)
from tests.worlds import run_outcomes, run_world

SPREAD = [
    ("Qwen3Moe", ONE),
    ("Qwen3Moe", EP_TP_FSDP),
    ("Qwen3Moe", TP_FSDP),
    ("Mixtral", TP),
    ("GptOss", EP_FSDP),
    ("DeepseekV3", EP),
]
REST = [
    pytest.param(family, mode, marks=pytest.mark.slow)
    for family in SETTINGS
    for mode in (ONE, FSDP, TP, EP, EP_FSDP, TP_FSDP, EP_TP_FSDP)
    if (family, mode) not in SPREAD
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Hugging Face directory for each family, as `save_pretrained` writes it."""
    found = {}
    for family in SETTINGS:
        found[family] = tmp_path_factory.mktemp(family)
        random_model(family).save_pretrained(found[family])
    return found


def in_world(mode: Mode, function: Any, *arguments: Any) -> list[Any]:
    """The values of all ranks; one process is a world of one without a process group."""
    if mode == ONE:
        return [function(0, 1, *arguments)]
    return run_world(world_size(mode), function, *arguments)


def read(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    parts: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        parts.update(load_file(path))
    return parts


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [n for n, t in expected.items() if found[n].shape != t.shape] == []
    assert [n for n, t in expected.items() if not torch.equal(found[n], t)] == []


def save_in_the_middle(rank: int, size: int, base: Path, mode: Mode, run: Path) -> Any:
    """Two steps, a save, two steps more; the values at the save and at the end."""
    model = build(base, mode)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2))
    mp.save(run / "checkpoint-2", {"model": model, "optimizer": optimizer}, step=2)
    saved = values(model, optimizer)
    train(model, optimizer, range(2, 4))
    return saved, values(model, optimizer)


def resume(rank: int, size: int, base: Path, mode: Mode, run: Path) -> Any:
    """A model with other weights, filled from the checkpoint, and two steps more."""
    model = build(base, mode)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(7, 8))
    report = mp.load(run / "checkpoint-2", {"model": model, "optimizer": optimizer})
    loaded = values(model, optimizer)
    train(model, optimizer, range(2, 4))
    return loaded, values(model, optimizer), report.level.value


@pytest.mark.case("V53")
@pytest.mark.parametrize(("family", "mode"), [*SPREAD, *REST], ids=str)
def test_what_is_saved_is_what_save_pretrained_writes_and_resumes_exactly(
    family: str, mode: Mode, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[family]
    saved, end = in_world(mode, save_in_the_middle, base, mode, tmp_path)[0]
    gathered = build(base, ONE)
    gathered.load_state_dict({name: saved[name] for name in gathered.state_dict()})
    gathered.save_pretrained(tmp_path / "stock")
    assert_equal(read(tmp_path / "checkpoint-2"), read(tmp_path / "stock"))
    loaded, info = type(gathered).from_pretrained(
        tmp_path / "checkpoint-2", output_loading_info=True
    )
    assert not any(info.values()), info
    assert_equal(loaded.state_dict(), gathered.state_dict())
    for found, found_end, level in in_world(mode, resume, base, mode, tmp_path):
        assert_equal(found, saved)
        assert_equal(found_end, end)
        assert level == "exact"
    assert mp.Checkpoint.open(tmp_path / "checkpoint-2").verify().problems == ()


@pytest.mark.parametrize(
    ("family", "mode", "others"),
    [
        ("Qwen3Moe", EP_TP_FSDP, [ONE, TP, EP_FSDP]),
        pytest.param("Qwen3Moe", ONE, [TP, EP, TP_FSDP], marks=pytest.mark.slow),
        pytest.param("Mixtral", TP, [ONE, FSDP, EP_TP_FSDP], marks=pytest.mark.slow),
        pytest.param("GptOss", EP_FSDP, [ONE, FSDP, EP], marks=pytest.mark.slow),
        pytest.param("DeepseekV3", EP, [ONE, TP_FSDP, EP_FSDP], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_other_shapes_resume_with_the_same_weights_and_moments(
    family: str, mode: Mode, others: list[Mode], bases: dict[str, Path], tmp_path: Path
) -> None:
    base = bases[family]
    saved, _ = in_world(mode, save_in_the_middle, base, mode, tmp_path)[0]
    for other in others:
        for found, _, level in in_world(other, resume, base, other, tmp_path):
            assert_equal(found, saved)
            assert level == "resharded"


def fill_from(rank: int, size: int, base: Path, mode: Mode, directories: list[Path]) -> Any:
    """The weights after a load from each directory; before each, all of them are NaN."""
    model = build(base, mode)
    found = []
    for directory in directories:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)
        report = mp.load(directory, {"model": model})
        assert report.models["model"].missing == report.models["model"].unexpected == ()
        found.append(weights(model))
    return found


@pytest.mark.case("V53")
@pytest.mark.parametrize(
    ("family", "mode"),
    [
        ("Qwen3Moe", ONE),
        ("Mixtral", EP_FSDP),
        ("DeepseekV3", TP),
        pytest.param("Qwen3Moe", EP_TP_FSDP, marks=pytest.mark.slow),
        pytest.param("GptOss", TP_FSDP, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_directories_with_separate_experts_and_with_fused_ones_both_load(
    family: str, mode: Mode, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Stock directories: as on the hub, and as the model is in memory, in several parts each."""
    model = random_model(family)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.rand_like(param))
    model.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "fused", max_shard_size="20KB", save_original_format=False)
    if family != "GptOss":
        assert read(tmp_path / "hub").keys() != read(tmp_path / "fused").keys()
    directories = [tmp_path / "hub", tmp_path / "fused"]
    for hub, fused in in_world(mode, fill_from, bases[family], mode, directories):
        assert_equal(hub, weights(model))
        assert_equal(fused, weights(model))


def save_labelled(rank: int, size: int, base: Path, mode: Mode, run: Path) -> None:
    """Save a model whose fused rows, and their first moments, are their own numbers."""
    model = build(base, mode)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1))
    for name, param in model.named_parameters():
        if not name.endswith("gate_up_proj"):
            continue
        rows = torch.arange(param.shape[1], dtype=param.dtype)[None, :, None].expand(param.shape)
        for target, labels in (
            (param, rows),
            (optimizer.state[param]["exp_avg"], rows + 0.5),
        ):
            place(target, labels.contiguous())
    mp.save(run / "checkpoint-1", {"model": model, "optimizer": optimizer}, step=1)


def place(target: Any, value: Tensor) -> None:
    """Give a tensor its part of `value`, by torch's own distribution."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.no_grad():
        if isinstance(target, DTensor):
            target.copy_(distribute_tensor(value, target.device_mesh, target.placements))
        else:
            target.copy_(value)


def labels(rank: int, size: int, base: Path, mode: Mode, run: Path) -> list[Tensor]:
    model = build(base, mode)
    optimizer = optimizer_of(model)
    mp.load(run / "checkpoint-1", {"model": model, "optimizer": optimizer})
    found = values(model, optimizer)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    return [found[name][:, :, 0], found[f"{name}.exp_avg"][:, :, 0]]


@pytest.mark.case("V41")
def test_gate_and_up_rows_stay_apart_for_every_width_of_tensor_parallelism(
    tmp_path: Path,
) -> None:
    base = tmp_path / "base"
    random_model("Qwen3Moe", num_key_value_heads=4).save_pretrained(base)
    two, four = TP, {"tp_size": 4}
    for number, (source, targets) in enumerate([(two, [ONE, four]), (four, [two])]):
        run = tmp_path / str(number)
        in_world(source, save_labelled, base, source, run)
        on_disk = read(run / "checkpoint-1")
        prefix = "model.layers.1.mlp.experts.3"
        assert on_disk[f"{prefix}.gate_proj.weight"][:, 0].tolist() == list(range(16))
        assert on_disk[f"{prefix}.up_proj.weight"][:, 0].tolist() == list(range(16, 32))
        for target in targets:
            for rows, moments in in_world(target, labels, base, target, run):
                assert torch.equal(rows, torch.arange(32.0).expand(8, 32))
                assert torch.equal(moments, torch.arange(32.0).expand(8, 32) + 0.5)


class Stage(nn.Module):
    """One layer of two, under the names that it has in the whole model."""

    def __init__(self, whole: Any, rank: int) -> None:
        super().__init__()
        self.config = whole.config
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(rank): whole.model.layers[rank]})
        if rank == 0:
            self.model.embed_tokens = whole.model.embed_tokens
        else:
            self.model.norm = whole.model.norm
            self.lm_head = whole.lm_head


def through_stages(rank: int, size: int, family: str, hub: Path, run: Path) -> bool:
    """Save a stage, load it back, and load it from a hub directory of the whole."""
    model = Stage(random_model(family), rank)
    optimizer = optimizer_of(model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    expected = values(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    mp.save(run / "checkpoint-1", state, step=1)
    same = []
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(torch.nan)
    mp.load(run / "checkpoint-1", state)
    same.append(all(torch.equal(t, expected[n]) for n, t in values(model, optimizer).items()))
    mp.load(hub, {"model": model})
    stock = read(hub)
    name = f"model.layers.{rank}.self_attn.o_proj.weight"
    same.append(torch.equal(dict(model.named_parameters())[name], stock[name]))
    dist.barrier()
    return all(same)


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
def test_stages_of_a_pipeline_save_and_load_their_part_of_the_hub_tensors(
    family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    assert all(run_world(2, through_stages, family, bases[family], tmp_path))
    found, stock = read(tmp_path / "checkpoint-1"), read(bases[family])
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in stock.items()}
    loaded = build(tmp_path / "checkpoint-1", ONE)
    optimizer = optimizer_of(loaded)
    report = mp.load(tmp_path / "checkpoint-1", {"model": loaded, "optimizer": optimizer})
    assert report.level.value == "resharded"
    loaded.save_pretrained(tmp_path / "stock")
    assert_equal(read(tmp_path / "stock"), found)


def save_disagreeing(rank: int, size: int, base: Path, run: Path) -> list[str]:
    """A second rank whose model cannot be named as the hub does: all keep the runtime names."""
    model = random_model("Mixtral", num_hidden_layers=1)
    if rank == 1:
        model.extra = nn.ModuleDict({"mlp": nn.Linear(2, 2), "block_sparse_moe": nn.Linear(2, 2)})
        with torch.no_grad():
            for param in model.extra.parameters():
                param.zero_()
    report = mp.save(run / "checkpoint-1", {"model": model}, step=1)
    return list(report.notes)


def test_where_one_rank_has_no_hub_names_all_keep_the_runtime_names_and_say_why(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    for notes in run_world(2, save_disagreeing, bases["Mixtral"], tmp_path):
        assert any("not in hub spelling: MixtralForCausalLM" in note for note in notes)
    found = mp.Checkpoint.open(tmp_path / "checkpoint-1").tensors()
    assert "model.layers.0.mlp.experts.gate_up_proj" in found
    assert "extra.block_sparse_moe.weight" in found
    model = random_model("Mixtral", num_hidden_layers=1)
    fresh = random_model("Mixtral", num_hidden_layers=1)
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    mp.load(tmp_path / "checkpoint-1", {"model": fresh}, unexpected=mp.Unexpected.IGNORE)
    assert_equal(weights(fresh), weights(model))


def load_with_a_hole(rank: int, size: int, base: Path, directory: Path) -> None:
    mp.load(directory, {"model": build(base, EP)})


def test_a_missing_expert_is_named_as_it_would_be_on_disk(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    lost = "model.layers.1.mlp.experts.6.up_proj.weight"
    random_model("Qwen3Moe").config.save_pretrained(tmp_path / "hub")
    tensors = {n: t for n, t in read(bases["Qwen3Moe"]).items() if n != lost}
    save_file(tensors, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    for outcome in run_outcomes(2, load_with_a_hole, bases["Qwen3Moe"], tmp_path / "hub"):
        assert outcome.error is not None
        assert "1 missing, 0 unexpected" in outcome.error
        assert lost in outcome.error
