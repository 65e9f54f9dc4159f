"""A save of a trio that ends at any instant leaves the old checkpoints or the new ones."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.checkpointing import load_checkpoint
from milepost.errors import ReplacedError, RunInUseError, StorageError
from milepost.layouts.trio import TrioCheckpoint, TrioContent, find_trio, remove_trio, write_trio
from milepost.storage import fileops
from milepost.storage.intent import INTENT_NAME
from milepost.storage.lease import RunLease

NAMES = ["latest", "best", "epoch_2"]
Operation = Callable[[Path], object]


def content(epoch: int) -> TrioContent:
    state = {"w": torch.full((8,), float(epoch)), "b": torch.ones(2, dtype=torch.int8)}
    return TrioContent(model_state=state, optimizer_state={"lr": 0.1 * epoch}, epoch=epoch)


def prepare(directory: Path) -> None:
    """A run with an older save under two of the names, and a stale `.pt` under the third."""
    write_trio(directory, ["latest", "best"], content(1))
    stale = {"model_state": {"w": torch.ones(8)}, "optimizer_state": None, "epoch": 0}
    torch.save(stale, directory / "epoch_2.pt")


def save(directory: Path) -> object:
    return write_trio(directory, NAMES, content(2))


def remove(directory: Path) -> object:
    return remove_trio(directory, ["best", "epoch_2"])


class Counting:
    """A hook that lets `before` operations pass and then does `then` at each further one."""

    def __init__(self, before: int, then: Callable[[], None]) -> None:
        self.left = before
        self.then = then
        self.guard = threading.Lock()

    def __call__(
        self, operation: str, target: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        with self.guard:
            self.left -= 1
            if self.left < 0:
                self.then()
        return function(*arguments)


def operations_of(act: Operation, directory: Path) -> int:
    prepare(directory)
    counting = Counting(10**9, lambda: None)
    with fileops.hooked(counting):
        act(directory)
    return 10**9 - counting.left


def epochs(directory: Path) -> list[int | None]:
    """What a reader finds under each name, every byte of it checked."""
    found: list[int | None] = []
    for name in NAMES:
        trio = find_trio(directory / name)
        if trio is None:
            assert not (directory / f"{name}.safetensors").exists() or has_record(directory)
            found.append(None)
            continue
        payload = trio.payload()
        assert torch.equal(payload.model_state["w"], torch.full((8,), float(payload.epoch)))
        assert payload.optimizer_state == {"lr": 0.1 * payload.epoch}
        assert trio.verify().ok
        found.append(payload.epoch)
    return found


def has_record(directory: Path) -> bool:
    return (directory / INTENT_NAME).exists()


def leftovers(directory: Path) -> list[str]:
    return [p.name for p in directory.iterdir() if p.name.startswith((".milepost-trio", ".best"))]


OUTCOMES = [(save, [[1, 1, None], [2, 2, 2]]), (remove, [[1, 1, None], [1, None, None]])]


@pytest.mark.case("C1.2")
@pytest.mark.case("C1.7")
@pytest.mark.parametrize(("act", "allowed"), OUTCOMES)
def test_an_error_at_any_operation_leaves_old_or_new(
    tmp_path: Path, act: Operation, allowed: list[list[int | None]]
) -> None:
    total = operations_of(act, tmp_path / "dry")
    assert total > 10
    for number in range(total):
        directory = tmp_path / str(number)
        prepare(directory)
        failed: list[int] = []

        def fail(failed: list[int] = failed) -> None:
            if not failed:
                failed.append(1)
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        with fileops.hooked(Counting(number, fail)):
            try:
                act(directory)
            except StorageError as error:
                assert error.errno == errno.EIO
        assert epochs(directory) in allowed
        if not has_record(directory):
            assert leftovers(directory) == []
        act(directory)
        assert epochs(directory) == allowed[1]
        assert leftovers(directory) == []
        assert not has_record(directory)


@pytest.mark.case("C1.2")
@pytest.mark.parametrize(("act", "allowed"), OUTCOMES)
def test_a_death_at_any_operation_leaves_old_or_new(
    tmp_path: Path, act: Operation, allowed: list[list[int | None]]
) -> None:
    total = operations_of(act, tmp_path / "dry")
    seen = []
    for number in range(total):
        directory = tmp_path / str(number)
        prepare(directory)
        child = os.fork()
        if child == 0:
            with fileops.hooked(Counting(number, lambda: os._exit(7))):
                act(directory)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        seen.append(epochs(directory))
        assert seen[-1] in allowed
        write_trio(directory, ["other"], content(5))
        assert epochs(directory) == seen[-1]
        assert leftovers(directory) == []
        assert not has_record(directory)
    assert seen == sorted(seen, key=lambda found: found != allowed[0])
    assert seen[0] == allowed[0] and seen[-1] == allowed[1]


@pytest.mark.case("C1.7")
def test_a_full_disk_in_the_middle_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    prepare(tmp_path)

    def full(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if operation == "write" and target.endswith(".pt"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*arguments)

    with fileops.hooked(full), pytest.raises(StorageError) as caught:
        save(tmp_path)
    assert caught.value.code == "no-space"
    assert epochs(tmp_path) == [1, 1, None]
    assert leftovers(tmp_path) == []


def test_a_reader_never_sees_a_mixture_while_a_writer_is_at_work(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest", "best"], content(1))
    done = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set():
                result = load_checkpoint(tmp_path / "latest")
                expected = torch.full((8,), float(result["epoch"]))
                assert torch.equal(result["model_state"]["w"], expected)
                assert result["optimizer"] == {"lr": 0.1 * result["epoch"]}
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for epoch in range(2, 30):
        write_trio(tmp_path, ["latest", "best"], content(epoch))
    done.set()
    for reader in readers:
        reader.join()
    assert failures == []


def test_a_handle_never_mixes_two_saves(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest"], content(1))
    checkpoint = TrioCheckpoint(tmp_path / "latest")
    write_trio(tmp_path, ["latest"], content(2))
    for read in (checkpoint.training_state, checkpoint.payload):
        with pytest.raises(ReplacedError, match="another save took this name"):
            read()
    assert checkpoint.info.epoch == 1
    assert torch.equal(checkpoint.read_weights()["w"], torch.ones(8))
    assert torch.equal(checkpoint.read("w", [slice(0, 1)]), torch.ones(1))


def test_a_second_process_may_not_write_into_the_directory(tmp_path: Path) -> None:
    holder = (
        "import sys; from pathlib import Path; from milepost.storage.lease import RunLease\n"
        "with RunLease.of(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(RunInUseError, match=f"process {process.pid}"):
        write_trio(tmp_path, ["latest"], content(1))
    process.communicate("")
    write_trio(tmp_path, ["latest"], content(1))


def test_the_lease_is_given_back(tmp_path: Path) -> None:
    write_trio(tmp_path, ["latest"], content(1))
    assert RunLease.of(tmp_path)._depth == 0
