"""Each kind of low-rank adapter on cut models: whole on disk, and trained on to the same bits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import milepost as mp
from milepost.state.tensors import local_of
from milepost_trainer.parallel.dora import cut_magnitudes
from tests.adapters.lora_models import adapted, base, logits, start_adapter, tensors_of
from tests.parallel.models import FSDP2, FSDP4, ONE, TP2, Shape, Training, gathered, whole
from tests.worlds import run_outcomes, run_world

STEPS = 2
SETTINGS: dict[str, dict[str, Any]] = {
    "rslora-patterns": {
        "use_rslora": True,
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 2, "down_proj": 3},
        "alpha_pattern": {"o_proj": 3},
    },
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj", "o_proj", "down_proj"]},
    "head": {"modules_to_save": ["lm_head"]},
}


class Kept(NamedTuple):
    """One adapter on one rank. `saved` and `loaded` are whole weights and moments by name."""

    losses: list[float]
    losses_of_resumed: list[float]
    saved: dict[str, torch.Tensor]
    loaded: dict[str, torch.Tensor]
    level: str


def start(shape: Shape, kind: str, seed: int) -> Training:
    training = start_adapter(shape, seed=seed, **SETTINGS[kind])
    if shape == TP2 and kind == "dora":
        mesh = init_device_mesh("cpu", shape.sizes, mesh_dim_names=("tp",))
        cut_magnitudes(training.model, mesh)
        training.optimizer.param_groups[0]["params"] = [
            param for param in training.model.parameters() if param.requires_grad
        ]
    return training


def save_and_resume(rank: int, world_size: int, shape: Shape, run: Path) -> dict[str, Kept]:
    return {kind: both(shape, kind, run / kind / f"checkpoint-{STEPS}") for kind in SETTINGS}


def both(shape: Shape, kind: str, place: Path) -> Kept:
    first = start(shape, kind, 5)
    for _ in range(STEPS):
        first.step()
    mp.save(place, first.state(), step=STEPS)
    saved = gathered(first)
    losses = [first.step() for _ in range(STEPS)]
    second = start(shape, kind, 9)
    second.step()
    report = mp.load(place, second.state())
    loaded = gathered(second)
    return Kept(losses, [second.step() for _ in range(STEPS)], saved, loaded, report.level.value)


@pytest.mark.case("V44")
@pytest.mark.parametrize("shape", [FSDP2, TP2], ids=str)
def test_each_kind_of_adapter_is_whole_on_disk_and_resumes_to_the_same_bits(
    shape: Shape, tmp_path: Path
) -> None:
    for kept_of in run_world(shape.world_size, save_and_resume, shape, tmp_path):
        for kind, kept in kept_of.items():
            assert kept.level == "exact", kind
            assert kept.losses_of_resumed == kept.losses, kind
            wrong = [n for n, t in kept.saved.items() if not torch.equal(t, kept.loaded[n])]
            assert wrong == [], kind
    for kind, kept in kept_of.items():
        place = tmp_path / kind / f"checkpoint-{STEPS}"
        one = adapted(9, **SETTINGS[kind])
        with torch.no_grad():
            for name, param in one.named_parameters():
                param.copy_(kept.saved[name])
        on_disk = tensors_of(place)
        shapes = {n: p.shape for n, p in one.named_parameters() if p.requires_grad}
        assert len(on_disk) == len(shapes)
        assert sorted(t.shape for t in on_disk.values()) == sorted(shapes.values()), kind
        stock = PeftModel.from_pretrained(base(), place)
        assert torch.equal(logits(stock), logits(one)), kind
    head = tensors_of(tmp_path / "head" / f"checkpoint-{STEPS}")["base_model.model.lm_head.weight"]
    assert head.shape == (64, 32) and not torch.equal(head, base().lm_head.weight)


# ---- every rank's part, and nothing but the whole


def factors(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if "lora_" in name}


def fill(model: nn.Module, value: float) -> None:
    """What this rank holds of each factor."""
    with torch.no_grad():
        for param in factors(model).values():
            local_of(param).fill_(value)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace(".default", ""): whole(p) for name, p in factors(model).items()}


def save_filled(rank: int, world_size: int, run: Path) -> dict[str, torch.Tensor]:
    model = start_adapter(FSDP2).model
    fill(model, rank + 1.0)
    mp.save(run / "checkpoint-1", {"model": model}, step=1)
    fill(model, 0.0)
    mp.load(run / "checkpoint-1", {"model": model})
    assert all(bool((local_of(p) == rank + 1).all()) for p in factors(model).values())
    return values(model)


def load_zeroed(rank: int, world_size: int, run: Path) -> dict[str, torch.Tensor]:
    model = start_adapter(FSDP4).model
    fill(model, 0.0)
    mp.load(run / "checkpoint-1", {"model": model})
    return values(model)


@pytest.mark.case("V45")
def test_what_each_rank_filled_is_in_the_file_and_comes_back_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    expected, _ = run_world(2, save_filled, tmp_path)
    on_disk = tensors_of(tmp_path / "checkpoint-1")
    assert on_disk.keys() == expected.keys()
    one = start_adapter(ONE).model
    mp.load(tmp_path / "checkpoint-1", {"model": one})
    for found in (on_disk, values(one), *run_world(4, load_zeroed, tmp_path)):
        assert [n for n, t in expected.items() if not torch.equal(found[n], t)] == []
    for name, tensor in on_disk.items():
        rows = len(tensor) // 2
        assert bool((tensor[:rows] == 1).all() and (tensor[rows:] == 2).all()), name


def save_local_parts(rank: int, world_size: int, run: Path, r: int, value: float | None) -> None:
    """What a rank has of each factor, put in the place of the factor as if it were all of it."""
    model = start_adapter(FSDP2, r=r).model
    for name, param in factors(model).items():
        local = local_of(param).detach().clone()
        owner, _, leaf = name.rpartition(".")
        held = local if value is None else torch.full_like(local, value)
        model.get_submodule(owner).register_parameter(leaf, nn.Parameter(held))
    mp.save(run / "checkpoint-1", {"model": model}, step=1)


@pytest.mark.case("V45")
@pytest.mark.parametrize(
    ("r", "value"),
    [(3, None), (4, None), (4, 0.0)],
    ids=["other-shapes", "other-values", "same-values"],
)
def test_a_local_part_cannot_be_saved_under_the_name_of_the_whole(
    r: int, value: float | None, tmp_path: Path
) -> None:
    outcomes = run_outcomes(2, save_local_parts, tmp_path, r, value)
    assert all(outcome.error is not None for outcome in outcomes), outcomes
    assert all("lora_" in str(outcome.error) for outcome in outcomes)
    assert not list(tmp_path.rglob("*.safetensors"))


# ---- ranks that see other directories


def lack_file(place: Path) -> None:
    (place / "adapter_model.safetensors").unlink()


def lack_config(place: Path) -> None:
    (place / "adapter_config.json").unlink()


def cut_off(place: Path) -> None:
    file = place / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def be_unreadable(place: Path) -> None:
    lack_file(place)
    (place / "adapter_model.safetensors").mkdir()


def be_a_pickle(place: Path) -> None:
    (place / "adapter_model.safetensors").rename(place / "adapter_model.bin")


def be_another(place: Path) -> None:
    adapted(r=2).save_pretrained(place)


def be_scaled_otherwise(place: Path) -> None:
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 9}))


OF_STOCK: dict[Any, str] = {
    lack_file: r"lack_file.*no model\.safetensors",
    lack_config: r"adapter_config\.json: not there",
    cut_off: "adapter_model.safetensors",
    be_unreadable: r"be_unreadable.*no model\.safetensors",
    be_a_pickle: r"be_a_pickle.*no model\.safetensors",
    be_another: "rank 0 and rank 1 see different adapters",
    be_scaled_otherwise: "rank 0 and rank 1 see different adapters",
    shutil.rmtree: "rmtree",
}
OF_A_SAVE: dict[Any, str] = {
    lack_file: r"adapter_model\.safetensors is missing",
    cut_off: "adapter_model.safetensors",
    be_scaled_otherwise: "adapter_config.json",
    shutil.rmtree: "rmtree",
}


def load_own(rank: int, world_size: int, places: list[list[Path]]) -> list[tuple[str, str]]:
    model = start_adapter(FSDP2, seed=9).model
    before = values(model)
    found = []
    for of_rank in places:
        with pytest.raises(mp.errors.CheckpointError) as caught:
            mp.load(of_rank[rank], {"model": model})
        found.append((type(caught.value).__name__, str(caught.value)))
    assert all(torch.equal(before[n], t) for n, t in values(model).items())
    return found


def test_an_adapter_that_one_rank_lacks_or_sees_otherwise_stops_all_alike(tmp_path: Path) -> None:
    adapted().save_pretrained(tmp_path / "stock")
    mp.save(tmp_path / "saved", {"model": adapted()}, step=1)
    places, expected = [], []
    for kind, faults in (("stock", OF_STOCK), ("saved", OF_A_SAVE)):
        for spoil, pattern in faults.items():
            case = f"{kind}-{spoil.__name__}"
            of_rank = [tmp_path / case / f"seen-by-{rank}" / "adapter" for rank in range(2)]
            for place in of_rank:
                shutil.copytree(tmp_path / kind, place)
            spoil(of_rank[1])
            places.append(of_rank)
            expected.append((case, pattern))
    of_first, of_second = run_world(2, load_own, places)
    assert of_first == of_second
    untold = [
        (case, message)
        for (case, pattern), (_, message) in zip(expected, of_first, strict=True)
        if not re.search(pattern, message)
    ]
    assert untold == []
