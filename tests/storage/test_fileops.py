"""Each file operation does what its name says, and all of them can be seen and made to fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from milepost.storage import atomic, fileops


class Recorder:
    """A hook that notes operations and fails those asked for."""

    def __init__(self, **errors: int) -> None:
        self.seen: list[str] = []
        self.errors = errors

    def __call__(
        self, operation: str, target: str, function: Any, arguments: tuple[Any, ...]
    ) -> Any:
        self.seen.append(operation)
        number = self.errors.get(operation.replace("-", "_"))
        if number is not None:
            raise OSError(number, os.strerror(number), target)
        return function(*arguments)


def test_a_rename_without_replacing_refuses_even_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    with pytest.raises(FileExistsError):
        fileops.rename_no_replace(tmp_path / "new", tmp_path / "old")
    fileops.rename_no_replace(tmp_path / "new", tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["old", "other"]


def test_without_renameat2_a_taken_name_is_refused_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(source: str, target: str, flags: int) -> None:
        raise OSError(errno.ENOSYS, "no such call", source)

    monkeypatch.setattr(fileops, "_renameat2", unknown)
    (tmp_path / "new").mkdir()
    (tmp_path / "old").mkdir()
    with pytest.raises(FileExistsError):
        fileops.rename_no_replace(tmp_path / "new", tmp_path / "old")
    assert not fileops.exchange(tmp_path / "new", tmp_path / "old")
    fileops.rename_no_replace(tmp_path / "new", tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == ["old", "other"]


def test_an_exchange_swaps_two_directories(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name)
    assert fileops.exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "content").read_text() == "b"
    with pytest.raises(FileNotFoundError):
        fileops.exchange(tmp_path / "a", tmp_path / "missing")


def test_a_reservation_takes_blocks_and_a_refusal_is_told_apart(tmp_path: Path) -> None:
    descriptor = fileops.open_file(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    try:
        assert fileops.reserve_file(descriptor, 2**20)
        stat = os.fstat(descriptor)
        assert (stat.st_size, stat.st_blocks * 512 >= 2**20) == (2**20, True)
        assert fileops.reserve_file(descriptor, 0)
    finally:
        fileops.close_file(descriptor)
    descriptor = fileops.open_file(tmp_path / "a", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            fileops.reserve_file(descriptor, 2**20)
    finally:
        fileops.close_file(descriptor)


def test_a_write_without_progress_is_an_error_and_not_a_loop(tmp_path: Path) -> None:
    descriptor = fileops.open_file(tmp_path / "a", os.O_RDWR | os.O_CREAT)

    def stuck(operation: str, target: str, function: Any, arguments: tuple[Any, ...]) -> Any:
        return 0 if operation == "write" else function(*arguments)

    try:
        with fileops.hooked(stuck), pytest.raises(OSError, match="no progress") as caught:
            fileops.write_at(descriptor, b"data", 0)
        assert caught.value.filename == str(tmp_path / "a")
    finally:
        fileops.close_file(descriptor)


def test_a_failed_sync_is_not_tried_again(tmp_path: Path) -> None:
    hook = Recorder(fsync=errno.EIO)
    with fileops.hooked(hook), pytest.raises(OSError, match="Input/output"):
        atomic.write_new_file(tmp_path / "a", b"data")
    assert hook.seen.count("fsync") == 1


def test_missing_parents_are_made_and_each_is_durable_in_its_own_parent(tmp_path: Path) -> None:
    hook = Recorder()
    with fileops.hooked(hook):
        fileops.make_directories(tmp_path / "a" / "b")
        fileops.make_directories(tmp_path / "a" / "b")
    assert hook.seen == ["mkdir", "fsync-directory", "mkdir", "fsync-directory"]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        fileops.make_directories(tmp_path / "file")


def test_a_tree_is_removed_without_following_symlinks(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").touch()
    tree = tmp_path / "tree"
    (tree / "deep" / "deeper").mkdir(parents=True)
    (tree / "deep" / "file").touch()
    (tree / "link").symlink_to(tmp_path / "elsewhere")
    fileops.remove_tree(tree)
    fileops.remove_tree(tree)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere"]
    assert os.listdir(tmp_path / "elsewhere") == ["precious"]


def test_removing_a_name_that_is_gone_is_no_error(tmp_path: Path) -> None:
    fileops.unlink(tmp_path / "missing")


def test_a_replaced_file_is_synced_before_its_name_and_its_directory_after(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    hook = Recorder()
    with fileops.hooked(hook):
        atomic.replace_file(tmp_path / "a", b"new")
    assert hook.seen == ["open", "write", "fsync", "rename", "fsync-directory"]
    assert (tmp_path / "a").read_bytes() == b"new"


@pytest.mark.case("C7.30")
@pytest.mark.parametrize("operation", ["open", "write", "fsync", "rename"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failed_replacement_keeps_the_old_content_and_leaves_nothing(
    operation: str, number: int, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with fileops.hooked(Recorder(**{operation: number})), pytest.raises(OSError) as caught:
        atomic.replace_file(tmp_path / "a", b"new")
    assert caught.value.errno == number
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def test_temporary_names_of_two_writers_differ(tmp_path: Path) -> None:
    names = {atomic.temporary_name(tmp_path / "a.json") for _ in range(50)}
    assert len(names) == 50
    assert all(name.name.startswith(".a.json.") and name.parent == tmp_path for name in names)


def test_hooks_nest_and_the_outer_one_sees_what_the_inner_one_lets_through(tmp_path: Path) -> None:
    outer, inner = Recorder(), Recorder(write=errno.EIO)
    with fileops.hooked(outer):
        with fileops.hooked(inner), pytest.raises(OSError):
            atomic.write_new_file(tmp_path / "a", b"x")
        fileops.unlink(tmp_path / "a")
    assert inner.seen == ["open", "write"]
    assert outer.seen == ["open", "unlink"]
