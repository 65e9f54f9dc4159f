"""`save_checkpoint` and `load_checkpoint`: every layout, what is wrong with a file, warnings."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from milepost.checkpointing import load_checkpoint, save_checkpoint
from milepost.errors import CheckpointWarning, DamagedError, InconsistentError, NotFoundError
from milepost.layouts.trio import TrioContent, write_trio
from tests.states import training

GOLDEN = Path(__file__).parent.parent / "golden"


def trio(directory: Path) -> Path:
    state = nn.Linear(2, 2).state_dict()
    content = TrioContent(
        model_state=state,
        optimizer_state={"lr": 0.5},
        extra_state={"cursor": 7},
        epoch=2,
        step=40,
        loss=0.5,
        model_config={"d": 8},
    )
    write_trio(directory, ["latest"], content)
    return directory / "latest"


def test_a_trio_is_loaded_like_a_single_file(tmp_path: Path) -> None:
    stem = trio(tmp_path)
    for path in (stem, f"{stem}.pt", f"{stem}.meta.json", f"{stem}.extra_state.pt"):
        result = load_checkpoint(path)
        assert set(result["model_state"]) == {"weight", "bias"}
        assert result["optimizer"] == {"lr": 0.5}
        assert result["extra_state"] == {"cursor": 7}
        assert (result["epoch"], result["step"], result["loss"]) == (2, 40, 0.5)
        assert result["config"] == result["model_config"] == {"d": 8}
        assert result["metadata"]["step"] == 40
        nn.Linear(2, 2).load_state_dict(result["model_state"])


@pytest.mark.case("C1.3")
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "unsafe"])
def test_without_a_usable_training_state_weights_and_metadata_are_loaded(
    tmp_path: Path, damage: str
) -> None:
    stem = trio(tmp_path)
    path = tmp_path / "latest.extra_state.pt"
    raw = bytearray(path.read_bytes())
    path.unlink()
    if damage == "cut":
        path.write_bytes(raw[:-100])
    elif damage == "flipped":
        raw[raw.index(b"cursor")] ^= 1
        path.write_bytes(raw)
    elif damage == "unsafe":
        torch.save({"extra_state": tmp_path}, path)
    with pytest.warns(CheckpointWarning, match=r"latest\.extra_state\.pt: not usable") as caught:
        result = load_checkpoint(stem)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "optimizer" not in result
    assert (result["epoch"], result["config"]) == (2, {"d": 8})
    assert set(result["model_state"]) == {"weight", "bias"}


def test_a_training_state_of_another_save_is_an_error(tmp_path: Path) -> None:
    stem = trio(tmp_path)
    old = (tmp_path / "latest.extra_state.pt").read_bytes()
    trio(tmp_path)
    (tmp_path / "latest.extra_state.pt").write_bytes(old)
    with pytest.raises(InconsistentError):
        load_checkpoint(stem)


def test_damaged_weights_are_an_error_not_a_warning(tmp_path: Path) -> None:
    stem = trio(tmp_path)
    path = tmp_path / "latest.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DamagedError):
        load_checkpoint(stem)


@pytest.mark.case("C5.27")
@pytest.mark.parametrize(
    "name", ["legacy_v005.pt", "legacy_2025_07.pt", "demo_step_200.pt", "modern_llm_oldest.pt"]
)
def test_a_legacy_file_warns_once_at_the_line_of_the_user(name: str) -> None:
    with pytest.warns(DeprecationWarning) as caught:
        load_checkpoint(GOLDEN / name)
    assert len(caught) == 1
    assert f"llm-migrate-ckpt {GOLDEN / name}" in str(caught[0].message)
    assert caught[0].filename == __file__


@pytest.mark.case("C5.27")
def test_python_shows_the_legacy_warning_by_default(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from milepost.checkpointing import load_checkpoint\n"
        f"load_checkpoint({str(GOLDEN / 'legacy_v005.pt')!r})\n"
    )
    result = subprocess.run(
        [sys.executable, str(script)], check=True, capture_output=True, text=True
    )
    assert f"{script}:2: DeprecationWarning" in result.stderr


@pytest.mark.parametrize("name", ["modern_llm.pt", "modern_llm_fork.pt", "state_dict.pt"])
def test_a_current_file_does_not_warn(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "0.weight" in load_checkpoint(GOLDEN / name)["model_state"]


@pytest.mark.case("C5.26")
def test_a_legacy_file_gives_its_keys_and_defaults() -> None:
    with pytest.warns(DeprecationWarning):
        result = load_checkpoint(GOLDEN / "legacy_2025_07.pt")
    assert (result["epoch"], result["loss"], result["best_loss"]) == (3, 0.5, 0.25)
    assert result["optimizer"]["param_groups"]
    assert result["scheduler_state"]["last_epoch"] == 3
    assert result["model_config"] is None


@pytest.mark.parametrize("name", ["x.pt", "x", "no/x.pt", "x.meta.json"])
def test_nothing_there_is_a_file_not_found_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        load_checkpoint(tmp_path / name)
    assert isinstance(caught.value, NotFoundError)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.case("C7.33")
def test_metadata_named_like_a_parameter_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="path"):
        save_checkpoint(tmp_path / "x.pt", {}, path="y")  # type: ignore[misc]


def test_a_string_path_and_positional_arguments_work(tmp_path: Path) -> None:
    save_checkpoint(str(tmp_path / "x.pt"), {"w": torch.ones(1)}, {"lr": 1.0}, step=3)
    assert load_checkpoint(str(tmp_path / "x.pt"))["optimizer"] == {"lr": 1.0}


def test_a_hugging_face_trainer_checkpoint_is_loaded_too(tmp_path: Path) -> None:
    state = training(steps=1)
    model, optimizer = state["model"], state["optimizer"]
    untied = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(untied, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"d_model": 4}')
    (tmp_path / "trainer_state.json").write_text('{"global_step": 30, "epoch": 1.5}')
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    torch.save({"last_epoch": 30}, tmp_path / "scheduler.pt")
    result = load_checkpoint(tmp_path)
    assert (result["step"], result["epoch"], result["config"]) == (30, 1.5, {"d_model": 4})
    model.load_state_dict(result["model_state"])
    optimizer.load_state_dict(result["optimizer"])
    assert result["training_state"] == {"scheduler": {"last_epoch": 30}}
