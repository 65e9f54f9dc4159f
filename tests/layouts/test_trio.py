"""Trios: what is written is the split layout to the letter, and comes back bit by bit."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file
from torch import nn

from milepost.errors import InvalidInputError, NoSpaceError, UnencodableError
from milepost.layouts.checkpoint import Checkpoint, Layout
from milepost.layouts.trio import (
    StaleFile,
    TrioCheckpoint,
    TrioContent,
    find_trio,
    remove_trio,
    trio_names,
    write_trio,
)
from milepost.storage import fileops

CONFIG = {"hidden_size": 8, "num_layers": 2, "name": "tiny"}


class Tied(nn.Module):
    """A model with tied weights, a buffer, and extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.seen = {"steps": 3}

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.seen)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.head(model.norm(model.embed(torch.arange(4)))).sum().backward()
    optimizer.step()
    return model, optimizer


def content(epoch: int = 2, **changes: Any) -> TrioContent:
    model, optimizer = trained()
    given: dict[str, Any] = {
        "model_state": model.state_dict(),
        "optimizer_state": optimizer.state_dict(),
        "extra_state": {"cursor": {"line": 7}},
        "epoch": epoch,
        "loss": 0.5,
        "best_loss": 0.25,
        "model_config": CONFIG,
    }
    return TrioContent(**given | changes)


def meta_of(directory: Path, name: str) -> dict[str, Any]:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} in the document")

    text = (directory / f"{name}.meta.json").read_text()
    document: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return document


def test_the_three_files_have_the_keys_of_the_split_layout(tmp_path: Path) -> None:
    written = write_trio(tmp_path, ["latest"], content())
    visible = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert visible == sorted(trio_names("latest"))
    meta = meta_of(tmp_path, "latest")
    assert (tmp_path / "latest.meta.json").read_text().startswith('{\n  "best_loss": 0.25,\n')
    assert list(meta) == sorted(meta)
    assert {k: meta[k] for k in meta if k not in ("milepost", "self_digest")} == {
        "best_loss": 0.25,
        "epoch": 2,
        "format_version": "2.0",
        "loss": 0.5,
        "model_config": CONFIG,
        "save_id": written.save_id,
    }
    state = torch.load(tmp_path / "latest.extra_state.pt", weights_only=True)
    assert {k: state[k] for k in ("scheduler_state", "scaler_state", "save_id", "epoch")} == {
        "scheduler_state": None,
        "scaler_state": None,
        "save_id": written.save_id,
        "epoch": 2,
    }
    assert {"optimizer_state", "extra_state"} <= set(state)
    with safetensors.safe_open(tmp_path / "latest.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "save_id": written.save_id, "epoch": "2"}


def test_safetensors_reads_the_weights_bit_by_bit(tmp_path: Path) -> None:
    given = content()
    write_trio(tmp_path, ["latest"], given)
    read = load_file(tmp_path / "latest.safetensors")
    assert set(read) == set(given.model_state) - {"head.weight", "_extra_state"}
    for name, tensor in read.items():
        assert tensor.dtype == given.model_state[name].dtype
        assert torch.equal(tensor, given.model_state[name])


@pytest.mark.case("C2.14")
def test_everything_comes_back_extra_state_of_modules_included(tmp_path: Path) -> None:
    model, optimizer = trained()
    given = content(model_state=model.state_dict(), optimizer_state=optimizer.state_dict())
    write_trio(tmp_path, ["latest"], given)
    payload = TrioCheckpoint(tmp_path / "latest").payload()
    fresh = Tied()
    fresh.seen = {}
    fresh.load_state_dict(payload.model_state)
    assert fresh.seen == {"steps": 3}
    for name, value in given.model_state.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(payload.model_state[name], value)
    again = torch.optim.AdamW(fresh.parameters())
    again.load_state_dict(payload.optimizer_state)
    assert again.param_groups[0]["lr"] == 0.01
    assert payload.extra_state == {"cursor": {"line": 7}}
    assert payload.epoch == 2
    assert payload.model_state._metadata == given.model_state._metadata  # type: ignore[attr-defined]


@pytest.mark.case("C4.21")
def test_tied_tensors_are_stored_once_and_come_back_as_one(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest"], content())
    checkpoint = TrioCheckpoint(tmp_path / "latest")
    assert checkpoint.tied == {"head.weight": "embed.weight"}
    assert meta_of(tmp_path, "latest")["milepost"]["tied"] == {"head.weight": "embed.weight"}
    weights = checkpoint.read_weights()
    assert weights["head.weight"] is weights["embed.weight"]
    assert torch.equal(checkpoint.read("head.weight", [slice(2, 4)]), weights["embed.weight"][2:4])


@pytest.mark.case("C4.19")
def test_further_names_cost_no_second_write(tmp_path: Path) -> None:
    written: list[str] = []

    def count(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if operation == "write":
            written.append(target)
        return function(*arguments)

    with fileops.hooked(count):
        report = write_trio(tmp_path, ["latest", "best", "epoch_3"], content())
    assert report.linked
    assert len({name for name in written if name.endswith(".safetensors")}) == 1
    for suffix in (".safetensors", ".meta.json", ".extra_state.pt"):
        files = [tmp_path / f"{name}{suffix}" for name in ("latest", "best", "epoch_3")]
        assert len({path.stat().st_ino for path in files}) == 1
        assert {path.stat().st_mode & 0o777 for path in files} == {0o444}
    assert Checkpoint.open(tmp_path / "best").verify().ok


def test_a_single_name_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_trio(tmp_path, ["latest"], content())
    finally:
        os.umask(before)
    modes = {(tmp_path / name).stat().st_mode & 0o777 for name in trio_names("latest")}
    assert modes == {0o640}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK])
def test_where_links_are_refused_files_are_copied(tmp_path: Path, number: int) -> None:
    def refuse(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if operation == "link":
            raise OSError(number, os.strerror(number))
        return function(*arguments)

    with fileops.hooked(refuse):
        report = write_trio(tmp_path, ["latest", "best"], content())
    assert not report.linked
    assert (tmp_path / "best.safetensors").stat().st_nlink == 1
    for name in ("latest", "best"):
        assert TrioCheckpoint(tmp_path / name).verify().ok


def test_a_stale_file_of_the_same_name_goes_in_the_same_change(tmp_path: Path) -> None:
    torch.save({"model_state": {}, "epoch": 9, "best_loss": 1.0}, tmp_path / "latest.pt")
    write_trio(tmp_path, ["latest", "best"], content())
    assert not (tmp_path / "latest.pt").exists()


def test_a_stale_file_is_kept_when_asked(tmp_path: Path) -> None:
    torch.save({"model_state": {}, "epoch": 9, "best_loss": 1.0}, tmp_path / "latest.pt")
    write_trio(tmp_path, ["latest"], content(), stale=StaleFile.KEEP)
    assert (tmp_path / "latest.pt").exists()
    assert Checkpoint.open(tmp_path / "latest.pt").layout is Layout.TRIO


def test_removing_a_trio_removes_all_its_files_and_no_others(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest", "epoch_1"], content())
    torch.save({}, tmp_path / "epoch_1.pt")
    removed = remove_trio(tmp_path, ["epoch_1", "epoch_0"])
    assert sorted(removed) == sorted([*trio_names("epoch_1"), "epoch_1.pt"])
    assert find_trio(tmp_path / "epoch_1") is None
    assert TrioCheckpoint(tmp_path / "latest").verify().ok


def test_a_new_save_replaces_the_old_one_under_each_name(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest", "best"], content(epoch=1))
    write_trio(tmp_path, ["latest"], content(epoch=2))
    assert TrioCheckpoint(tmp_path / "latest").info.epoch == 2
    assert TrioCheckpoint(tmp_path / "best").info.epoch == 1
    assert TrioCheckpoint(tmp_path / "best").verify().ok


@pytest.mark.case("C3.15")
@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan, torch.tensor(math.nan)])
def test_a_loss_that_is_not_finite_is_strict_json_and_comes_back(tmp_path: Path, loss: Any) -> None:
    write_trio(tmp_path, ["latest"], content(loss=loss, best_loss=math.inf))
    meta = meta_of(tmp_path, "latest")
    assert meta["loss"] is None and meta["best_loss"] is None
    read = TrioCheckpoint(tmp_path / "latest").meta
    assert read.loss is not None and str(read.loss) == str(float(loss))
    assert read.best_loss == math.inf


@pytest.mark.case("C3.15")
def test_a_tensor_for_a_loss_is_a_number(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest"], content(loss=torch.tensor(0.5), metrics={"x": torch.ones(1)}))
    assert meta_of(tmp_path, "latest")["loss"] == 0.5
    assert TrioCheckpoint(tmp_path / "latest").info.metrics == {"x": 1.0}


@pytest.mark.case("C3.15")
def test_a_configuration_keeps_the_types_that_json_lacks(tmp_path: Path) -> None:
    config = {"betas": (0.9, 0.95), "layers": {0: "a"}, "root": Path("x"), "plain": [1, {"a": "b"}]}
    write_trio(tmp_path, ["latest"], content(model_config=config))
    assert TrioCheckpoint(tmp_path / "latest").info.model_config == config
    assert meta_of(tmp_path, "latest")["model_config"]["plain"] == [1, {"a": "b"}]


class Custom:
    pass


@pytest.mark.case("C1.5")
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"extra_state": {"rng": {"numpy": np.random.default_rng(0)}}}, "extra_state.rng.numpy"),
        ({"extra_state": {"np": np.random.get_state()}}, "extra_state.np"),
        ({"extra_state": {"path": Path("x")}}, "extra_state.path"),
        ({"extra_state": {"rng": random.Random(0)}}, "extra_state.rng"),
        ({"optimizer_state": {"hook": Custom()}}, "optimizer_state.hook"),
        ({"model_config": {"moe": Custom()}}, "model_config.moe"),
        ({"metrics": {"custom": Custom()}}, "metrics.custom"),
        ({"model_state": {"w": torch.empty(2, device="meta")}}, "model_state.w"),
        ({"model_state": {"w": torch.ones(2).to_sparse()}}, "model_state.w"),
        ({"model_state": {"w": torch.ones(2, dtype=torch.complex128)}}, "model_state.w"),
    ],
)
def test_what_could_not_be_loaded_back_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    with pytest.raises(UnencodableError) as caught:
        write_trio(tmp_path, ["latest"], content(**changes))
    assert caught.value.key.startswith(key)
    assert key in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("field", ["loss", "best_loss", "epoch"])
def test_a_number_that_is_none_is_refused_by_its_name(tmp_path: Path, field: str) -> None:
    with pytest.raises(InvalidInputError, match=field):
        write_trio(tmp_path, ["latest"], content(**dict[str, Any]({field: "high"})))


@pytest.mark.parametrize(
    "name", ["", "a/b", ".hidden", "latest.pt", "x.safetensors", "x.meta.json"]
)
def test_names_that_are_no_stems_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError):
        write_trio(tmp_path, [name], content())


def test_names_must_be_given_once_each(tmp_path: Path) -> None:
    for names in ([], ["latest", "latest"]):
        with pytest.raises(InvalidInputError, match="each once"):
            write_trio(tmp_path, names, content())


@pytest.mark.case("C7.34")
def test_every_kind_of_tensor_is_written_as_it_is(tmp_path: Path) -> None:
    base = torch.arange(4096.0).view(64, 64)
    state = {
        "view": base[3:5],
        "column": base[:, 7],
        "transposed": base.T,
        "expanded": torch.ones(1, 3).expand(4, 3),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3),
        "bf16": torch.randn(5).bfloat16(),
        "bool": torch.tensor([True, False]),
        "f8": torch.randn(4).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.ones(2)),
    }
    write_trio(tmp_path, ["latest"], TrioContent(model_state=state))
    checkpoint = TrioCheckpoint(tmp_path / "latest")
    read = checkpoint.read_weights()
    oracle = load_file(tmp_path / "latest.safetensors")
    for name, tensor in state.items():
        expected = tensor.detach().resolve_conj().contiguous()
        for found in (read[name], oracle[name]):
            assert found.dtype == expected.dtype and found.shape == expected.shape
            assert torch.equal(
                found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
            )
    assert (tmp_path / "latest.safetensors").stat().st_size < 40_000
    assert checkpoint.verify().ok


def test_names_of_a_compiled_model_are_plain(tmp_path: Path) -> None:
    state = OrderedDict({"_orig_mod.a": torch.ones(1), "b._orig_mod.c": torch.zeros(1)})
    write_trio(tmp_path, ["latest"], TrioContent(model_state=state))
    assert set(load_file(tmp_path / "latest.safetensors")) == {"a", "b.c"}


def test_a_compiled_name_in_an_older_file_is_read_under_its_plain_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"_orig_mod.w": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / "x.meta.json").write_text(json.dumps({"format_version": "2.0", "epoch": 1}))
    torch.save({"optimizer_state": None}, tmp_path / "x.extra_state.pt")
    checkpoint = TrioCheckpoint(tmp_path / "x")
    assert set(checkpoint.tensors()) == {"w"}
    assert torch.equal(checkpoint.read("w"), torch.ones(2))
    assert checkpoint.payload().stored_names == {"w": "_orig_mod.w"}


def test_a_full_disk_is_found_before_a_byte_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trio(tmp_path, ["latest"], content(epoch=1))
    full = os.statvfs_result((4096, 4096, 1000, 1, 1, 100, 100, 100, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(NoSpaceError, match=r"has .* free"):
        write_trio(tmp_path, ["latest"], content(epoch=2))
    assert TrioCheckpoint(tmp_path / "latest").info.epoch == 1
    assert not [path for path in tmp_path.iterdir() if "trio" in path.name]


def test_metadata_and_listing_need_no_torch(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest"], content())
    script = (
        "import sys; from milepost.layouts.checkpoint import Checkpoint\n"
        "c = Checkpoint.open(sys.argv[1])\n"
        "assert c.info.epoch == 2 and c.tensors() and c.state_tensors() and c.files()\n"
        "assert c.verify().ok, c.verify()\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "latest")], check=True)


def test_weights_are_read_without_opening_the_training_state(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest"], content())
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    checkpoint = TrioCheckpoint(tmp_path / "latest")
    checkpoint.read_weights()
    ours = [name for name in opened if name.startswith(str(tmp_path))]
    assert any(name.endswith(".safetensors") for name in ours)
    assert not any(name.endswith(".pt") for name in ours)
