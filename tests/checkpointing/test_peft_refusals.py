"""Adapter sidecars that are refused: nothing is applied, nothing is written."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from milepost.checkpointing.peft_sidecar import load_peft, save_peft
from milepost.errors import (
    DamagedError,
    FormatError,
    InvalidInputError,
    KeyMismatchError,
    MismatchError,
    NotFoundError,
    ShapeMismatchError,
    UnsafePickleError,
    UnsupportedVersionError,
)
from milepost.state.tensors import same_bits
from milepost.storage import fileops
from tests.checkpointing.peft_models import (
    Biased,
    biased,
    filled,
    llama,
    lora,
    rewrite,
    snapshot,
    unchanged,
)


def refused(model: nn.Module, path: Path, method: str = "lora", **options: Any) -> str:
    before = snapshot(model)
    with pytest.raises(MismatchError) as caught:
        load_peft(model, path, method, **options)
    assert isinstance(caught.value, RuntimeError)
    assert unchanged(model, before)
    return str(caught.value)


def test_another_shape_is_refused_with_index_name_and_both_shapes(tmp_path: Path) -> None:
    path = save_peft(lora(), tmp_path / "a.bin", "lora")
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    wanted = f"tensor 0 ({name}): the file holds (4, 16), the model wants (8, 16)"
    assert wanted in refused(llama(), path, r=8)
    assert wanted in refused(lora(r=8), path)
    with pytest.raises(ShapeMismatchError, match="; and 3 more"):
        load_peft(llama(), path, "lora", r=8)


@pytest.mark.case("V50")
def test_names_that_do_not_all_match_are_refused_with_both_sides(tmp_path: Path) -> None:
    path = save_peft(lora(), tmp_path / "a.bin", "lora")
    text = refused(llama(), path, target_modules=["q_proj"])
    assert "the file holds 8 tensors, the adapter of the model has 4: 0 missing" in text
    with pytest.raises(KeyMismatchError) as caught:
        load_peft(llama(3), path, "lora")
    assert (len(caught.value.missing), len(caught.value.unexpected)) == (4, 0)
    names = torch.load(path, weights_only=True)["names"]
    with pytest.raises(KeyMismatchError, match=r"8 missing .*, 8 unexpected"):
        load_peft(lora(), rewrite(path, names=["language_model." + n for n in names]), "lora")


def test_another_count_is_refused_without_names_too(tmp_path: Path) -> None:
    path = rewrite(save_peft(lora(), tmp_path / "a.bin", "lora"), names=None, base=None)
    text = refused(llama(3), path)
    assert "the file holds 8 tensors, the adapter of the model has 12" in text


@pytest.mark.case("V48")
def test_another_base_is_noticed_although_the_adapter_fits(tmp_path: Path) -> None:
    path = save_peft(lora(), tmp_path / "a.bin", "lora")
    base = llama()
    base.get_submodule("model.layers.0.mlp").register_parameter("gain", nn.Parameter(torch.ones(2)))
    text = refused(base, path)
    assert "trained on a base of 21 parameters" in text and "the model has 22" in text


def test_a_missing_file_and_a_directory_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no such adapter file"):
        load_peft(llama(), tmp_path / "a.bin", "lora")
    for call in (load_peft, save_peft):
        with pytest.raises(InvalidInputError, match=r"pass .*/peft_adapter_lora\.bin"):
            call(llama(), tmp_path, "lora")


def test_another_method_version_or_an_unknown_method_is_a_value_error(tmp_path: Path) -> None:
    path = save_peft(lora(), tmp_path / "a.bin", "lora")
    for call in (load_peft, save_peft):
        with pytest.raises(InvalidInputError, match=r"'lorra': no adapter method; .*ia3.*lora"):
            call(llama(), path, "lorra")
    with pytest.raises(InvalidInputError, match="of the method 'lora', not 'ia3'"):
        load_peft(llama(), path, "ia3")
    with pytest.raises(UnsupportedVersionError, match=r"'1\.1', expected '1\.0'"):
        load_peft(llama(), rewrite(path, format_version="1.1"), "lora")
    with pytest.raises(InvalidInputError, match="has the adapter 'default' of the method lora"):
        save_peft(lora(), path, "ia3")


def test_options_that_peft_does_not_take_leave_the_model_as_it_was(tmp_path: Path) -> None:
    path = save_peft(lora(), tmp_path / "a.bin", "lora")
    base = llama()
    before = snapshot(base)
    for options in ({"rank": 4}, {"target_modules": ["nothing"]}):
        with pytest.raises(InvalidInputError, match="peft does not take the options"):
            load_peft(base, path, "lora", **options)
        assert unchanged(base, before)


@pytest.mark.parametrize("method", ["adapter", "pfeiffer_adapter"])
def test_a_method_of_the_old_library_is_loaded_into_a_model_built_with_it(
    method: str, tmp_path: Path
) -> None:
    path = save_peft(biased(), tmp_path / "a.bin", method)
    with pytest.raises(InvalidInputError, match="build the model with its adapter modules"):
        load_peft(Biased(), path, method)
    model = biased()
    assert load_peft(filled(model, seed=5), path, method) is model
    assert same_bits(model.get_parameter("first.bias"), biased().get_parameter("first.bias"))


@pytest.mark.case("V44")
def test_an_adapter_with_nothing_in_it_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    with pytest.raises(InvalidInputError, match="no parameter of the model is frozen"):
        save_peft(Biased(), path, "bitfit")
    with pytest.raises(InvalidInputError, match="no parameter is trainable"):
        save_peft(Biased().requires_grad_(False), path, "bitfit")
    hollow = biased()
    hollow.get_parameter("first.bias").data = torch.empty(0)
    with pytest.raises(InvalidInputError, match=r"first\.bias: \(0,\), without an element"):
        save_peft(hollow, path, "bitfit")
    assert not path.exists()


def test_an_option_that_contradicts_the_model_is_refused_at_saving(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="lora_alpha=9: the adapter of the model has 16"):
        save_peft(lora(), tmp_path / "a.bin", "lora", lora_alpha=9)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"state_dict": {}}, "0 entries and no tensor bitfit.0"),
        ({"state_dict": {"bitfit.1": torch.ones(4)}}, "1 entries and no tensor bitfit.0"),
        ({"state_dict": None}, "state_dict is missing"),
        ({"peft_kwargs": None}, "peft_kwargs is missing"),
        ({"names": ["first.bias"]}, "expected a list of 2 different names"),
        ({"names": ["first.bias", "first.bias"]}, "expected a list of 2 different names"),
    ],
)
def test_a_malformed_file_is_refused_by_what_is_wrong(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = rewrite(save_peft(biased(), tmp_path / "a.bin", "bitfit"), **changes)
    with pytest.raises(FormatError, match=told):
        load_peft(Biased(), path, "bitfit")


class Malicious:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("owned"),))


def test_a_pickle_that_would_run_code_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save_peft(biased(), tmp_path / "a.bin", "bitfit")
    content = {"format_version": "1.0", "method_name": "bitfit", "peft_kwargs": Malicious()}
    torch.save(content, path)
    with pytest.raises(UnsafePickleError):
        load_peft(Biased(), path, "bitfit")
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as file:
        raw = file.read("a/data.pkl")
    assert pickle.PROTO in raw and b"touch" in raw
    assert not Path("owned").exists()


def test_a_flipped_byte_is_noticed_before_anything_is_applied(tmp_path: Path) -> None:
    model = biased()
    path = save_peft(model, tmp_path / "a.bin", "bitfit")
    raw = path.read_bytes()
    value = model.get_parameter("first.bias").detach().numpy().tobytes()
    path.write_bytes(raw.replace(value, bytes([value[0] ^ 1]) + value[1:]))
    other = Biased()
    before = snapshot(other)
    with pytest.raises(DamagedError):
        load_peft(other, path, "bitfit")
    assert unchanged(other, before)


@pytest.mark.parametrize("operation", ["write", "fsync", "rename"])
def test_a_save_that_fails_leaves_the_older_file(operation: str, tmp_path: Path) -> None:
    path = save_peft(biased(), tmp_path / "a.bin", "bitfit")
    raw = path.read_bytes()
    seen = []

    def hook(name: str, target: str, function: Any, arguments: Any) -> Any:
        seen.append(name)
        if name == operation:
            raise OSError(28, "No space left on device")
        return function(*arguments)

    with fileops.hooked(hook), pytest.raises(OSError, match="needs more room"):
        save_peft(filled(biased(), seed=9), path, "bitfit")
    assert operation in seen
    assert path.read_bytes() == raw
    assert [file.name for file in tmp_path.iterdir()] == ["a.bin"]
