"""What `save` refuses, before anything is touched, and what a failing disk leaves behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import milepost as mp
from milepost.errors import (
    ExistsError,
    InvalidInputError,
    NoSpaceError,
    RunInUseError,
    StorageError,
    UnencodableError,
    UnsupportedVersionError,
)
from milepost.storage import fileops
from milepost.storage.lease import LOCK_NAME, Owner
from milepost.storage.space import free_nbytes
from tests.directories import opened, reseal
from tests.states import same, snapshot, training


def refused(
    tmp_path: Path,
    error: type[Exception],
    message: str,
    state: dict[str, Any] | None = None,
    *,
    name: str = "checkpoint-1",
    **arguments: Any,
) -> BaseException:
    """The save is refused with the message, and neither disk nor live state has changed."""
    live = training(steps=1)
    wanted = live if state is None else {**live, **state}
    before = snapshot(live)
    with pytest.raises(error, match=message) as caught:
        mp.save(tmp_path / "run" / name, wanted, **{"step": 1, **arguments})
    assert not (tmp_path / "run").exists()
    assert same(snapshot(live), before)
    return caught.value


# Arguments.


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None])
def test_a_step_that_is_none_is_refused(step: Any, tmp_path: Path) -> None:
    refused(tmp_path, InvalidInputError, r"step=.*: expected an integer from 0 up", step=step)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("checkpoint-2", r"the name says step 2, step=1 was given; save to .*checkpoint-1 or"),
        ("checkpoint-01", r"no run would list it under that name; save to .*checkpoint-1$"),
        ("checkpoint-\u0661", r"no run would list it under that name"),
        ("..", r"name the checkpoint's own directory, checkpoint-1"),
    ],
)
def test_a_name_that_disagrees_with_the_step_is_refused(
    name: str, message: str, tmp_path: Path
) -> None:
    refused(tmp_path, InvalidInputError, message, name=name)


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": "low"},
        {"loss": None},
        {"loss": True},
        {"loss": torch.zeros(2)},
        {"loss": [0.5]},
        {"loss": 2**70},
        {1: 0.5},
    ],
    ids=str,
)
def test_a_metric_that_is_no_number_is_refused_by_name(
    metrics: dict[Any, Any], tmp_path: Path
) -> None:
    refused(tmp_path, InvalidInputError, r"metrics", metrics=metrics)


@pytest.mark.parametrize("epoch", [float("nan"), float("inf"), -1, "1", True])
def test_an_epoch_that_is_no_number_from_0_up_is_refused(epoch: Any, tmp_path: Path) -> None:
    refused(tmp_path, InvalidInputError, r"epoch", epoch=epoch)


@pytest.mark.parametrize("size", ["", "5 apples", 0, "-1GB"])
def test_a_size_limit_that_means_nothing_is_refused(size: Any, tmp_path: Path) -> None:
    refused(tmp_path, InvalidInputError, r"size", max_shard_size=size)


def test_a_model_config_that_cannot_be_stored_is_refused_by_its_place(tmp_path: Path) -> None:
    config = {"layers": [{"activation": object()}]}
    refused(tmp_path, UnencodableError, r"model_config\.layers.*activation", model_config=config)


# The state.


@pytest.mark.parametrize(
    "key", ["", "a.b", "a/b", "..", "1st", "training", "state", "rng", "naïve", " x", 7, None]
)
def test_a_key_that_cannot_name_a_file_is_refused(key: Any, tmp_path: Path) -> None:
    refused(tmp_path, InvalidInputError, r"the key .* cannot be used", {key: {}})


@pytest.mark.parametrize("state", [{}, None, [], nn.Linear(1, 1)])
def test_a_state_that_is_no_mapping_of_objects_is_refused(state: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"state: expected a mapping"):
        mp.save(tmp_path / "run" / "checkpoint-1", state, step=1)
    assert not (tmp_path / "run").exists()


def test_of_several_models_the_one_at_the_root_must_be_named(tmp_path: Path) -> None:
    models = {"actor": nn.Linear(1, 1), "critic": nn.Linear(1, 1)}
    with pytest.raises(InvalidInputError, match=r"2 models \(actor, critic\) .* primary="):
        mp.save(tmp_path / "run" / "checkpoint-1", models, step=1)
    with pytest.raises(InvalidInputError, match=r"primary='judge' is no model of the state"):
        mp.save(tmp_path / "run" / "checkpoint-1", models, step=1, primary="judge")
    assert not (tmp_path / "run").exists()


class Custom:
    pass


@pytest.mark.case("V09")
@pytest.mark.case("C1.5")
@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"deep": [1, {"object": Custom()}]}, r"extra\.deep.*object"),
        (Custom(), r"extra"),
        ({"f": len}, r"extra\.f"),
        ({"model": nn.Linear}, r"extra\.model"),
        ({"t": torch.eye(2).to_sparse()}, r"extra\.t"),
        ({"t": torch.zeros(1, dtype=torch.complex128)}, r"extra"),
        ({"t": torch.zeros(1, device="meta")}, r"extra\.t"),
    ],
)
def test_a_value_that_could_not_be_loaded_back_is_refused_by_its_place(
    value: Any, place: str, tmp_path: Path
) -> None:
    refused(tmp_path, UnencodableError, place, {"extra": value})


def test_a_stateful_whose_state_cannot_be_stored_is_refused_by_its_place(tmp_path: Path) -> None:
    class Loader:
        def state_dict(self) -> dict[str, Any]:
            return {"worker": {"handle": Custom()}}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    refused(tmp_path, UnencodableError, r"loader\.worker.*handle", {"loader": Loader()})


@pytest.mark.case("V05")
def test_a_weight_whose_type_the_container_lacks_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    error = refused(
        tmp_path, UnencodableError, r"phases: .* torch\.complex128 .*view_as_real", {"ema": model}
    )
    assert isinstance(error, UnencodableError) and error.key == "phases"


def test_weights_without_values_are_refused_by_name(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    refused(tmp_path, InvalidInputError, r"2 of 2 .* no values to save: weight", {"ema": model})


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    stray = torch.optim.SGD(nn.Linear(3, 3).parameters())
    refused(tmp_path, InvalidInputError, r"stray: 2 parameters cannot be named", {"stray": stray})


def test_an_error_of_an_object_that_is_asked_for_its_state_passes_through(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("ask later")

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    refused(tmp_path, RuntimeError, "ask later", {"broken": Broken()})


# The target.


@pytest.mark.parametrize("kind", ["a directory", "an empty directory", "a file"])
def test_what_is_no_checkpoint_and_has_no_checkpoints_name_is_never_touched(
    kind: str, tmp_path: Path
) -> None:
    target = tmp_path / "thesis"
    if kind == "a file":
        target.write_text("precious")
    else:
        target.mkdir()
        if kind == "a directory":
            (target / "chapter").write_text("precious")
    for on_existing in mp.OnExisting:
        with pytest.raises(ExistsError, match=r"thesis: something is there that is no checkpoint"):
            mp.save(target, training(), step=1, on_existing=on_existing)
    assert os.listdir(tmp_path) == ["thesis"]


@pytest.mark.parametrize("on_existing", list(mp.OnExisting))
def test_a_checkpoint_of_a_newer_version_is_never_replaced_or_moved(
    on_existing: mp.OnExisting, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint-1"
    mp.save(path, training(), step=1)
    reseal(path, lambda document: document.update(format_version="2.0"))
    raw = (path / "milepost.json").read_bytes()
    with pytest.raises(UnsupportedVersionError, match=r"written in format version 2\.0"):
        mp.save(path, training(), step=1, on_existing=on_existing)
    assert (path / "milepost.json").read_bytes() == raw


def test_a_run_that_another_host_writes_into_is_refused(tmp_path: Path) -> None:
    owner = Owner(host="another-host", boot_id="x", pid=1, start="1")
    (tmp_path / LOCK_NAME).write_bytes(owner.to_bytes())
    with pytest.raises(RunInUseError, match=r"process 1 on another-host"):
        mp.save(tmp_path / "checkpoint-1", training(), step=1)
    assert os.listdir(tmp_path) == [LOCK_NAME]


# The disk.


def failing(operation: str, number: int, when: Callable[[str], bool]) -> fileops.Hook:
    def hook(name: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if name == operation and when(target):
            raise OSError(number, os.strerror(number), target)
        return function(*arguments)

    return hook


@pytest.mark.case("V06")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize(
    ("operation", "place"),
    [
        ("mkdir", "staging"),
        ("open", "model.safetensors"),
        ("reserve", "optimizer.safetensors"),
        ("write", "state.json"),
        ("fsync", "model.safetensors"),
        ("write", "milepost.json"),
        ("fsync-directory", "staging"),
        ("rename", "checkpoint-2"),
    ],
)
def test_a_disk_that_fails_anywhere_leaves_the_earlier_checkpoint_and_nothing_else(
    operation: str, place: str, number: int, tmp_path: Path
) -> None:
    first = tmp_path / "checkpoint-1"
    state = training(steps=1)
    mp.save(first, state, step=1)
    hook = failing(operation, number, lambda target: place in target)
    with fileops.hooked(hook), pytest.raises(StorageError) as caught:
        mp.save(tmp_path / "checkpoint-2", state, step=2)
    assert caught.value.errno in (number, errno.ENOSPC)
    is_full = number in (errno.ENOSPC, errno.EDQUOT)
    assert isinstance(caught.value, NoSpaceError) == is_full
    assert "earlier checkpoints are untouched" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == [LOCK_NAME, "checkpoint-1"]
    assert opened(first).verify().problems == ()
    mp.save(tmp_path / "checkpoint-2", state, step=2)


def test_a_state_that_cannot_fit_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    model = nn.Module()
    huge = torch.empty(1, dtype=torch.uint8).expand(2 * free_nbytes(tmp_path))
    model.register_buffer("huge", huge)
    written: list[str] = []

    def hook(name: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if name in ("write", "reserve") and "safetensors" in target:
            written.append(target)
            raise AssertionError(f"{name} of {target}")
        return function(*arguments)

    with fileops.hooked(hook), pytest.raises(NoSpaceError, match=r"milepost prune") as caught:
        mp.save(tmp_path / "checkpoint-1", {"model": model}, step=1)
    assert caught.value.needed_nbytes is not None
    assert caught.value.needed_nbytes > huge.numel()
    assert written == []
    assert os.listdir(tmp_path) == [LOCK_NAME]


def test_a_run_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file"):
        mp.save(tmp_path / "file" / "checkpoint-1", training(), step=1)
