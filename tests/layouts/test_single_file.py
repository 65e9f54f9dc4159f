"""One `.pt`: written whole or not at all, read lazily, every byte of it checked."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from milepost.checkpointing import load_checkpoint, save_checkpoint
from milepost.errors import (
    DamagedError,
    ExistsError,
    InvalidInputError,
    NotFoundError,
    StorageError,
    UnencodableError,
)
from milepost.layouts.checkpoint import Checkpoint, Layout, Severity
from milepost.layouts.single_file import SingleFileCheckpoint, write_single_file
from milepost.layouts.trio import TrioContent, find_trio, write_trio
from milepost.storage import fileops

STATE = OrderedDict({"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def hidden(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith(".")]


def test_torch_reads_what_was_written(tmp_path: Path) -> None:
    write_single_file(tmp_path / "x.pt", STATE, {"lr": 0.1}, {"step": 3, "config": {"d": 8}})
    read = torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(read) == ["model_state", "optimizer", "metadata", "step", "config"]
    assert read["optimizer"] == {"lr": 0.1}
    assert read["metadata"] == {"step": 3, "config": {"d": 8}}
    assert (read["step"], read["config"]) == (3, {"d": 8})
    assert torch.equal(read["model_state"]["w"], STATE["w"])
    assert hidden(tmp_path) == []


def test_there_is_no_optimizer_where_none_was_given(tmp_path: Path) -> None:
    write_single_file(tmp_path / "x.pt", STATE)
    assert list(torch.load(tmp_path / "x.pt", weights_only=True)) == ["model_state", "metadata"]
    checkpoint = Checkpoint.open(tmp_path / "x.pt")
    assert checkpoint.layout is Layout.SINGLE_FILE
    assert checkpoint.training_state() == {}


def test_parents_are_created(tmp_path: Path) -> None:
    write_single_file(tmp_path / "a" / "b" / "x.pt", STATE)
    assert Checkpoint.open(tmp_path / "a" / "b" / "x.pt").verify().ok


def test_tensors_and_slices_are_read_without_the_rest(tmp_path: Path) -> None:
    write_single_file(tmp_path / "x.pt", STATE, {"state": {0: {"exp_avg": torch.ones(2)}}})
    checkpoint = SingleFileCheckpoint(tmp_path / "x.pt")
    assert torch.equal(checkpoint.read("w", [slice(1, 2), slice(-2, None)]), STATE["w"][1:2, -2:])
    assert torch.equal(checkpoint.read("b"), STATE["b"])
    assert set(checkpoint.read_weights(["b"])) == {"b"}
    assert checkpoint.tensors()["w"].shape == (2, 3)
    assert list(checkpoint.state_tensors()) == ["optimizer_state.state.0.exp_avg"]
    with pytest.raises(NotFoundError, match="close: w"):
        checkpoint.read("ww")
    with pytest.raises(InvalidInputError, match="step must be 1"):
        checkpoint.read("w", [slice(0, 2, 2)])


@pytest.mark.case("C4.21")
@pytest.mark.case("C7.32")
def test_ties_and_versions_of_modules_survive(tmp_path: Path) -> None:
    model = Tied()
    state = model.state_dict()
    write_single_file(tmp_path / "x.pt", state)
    checkpoint = SingleFileCheckpoint(tmp_path / "x.pt")
    assert checkpoint.tied == {"head.weight": "embed.weight"}
    assert "head.weight" not in checkpoint.tensors()
    weights = checkpoint.read_weights()
    assert weights["head.weight"] is weights["embed.weight"]
    loaded = checkpoint.payload().model_state
    assert loaded["head.weight"] is loaded["embed.weight"]
    assert isinstance(loaded, OrderedDict)
    assert loaded._metadata == state._metadata  # type: ignore[attr-defined]
    Tied().load_state_dict(loaded)


@pytest.mark.case("C7.32")
def test_segments_of_compiled_modules_are_taken_off_when_saving(tmp_path: Path) -> None:
    state = OrderedDict({"_orig_mod.a": torch.ones(1), "b._orig_mod.c": torch.zeros(1)})
    write_single_file(tmp_path / "x.pt", state)
    assert list(torch.load(tmp_path / "x.pt", weights_only=True)["model_state"]) == ["a", "b.c"]


@pytest.mark.case("C7.32")
def test_names_that_would_become_one_are_refused(tmp_path: Path) -> None:
    state = {"_orig_mod.a": torch.ones(1), "a": torch.zeros(1)}
    with pytest.raises(InvalidInputError, match=r"_orig_mod\.a and a"):
        write_single_file(tmp_path / "x.pt", state)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("C7.33")
@pytest.mark.parametrize("key", ["optimizer", "metadata", "model_state"])
def test_metadata_under_a_name_of_the_file_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(InvalidInputError, match=f"metadata '{key}'"):
        write_single_file(tmp_path / "x.pt", STATE, None, {key: "adamw"})


@pytest.mark.case("C7.34")
def test_a_view_is_saved_without_its_base(tmp_path: Path) -> None:
    base = torch.randn(1000, 1000)
    write_single_file(tmp_path / "x.pt", {"w": base[:1, :1000]})
    assert (tmp_path / "x.pt").stat().st_size < 10_000
    assert torch.equal(SingleFileCheckpoint(tmp_path / "x.pt").read("w"), base[:1])


class MoEConfig:
    num_experts = 4


@pytest.mark.case("C7.31")
@pytest.mark.parametrize("value", [MoEConfig(), Path("runs"), torch.nn.Linear(1, 1)])
def test_what_could_not_be_loaded_back_is_refused_by_its_key(tmp_path: Path, value: Any) -> None:
    save_checkpoint(tmp_path / "x.pt", STATE, step=1)
    with pytest.raises(UnencodableError, match=r"metadata\.config\.moe_config") as caught:
        save_checkpoint(tmp_path / "x.pt", STATE, config={"moe_config": value})
    assert caught.value.key == "metadata.config.moe_config"
    assert load_checkpoint(tmp_path / "x.pt")["step"] == 1


class Failing:
    """A hook that lets `left` operations pass and makes the next one fail."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __call__(
        self, operation: str, target: str, function: Any, arguments: tuple[Any, ...]
    ) -> Any:
        self.left -= 1
        if self.left == -1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*arguments)


@pytest.mark.case("C7.30")
@pytest.mark.parametrize("with_trio", [False, True])
def test_an_error_at_any_operation_leaves_the_old_file_or_the_new(
    tmp_path: Path, with_trio: bool
) -> None:
    for number in range(100):
        directory = tmp_path / str(number)
        if with_trio:
            write_trio(directory, ["x"], TrioContent(model_state=STATE, step=1))
        else:
            save_checkpoint(directory / "x.pt", STATE, step=1)
        failing = Failing(number)
        failed = False
        with fileops.hooked(failing):
            try:
                save_checkpoint(directory / "x.pt", STATE, step=2)
            except StorageError:
                failed = True
        assert load_checkpoint(directory / "x.pt")["step"] in ((1, 2) if failed else (2,))
        save_checkpoint(directory / "x.pt", STATE, step=3)
        assert load_checkpoint(directory / "x.pt")["step"] == 3
        assert [name for name in hidden(directory) if name != ".milepost.lock"] == []
        if failing.left >= 0:
            assert number > 5
            return
    raise AssertionError("a save has fewer operations than that")


def test_what_a_dead_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from milepost.storage import fileops\n"
        "from milepost.layouts.single_file import write_single_file\n"
        "def hook(operation, target, function, arguments):\n"
        "    if operation == 'rename': os._exit(7)\n"
        "    return function(*arguments)\n"
        "with fileops.hooked(hook): write_single_file(sys.argv[1], {}, None, {'step': 1})\n"
    )
    target = tmp_path / "x.pt"
    result = subprocess.run([sys.executable, "-c", script, str(target)], check=False)
    assert result.returncode == 7
    assert len(hidden(tmp_path)) == 1
    (tmp_path / ".x.pt.milepost-01234567-1-1-01234567.tmp").write_bytes(b"of another host")
    write_single_file(target, STATE)
    assert hidden(tmp_path) == [".x.pt.milepost-01234567-1-1-01234567.tmp"]


def test_a_trio_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    write_trio(tmp_path, ["x"], TrioContent(model_state=STATE, step=1))
    save_checkpoint(tmp_path / "x.pt", STATE, step=2)
    assert find_trio(tmp_path / "x.pt") is None
    assert not (tmp_path / "x.safetensors").exists()
    assert load_checkpoint(tmp_path / "x.pt")["step"] == 2


def test_weights_of_another_program_beside_it_are_left_alone(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "x.safetensors")
    save_checkpoint(tmp_path / "x.pt", STATE, step=2)
    assert (tmp_path / "x.safetensors").exists()
    assert load_checkpoint(tmp_path / "x.pt")["step"] == 2


@pytest.mark.parametrize("name", ["x.safetensors", "x.meta.json", "x.extra_state.pt"])
def test_a_name_of_a_trio_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match="three-file"):
        write_single_file(tmp_path / name, STATE)


def test_a_directory_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "x.pt").mkdir()
    with pytest.raises(ExistsError):
        write_single_file(tmp_path / "x.pt", STATE)


@pytest.mark.case("C1.1")
def test_every_flipped_byte_is_found_and_refused_at_load(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    write_single_file(path, STATE, {"lr": 0.1}, {"step": 3})
    raw = path.read_bytes()
    for place in range(0, len(raw), 5):
        changed = bytearray(raw)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        with pytest.raises(DamagedError, match=r"x\.pt"):
            SingleFileCheckpoint(path).payload()
    at = raw.index(b"".join(t.numpy().tobytes() for t in [STATE["w"]]))
    changed = bytearray(raw)
    changed[at + 7] ^= 1
    path.write_bytes(changed)
    report = SingleFileCheckpoint(path).verify()
    assert report.has_digests and not report.ok
    assert "model_state.w" in {problem.tensor for problem in report.problems}
    assert {problem.file for problem in report.problems} == {"x.pt"}


@pytest.mark.case("C1.4")
@pytest.mark.parametrize("damage", ["empty", "cut", "garbage"])
def test_damage_is_of_one_family_and_names_the_file(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "x.pt"
    write_single_file(path, STATE)
    raw = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": raw[: len(raw) // 2], "garbage": b"\x93" * 99}[damage])
    with pytest.raises(DamagedError, match=r"x\.pt"):
        load_checkpoint(path)


def test_a_file_of_torch_has_checksums_but_no_digest(tmp_path: Path) -> None:
    torch.save({"model_state": dict(STATE), "metadata": {}}, tmp_path / "x.pt")
    report = SingleFileCheckpoint(tmp_path / "x.pt").verify()
    assert report.ok and not report.has_digests
    assert [problem.severity for problem in report.problems] == [Severity.WARNING]


def test_a_handle_goes_on_reading_what_it_opened(tmp_path: Path) -> None:
    write_single_file(tmp_path / "x.pt", {"w": torch.ones(2)})
    checkpoint = SingleFileCheckpoint(tmp_path / "x.pt")
    write_single_file(tmp_path / "x.pt", {"w": torch.zeros(2)})
    assert torch.equal(checkpoint.read("w"), torch.ones(2))


def test_listing_needs_no_torch(tmp_path: Path) -> None:
    write_single_file(tmp_path / "x.pt", STATE, {"a": torch.ones(1)}, {"step": 3})
    script = (
        "import sys; from milepost.layouts.checkpoint import Checkpoint\n"
        "c = Checkpoint.open(sys.argv[1])\n"
        "assert c.info.step == 3 and c.tensors() and c.state_tensors() and c.verify().ok\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "x.pt")], check=True)
