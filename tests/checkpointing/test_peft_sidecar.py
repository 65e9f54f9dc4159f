"""Adapter sidecars: the file, round trips by name and by position, ranks."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from milepost.checkpointing.peft_methods import adapter_tensors
from milepost.checkpointing.peft_sidecar import load_peft, peft_sidecar_path, save_peft
from milepost.errors import (
    InvalidInputError,
    MissingExtraError,
)
from milepost.state.tensors import same_bits
from tests.checkpointing.peft_models import (
    IA3,
    LORA,
    PREFIX,
    Biased,
    adapted,
    biased,
    filled,
    llama,
    lora,
    rewrite,
    same_tensors,
)
from tests.worlds import run_world


@pytest.mark.parametrize(
    ("method", "config"),
    [
        ("lora", peft.LoraConfig(**LORA, use_dora=True, modules_to_save=["lm_head"])),
        ("qlora", peft.LoraConfig(**LORA)),
        ("adalora", peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"])),
        ("ia3", peft.IA3Config(**IA3)),
        ("prefix_tuning", peft.PrefixTuningConfig(**PREFIX)),
        ("vera", peft.VeraConfig(r=2, target_modules=["q_proj", "o_proj"])),
    ],
)
def test_an_adapter_comes_back_bit_for_bit_on_a_plain_base(
    method: str, config: Any, tmp_path: Path
) -> None:
    model = adapted(config)
    path = save_peft(model, peft_sidecar_path(tmp_path / "a/b", method), method)
    assert path == tmp_path / f"a/b/peft_adapter_{method}.bin"
    base = llama()
    loaded = load_peft(base, path, method)
    assert isinstance(loaded, peft.PeftModel)
    assert same_tensors(adapter_tensors(loaded, method), adapter_tensors(model, method))
    ids = torch.arange(6)[None]
    loaded.eval(), model.eval()
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_the_file_is_the_one_of_the_document_and_torch_loads_it(tmp_path: Path) -> None:
    model = lora()
    path = save_peft(model, tmp_path / "peft_adapter_lora.bin", "lora", r=4)
    content = torch.load(path, weights_only=True)
    assert list(content)[:4] == ["format_version", "method_name", "peft_kwargs", "state_dict"]
    assert (content["format_version"], content["method_name"]) == ("1.0", "lora")
    assert content["peft_kwargs"] == LORA  # what the call left out is recorded from the model
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    assert list(content["state_dict"]) == [f"lora.{i}" for i in range(len(trained))]
    assert content["names"] == [name for name, _ in trained]
    for value, (_, parameter) in zip(content["state_dict"].values(), trained, strict=True):
        assert type(value) is Tensor and same_bits(value, parameter.detach())
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_model_that_has_its_adapter_is_filled_and_returned(tmp_path: Path) -> None:
    model = lora()
    path = save_peft(model, tmp_path / "a.bin", "lora")
    other = filled(lora(), seed=2)
    assert load_peft(other, path, "lora") is other
    assert same_tensors(dict(other.state_dict()), dict(model.state_dict()))


def test_an_adapter_that_is_frozen_for_inference_is_saved_and_loaded(tmp_path: Path) -> None:
    model = lora().requires_grad_(False)
    path = save_peft(model, tmp_path / "a.bin", "lora")
    loaded = load_peft(llama(), path, "lora")
    assert same_tensors(adapter_tensors(loaded, "lora"), adapter_tensors(model, "lora"))


def test_a_compiled_model_saves_the_names_of_the_plain_one(tmp_path: Path) -> None:
    compiled: Any = torch.compile(lora(), backend="eager")
    path = save_peft(compiled, tmp_path / "a.bin", "lora")
    load_peft(llama(), path, "lora")
    with pytest.raises(InvalidInputError, match="load the adapter first, then wrap"):
        load_peft(torch.compile(llama(), backend="eager"), path, "lora")  # type: ignore[arg-type]


def test_bitfit_trains_the_biases_and_needs_no_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    model = biased()
    path = save_peft(model, tmp_path / "a.bin", "bitfit")
    fresh = Biased()
    assert load_peft(fresh, path, "bitfit") is fresh
    assert [p.requires_grad for p in fresh.parameters()] == [False, True, False, True]
    assert same_bits(fresh.first.bias.detach(), model.get_parameter("first.bias").detach())
    with pytest.raises(MissingExtraError, match=r"pip install 'milepost\[hf\]'"):
        load_peft(Biased(), rewrite(path, method_name="ia3", state_dict={"ia3.0": torch.ones(1)},
                                    names=None), "ia3")  # fmt: skip
    with pytest.raises(InvalidInputError, match="no options, found rank"):
        load_peft(Biased(), save_peft(model, path, "bitfit"), "bitfit", rank=2)


def test_by_name_the_order_of_the_file_does_not_matter(tmp_path: Path) -> None:
    model = biased()
    path = save_peft(model, tmp_path / "a.bin", "bitfit")
    content = torch.load(path, weights_only=True)
    first, second = content["state_dict"].values()
    state = {"bitfit.0": second, "bitfit.1": first}
    rewrite(path, state_dict=state, names=content["names"][::-1])
    fresh = load_peft(Biased(), path, "bitfit")
    assert same_bits(fresh.get_parameter("first.bias").detach(), first)


@pytest.mark.parametrize("method", ["lora", "adalora"])
def test_a_file_of_the_old_library_is_loaded_by_position(method: str, tmp_path: Path) -> None:
    config = peft.LoraConfig(**LORA) if method == "lora" else peft.AdaLoraConfig(total_step=9)
    model = adapted(config)
    trained = [p.detach().cpu().clone() for p in model.parameters() if p.requires_grad]
    content = {
        "format_version": "1.0",
        "method_name": method,
        "peft_kwargs": LORA if method == "lora" else {"total_step": 5},
        "state_dict": {f"{method}.{index}": value for index, value in enumerate(trained)},
    }
    torch.save(content, tmp_path / "a.bin")
    overrides = {} if method == "lora" else {"total_step": 9}
    loaded: Any = load_peft(llama(), tmp_path / "a.bin", method, **overrides)
    found = [p for p in loaded.parameters() if p.requires_grad]
    assert all(same_bits(a, b) for a, b in zip(trained, found, strict=True))
    assert method == "lora" or loaded.peft_config["default"].total_step == 9


def test_overrides_win_and_unused_ones_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_peft(lora(), tmp_path / "a.bin", "lora")
    loaded: Any = load_peft(llama(), path, "lora", lora_alpha=64)
    assert loaded.peft_config["default"].lora_alpha == 64
    load_peft(loaded, path, "lora", lora_alpha=2)
    assert "unused: lora_alpha" in caplog.text
    assert loaded.peft_config["default"].lora_alpha == 64


def test_a_cast_is_logged_with_the_name_and_both_dtypes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = biased()
    path = save_peft(model, tmp_path / "a.bin", "bitfit")
    caplog.set_level(logging.WARNING)
    half = load_peft(Biased().to(torch.bfloat16), path, "bitfit").get_parameter("first.bias")
    assert same_bits(half.detach(), model.get_parameter("first.bias").detach().bfloat16())
    assert "first.bias: cast from torch.float32 to torch.bfloat16" in caplog.text


def test_loading_leaves_torch_s_random_state_alone(tmp_path: Path) -> None:
    path = save_peft(lora(), tmp_path / "a.bin", "lora")
    base = llama()
    before = torch.get_rng_state()
    load_peft(base, path, "lora")
    assert torch.equal(torch.get_rng_state(), before)


# Ranks.


def save_on_a_rank(rank: int, world_size: int, directory: Path) -> tuple[Path, bool]:
    path = save_peft(biased(), directory / f"of-{rank}.bin", "bitfit")
    dist.barrier()
    return path, path.exists()


def test_only_rank_0_writes_and_every_rank_gets_the_path(tmp_path: Path) -> None:
    results = run_world(2, save_on_a_rank, tmp_path)
    assert results == [(tmp_path / "of-0.bin", True), (tmp_path / "of-1.bin", False)]


def sharded(fill: float) -> nn.Module:
    model = biased()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(4.0) * fill
    model.get_submodule("first").bias = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    return model


def shard_and_load(rank: int, world_size: int, path: Path) -> list[float]:
    save_peft(sharded(1.0), path, "bitfit")
    dist.barrier()
    loaded: Any = load_peft(sharded(0.0), path, "bitfit").get_parameter("first.bias")
    assert isinstance(loaded, DTensor)
    found: list[float] = loaded.full_tensor().tolist()
    return found


@pytest.mark.case("V45")
def test_a_sharded_adapter_is_saved_whole_and_comes_back_sharded(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    assert run_world(2, shard_and_load, path) == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert load_peft(Biased(), path, "bitfit").get_parameter("first.bias").tolist() == [0, 1, 2, 3]
