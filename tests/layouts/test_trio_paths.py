"""Which trio a path means, and what is said when some of its files are not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from milepost.errors import (
    CheckpointIncompleteError,
    DamagedError,
    FormatError,
    InconsistentError,
    NotFoundError,
    UnsupportedVersionError,
)
from milepost.layouts.checkpoint import Checkpoint, Layout
from milepost.layouts.trio import TrioCheckpoint, TrioContent, find_trio, trio_names, write_trio

GOLDEN = Path(__file__).parent.parent / "golden"


def content(epoch: int = 2) -> TrioContent:
    state = {"w": torch.arange(4.0)}
    return TrioContent(model_state=state, optimizer_state={"lr": 0.1}, epoch=epoch, best_loss=0.5)


def legacy(path: Path, epoch: int = 9) -> None:
    payload = {"model_state": {"w": torch.zeros(4)}, "optimizer_state": None, "epoch": epoch}
    torch.save(payload, path)


@pytest.mark.case("C5.23")
@pytest.mark.parametrize("stem", ["latest", "run.v2", "a.b.c", "epoch_3.pt2", "x.meta"])
@pytest.mark.parametrize("suffix", ["", ".pt", ".safetensors", ".meta.json", ".extra_state.pt"])
def test_the_stem_and_every_file_lead_to_the_trio(tmp_path: Path, stem: str, suffix: str) -> None:
    write_trio(tmp_path, [stem, "other"], content())
    found = find_trio(tmp_path / f"{stem}{suffix}")
    assert found is not None
    assert found.path == tmp_path / stem
    assert Checkpoint.open(tmp_path / f"{stem}{suffix}").layout is Layout.TRIO


@pytest.mark.case("C5.23")
def test_a_dotted_stem_is_not_taken_for_a_suffix(tmp_path: Path) -> None:
    write_trio(tmp_path, ["run"], content(epoch=1))
    write_trio(tmp_path, ["run.v2"], content(epoch=2))
    assert Checkpoint.open(tmp_path / "run.v2").info.epoch == 2
    assert Checkpoint.open(tmp_path / "run.v2.pt").info.epoch == 2
    assert Checkpoint.open(tmp_path / "run").info.epoch == 1
    with pytest.raises(NotFoundError):
        Checkpoint.open(tmp_path / "run.v3")


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert find_trio(tmp_path / "latest") is None
    assert find_trio(tmp_path / "no" / "such" / "latest") is None


@pytest.mark.parametrize("kept", range(3))
def test_any_file_of_a_trio_comes_before_a_stale_single_file(tmp_path: Path, kept: int) -> None:
    write_trio(tmp_path, ["latest"], content())
    legacy(tmp_path / "latest.pt")
    for number, name in enumerate(trio_names("latest")):
        if number != kept:
            (tmp_path / name).unlink()
    with pytest.raises(CheckpointIncompleteError, match=trio_names("latest")[kept]):
        Checkpoint.open(tmp_path / "latest.pt")


def test_a_whole_trio_comes_before_a_stale_single_file(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest"], content())
    legacy(tmp_path / "latest.pt")
    assert Checkpoint.open(tmp_path / "latest.pt").info.epoch == 2


def test_a_lone_weights_file_without_stamps_does_not_hide_a_single_file(tmp_path: Path) -> None:
    legacy(tmp_path / "final.pt")
    save_file({"w": torch.ones(4)}, tmp_path / "final.safetensors")
    assert Checkpoint.open(tmp_path / "final.pt").info.epoch == 9
    assert Checkpoint.open(tmp_path / "final.safetensors").layout is Layout.HUGGING_FACE
    with pytest.raises(CheckpointIncompleteError, match=r"final\.meta\.json"):
        Checkpoint.open(tmp_path / "final")


@pytest.mark.parametrize("missing", [0, 1])
def test_a_partial_trio_is_refused_with_what_is_there_and_what_to_do(
    tmp_path: Path, missing: int
) -> None:
    write_trio(tmp_path, ["latest"], content())
    names = trio_names("latest")
    (tmp_path / names[missing]).unlink()
    with pytest.raises(CheckpointIncompleteError) as caught:
        Checkpoint.open(tmp_path / "latest")
    text = str(caught.value)
    assert f"of which {names[missing]} is missing" in text
    assert names[1 - missing] in text and names.extra_state in text
    assert "older checkpoint" in text and "llm-migrate-ckpt" in text


@pytest.mark.case("C1.3")
def test_a_missing_training_state_leaves_weights_and_metadata(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest"], content())
    (tmp_path / "latest.extra_state.pt").unlink()
    checkpoint = TrioCheckpoint(tmp_path / "latest")
    assert checkpoint.info.epoch == 2
    assert torch.equal(checkpoint.read_weights()["w"], torch.arange(4.0))
    assert torch.equal(checkpoint.weights_payload().model_state["w"], torch.arange(4.0))
    with pytest.raises(CheckpointIncompleteError, match=r"latest\.extra_state\.pt: missing"):
        checkpoint.training_state()
    with pytest.raises(CheckpointIncompleteError):
        checkpoint.payload()
    assert not checkpoint.verify().ok


def mixed(directory: Path, suffix: str) -> None:
    """`latest` with one file of another save."""
    write_trio(directory, ["latest"], content(epoch=2))
    write_trio(directory, ["other"], content(epoch=3))
    shutil.copy(directory / f"other{suffix}", directory / f"latest{suffix}")


@pytest.mark.case("C1.2")
@pytest.mark.parametrize("suffix", [".safetensors", ".meta.json"])
def test_weights_of_another_save_are_refused(tmp_path: Path, suffix: str) -> None:
    mixed(tmp_path, suffix)
    with pytest.raises(InconsistentError, match="inconsistent") as caught:
        Checkpoint.open(tmp_path / "latest")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, CheckpointIncompleteError)


def test_a_training_state_of_another_save_is_refused(tmp_path: Path) -> None:
    mixed(tmp_path, ".extra_state.pt")
    checkpoint = TrioCheckpoint(tmp_path / "latest")
    assert torch.equal(checkpoint.read("w"), torch.arange(4.0))
    with pytest.raises(InconsistentError, match=r"save_id is .* in latest\.meta\.json"):
        checkpoint.training_state()
    assert not checkpoint.verify().ok


def test_an_epoch_that_differs_is_refused(tmp_path: Path) -> None:
    for suffix in (".safetensors", ".meta.json", ".extra_state.pt"):
        shutil.copy(GOLDEN / f"trio_v2_stamped{suffix}", tmp_path / f"x{suffix}")
    document = json.loads((tmp_path / "x.meta.json").read_text())
    (tmp_path / "x.meta.json").write_text(json.dumps(document | {"epoch": 4}))
    with pytest.raises(InconsistentError, match="epoch is 4 in"):
        Checkpoint.open(tmp_path / "x")


def unstamped(directory: Path, **meta: Any) -> Path:
    for suffix in (".safetensors", ".extra_state.pt"):
        shutil.copy(GOLDEN / f"trio_v2_unstamped{suffix}", directory / f"x{suffix}")
    (directory / "x.meta.json").write_text(json.dumps(meta))
    return directory / "x"


def test_metadata_without_any_key_has_the_documented_defaults(tmp_path: Path) -> None:
    meta = TrioCheckpoint(unstamped(tmp_path)).meta
    assert (meta.epoch, meta.loss, meta.format_version) == (0, None, "2.0")
    assert str(meta.best_loss) == "inf"
    assert {"epoch", "loss", "best_loss", "model_config", "save_id"} <= meta.defaulted


@pytest.mark.case("C1.8")
def test_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    path = unstamped(tmp_path, format_version="3.0", epoch=1)
    with pytest.raises(UnsupportedVersionError, match=r"x\.meta\.json: .* version 3\.0"):
        Checkpoint.open(path)


def test_keys_that_are_not_known_are_kept(tmp_path: Path) -> None:
    payload = TrioCheckpoint(unstamped(tmp_path, epoch=1, format_version="2.1", note="x")).payload()
    assert payload.metadata["note"] == "x"


@pytest.mark.case("C1.4")
@pytest.mark.parametrize("suffix", [".safetensors", ".meta.json", ".extra_state.pt"])
@pytest.mark.parametrize("damage", ["empty", "cut", "garbage"])
def test_all_damage_is_of_one_family_and_names_the_file(
    tmp_path: Path, suffix: str, damage: str
) -> None:
    write_trio(tmp_path, ["latest"], content())
    path = tmp_path / f"latest{suffix}"
    raw = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": raw[: len(raw) // 2], "garbage": b"\x93" * 99}[damage])
    with pytest.raises(DamagedError, match=rf"latest\{suffix}"):
        TrioCheckpoint(tmp_path / "latest").payload()


@pytest.mark.parametrize("text", ["[]", "3", '{"epoch": 1, "epoch": 2}', '{"a": [NaN', "{}x"])
def test_metadata_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = unstamped(tmp_path)
    (tmp_path / "x.meta.json").write_text(text)
    with pytest.raises(FormatError, match=r"x\.meta\.json"):
        Checkpoint.open(path)


def test_a_training_state_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    path = unstamped(tmp_path, epoch=1)
    torch.save([1], tmp_path / "x.extra_state.pt")
    with pytest.raises(FormatError, match="holds a list"):
        TrioCheckpoint(path).training_state()


def test_a_name_that_is_close_is_suggested(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest"], content())
    with pytest.raises(NotFoundError, match="close: w"):
        TrioCheckpoint(tmp_path / "latest").read("ww")
