"""Staging directories: all or nothing, and what the dead leave behind."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import ExistsError, RunInUseError, StorageError
from milepost.storage import fileops
from milepost.storage.intent import INTENT_NAME, Intent, finish_intent, read_intent, resolve_name
from milepost.storage.lease import LOCK_NAME, STALE_AFTER_S, Owner, RunLease
from milepost.storage.staging import (
    OWNER_NAME,
    STAGING_PREFIX,
    StagingDirectory,
    left_alone,
    move_to_incomplete,
    remove_leftovers,
)


def staging(target: Path, unique: str = "1") -> StagingDirectory:
    return StagingDirectory(target, unique=unique, owns=lambda path: holds(path, unique))


def holds(path: Path, unique: str) -> bool:
    return (path / "id").exists() and (path / "id").read_text() == unique


def publish(target: Path, unique: str = "1", *, replacing: bool = False) -> None:
    with staging(target, unique) as place:
        (place.path / "deep").mkdir()
        (place.path / "id").write_text(unique)
        if replacing:
            place.commit_replacing()
        else:
            place.commit()


def visible(run: Path) -> list[str]:
    return sorted(name for name in os.listdir(run) if name != LOCK_NAME)


class Fail:
    """Fails the `at`-th operation of a name, and all later ones of it with `forever`."""

    def __init__(self, name: str, *, at: int = 0, number: int = errno.EIO, forever: bool = False):
        self.name, self.at, self.number, self.forever = name, at, number, forever
        self.count = -1

    def __call__(
        self, operation: str, target: str, function: Any, arguments: tuple[Any, ...]
    ) -> Any:
        if operation == self.name:
            self.count += 1
            if self.count == self.at or (self.forever and self.count > self.at):
                raise OSError(self.number, os.strerror(self.number), target)
        return function(*arguments)


def without_exchange(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
    return False if operation == "exchange" else function(*arguments)


def test_a_commit_gives_the_name_to_everything_at_once(tmp_path: Path) -> None:
    publish(tmp_path / "c")
    assert visible(tmp_path) == ["c"]
    assert visible(tmp_path / "c") == ["deep", "id"], "the owner's mark is no part of it"


def test_nothing_is_visible_before_the_commit_and_nothing_is_left_without_one(
    tmp_path: Path,
) -> None:
    with staging(tmp_path / "c") as place:
        (place.path / "id").write_text("1")
        assert visible(tmp_path) == [f"{STAGING_PREFIX}1"]
    assert visible(tmp_path) == []
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "c"):
        raise KeyboardInterrupt
    assert visible(tmp_path) == []


def test_every_directory_is_synced_before_the_rename_and_the_run_after_it(tmp_path: Path) -> None:
    seen: list[tuple[str, str]] = []

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        seen.append((operation, target))
        return function(*arguments)

    with staging(tmp_path / "c") as place:
        (place.path / "deep").mkdir()
        with fileops.hooked(hook):
            place.commit()
    assert seen[1:] == [
        ("fsync-directory", f"{place.path}/deep"),
        ("fsync-directory", str(place.path)),
        ("rename", f"{place.path} -> {tmp_path / 'c'}"),
        ("fsync-directory", str(tmp_path)),
    ]


@pytest.mark.parametrize("taken", ["an empty directory", "a file", "a dangling symlink"])
def test_a_name_that_was_taken_meanwhile_is_refused_and_kept(taken: str, tmp_path: Path) -> None:
    target = tmp_path / "c"
    with pytest.raises(ExistsError, match=r"taken while"), staging(target) as place:
        if taken == "an empty directory":
            target.mkdir()
        elif taken == "a file":
            target.touch()
        else:
            target.symlink_to("nowhere")
        place.commit()
    assert visible(tmp_path) == ["c"]


@pytest.mark.parametrize("number", [errno.EEXIST, errno.ENOENT, errno.ENOTEMPTY])
def test_a_rename_that_happened_though_it_failed_is_believed(number: int, tmp_path: Path) -> None:
    """A network file system repeats a request whose answer was lost."""

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        result = function(*arguments)
        if operation == "rename":
            raise OSError(number, os.strerror(number), target)
        return result

    with fileops.hooked(hook):
        publish(tmp_path / "c")
    assert holds(tmp_path / "c", "1")


def test_a_rename_whose_source_vanished_is_an_error(tmp_path: Path) -> None:
    with (
        fileops.hooked(Fail("rename", number=errno.ENOENT)),
        pytest.raises(FileNotFoundError),
    ):
        publish(tmp_path / "c")
    assert visible(tmp_path) == []


def test_a_name_that_could_not_be_made_durable_is_taken_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if operation == "fsync-directory" and target == str(run) and (run / "c").exists():
            raise OSError(errno.EIO, "Input/output error", target)
        return function(*arguments)

    with fileops.hooked(hook), pytest.raises(OSError, match=r"Input/output"):
        publish(run / "c")
    assert visible(run) == []


@pytest.mark.parametrize("way", ["exchange", "intent record"])
def test_replacing_leaves_the_new_content_and_nothing_of_the_old(way: str, tmp_path: Path) -> None:
    publish(tmp_path / "c", "old")
    with fileops.hooked(without_exchange if way == "intent record" else Fail("none")):
        publish(tmp_path / "c", "new", replacing=True)
    assert visible(tmp_path) == ["c"]
    assert holds(tmp_path / "c", "new")


def test_a_replacement_that_could_not_be_made_durable_is_taken_back(tmp_path: Path) -> None:
    publish(tmp_path / "c", "old")

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        if operation == "fsync-directory" and holds(tmp_path / "c", "new"):
            raise OSError(errno.EIO, "Input/output error", target)
        return function(*arguments)

    with fileops.hooked(hook), pytest.raises(OSError, match=r"Input/output"):
        publish(tmp_path / "c", "new", replacing=True)
    assert visible(tmp_path) == ["c"]
    assert holds(tmp_path / "c", "old")


@pytest.mark.parametrize("operation", ["unlink", "rmdir"])
def test_an_old_directory_that_cannot_be_removed_does_not_undo_the_replacement(
    operation: str, tmp_path: Path
) -> None:
    publish(tmp_path / "c", "old")
    # The first unlink takes the owner's mark off and belongs to the commit itself.
    fail = Fail(operation, at=1 if operation == "unlink" else 0, forever=True)
    with fileops.hooked(fail):
        publish(tmp_path / "c", "new", replacing=True)
    assert holds(tmp_path / "c", "new")
    publish(tmp_path / "d")
    assert visible(tmp_path) == ["c", "d"], "the next save removes it"


@pytest.mark.parametrize("number", range(12))
def test_replacing_by_a_record_loses_neither_content_at_any_failure(
    number: int, tmp_path: Path
) -> None:
    publish(tmp_path / "c", "old")
    count = -1

    def hook(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        nonlocal count
        if operation == "exchange":
            count = 0
            return False
        count += count >= 0
        if count == number + 1:
            raise OSError(errno.EIO, "Input/output error", target)
        return function(*arguments)

    failed: OSError | None = None
    try:
        with fileops.hooked(hook):
            publish(tmp_path / "c", "new", replacing=True)
    except OSError as error:
        failed = error
    seen = resolve_name(tmp_path, "c")
    recorded = read_intent(tmp_path) is not None
    if failed is None or recorded:
        assert holds(seen, "new")
    else:
        assert holds(seen, "old") or holds(seen, "new")
    if recorded and isinstance(failed, StorageError):
        assert "readers see it already" in str(failed)
    content = "new" if holds(seen, "new") else "old"
    publish(tmp_path / "d")
    assert visible(tmp_path) == ["c", "d"]
    assert holds(tmp_path / "c", content)


WRITER = """
import os, signal, sys
from pathlib import Path
from milepost.storage.staging import StagingDirectory

with StagingDirectory(Path(sys.argv[1]), unique="dead", owns=lambda path: False) as place:
    (place.path / "part").write_bytes(b"x" * 1000)
    print("staged", flush=True)
    sys.stdin.read()
    place.commit()
"""


def writer(run: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(run / "c")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "staged\n"
    return process


@pytest.mark.case("C1.7")
def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    with writer(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert visible(tmp_path) == [f"{STAGING_PREFIX}dead"]
    publish(tmp_path / "d")
    assert visible(tmp_path) == ["d"]


@pytest.mark.case("C1.7")
def test_a_second_process_is_refused_while_the_first_writes_and_disturbs_nothing(
    tmp_path: Path,
) -> None:
    with writer(tmp_path) as process:
        with pytest.raises(RunInUseError, match=rf"process {process.pid}"):
            publish(tmp_path / "d")
        process.communicate("")
        assert process.returncode == 0
    assert visible(tmp_path) == ["c"]
    assert (tmp_path / "c" / "part").stat().st_size == 1000


def test_threads_of_one_process_leave_each_others_staging_alone(tmp_path: Path) -> None:
    with staging(tmp_path / "a", "1") as outer:
        (outer.path / "id").write_text("1")
        thread = threading.Thread(target=publish, args=(tmp_path / "b", "2"))
        thread.start()
        thread.join()
        assert holds(tmp_path / "b", "2")
        outer.commit()
    assert visible(tmp_path) == ["a", "b"]


def leftover(run: Path, owner: Owner | None) -> Path:
    place = run / f"{STAGING_PREFIX}x"
    place.mkdir()
    (place / "part").touch()
    if owner is not None:
        (place / OWNER_NAME).write_bytes(owner.to_bytes())
    return place


def foreign() -> Owner:
    return Owner(host="another-host", boot_id="x", pid=1, start="1")


def test_a_fresh_staging_directory_of_another_host_is_kept_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = leftover(tmp_path, foreign())
    with RunLease.of(tmp_path), caplog.at_level(logging.WARNING):
        remove_leftovers(tmp_path)
    assert (place / "part").exists()
    assert "may belong to a job that still runs on another host; kept" in caplog.text


def test_a_staging_directory_of_another_host_is_removed_after_a_day(tmp_path: Path) -> None:
    place = leftover(tmp_path, foreign())
    before = (place / OWNER_NAME).stat().st_mtime - STALE_AFTER_S - 60
    os.utime(place / OWNER_NAME, (before, before))
    remove_leftovers(tmp_path)
    assert not place.exists()


@pytest.mark.parametrize(
    "owner", [None, Owner(host=os.uname().nodename, boot_id="", pid=1, start="")]
)
def test_a_staging_directory_of_this_host_or_of_nobody_is_removed(
    owner: Owner | None, tmp_path: Path
) -> None:
    place = leftover(tmp_path, owner)
    remove_leftovers(tmp_path)
    assert not place.exists()


def test_only_directories_with_our_prefix_are_left_overs(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / f"{STAGING_PREFIX}file").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{STAGING_PREFIX}link").symlink_to(tmp_path / "elsewhere")
    before = visible(tmp_path)
    remove_leftovers(tmp_path)
    assert visible(tmp_path) == before


def test_a_dead_writers_record_is_finished_before_anything_else(tmp_path: Path) -> None:
    publish(tmp_path / "c", "old")
    place = tmp_path / f"{STAGING_PREFIX}x"
    place.mkdir()
    (place / "id").write_text("new")
    intent = Intent(removes=("c",), renames=((place.name, "c"),))
    (tmp_path / INTENT_NAME).write_bytes(intent.to_bytes())
    publish(tmp_path / "d")
    assert visible(tmp_path) == ["c", "d"]
    assert holds(tmp_path / "c", "new")
    finish_intent(tmp_path)


def test_what_stands_in_the_way_is_moved_with_its_data_and_never_over_another(
    tmp_path: Path,
) -> None:
    for number in range(3):
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "id").write_text(str(number))
        move_to_incomplete(tmp_path, "c")
    shelf = tmp_path / "_incomplete_checkpoints"
    assert {p.name: (p / "id").read_text() for p in shelf.iterdir()} == {
        "c": "0",
        "c.1": "1",
        "c.2": "2",
    }


def test_what_this_process_says_it_uses_is_no_leftover(tmp_path: Path) -> None:
    probe = tmp_path / f"{STAGING_PREFIX}1-probe"
    probe.mkdir()
    with left_alone(probe):
        remove_leftovers(tmp_path)
        assert probe.exists()
    remove_leftovers(tmp_path)
    assert not probe.exists()
