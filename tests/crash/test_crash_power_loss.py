"""The model of a power cut: it finds what careless writers lose, and promises what it should."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from milepost.storage import fileops
from milepost.testing.disk import DirectoryTree
from milepost.testing.faults import record
from milepost.testing.power import PowerLoss, power_loss_states, tree_after

OLD, NEW = b"old bytes", b"new bytes of another length"


def write(path: Path, *, sync: bool) -> None:
    descriptor = fileops.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    fileops.write_at(descriptor, NEW, 0)
    if sync:
        fileops.sync_data(descriptor)
    fileops.close_file(descriptor)


def careful(root: Path) -> None:
    write(root / "new", sync=True)
    fileops.rename(root / "new", root / "file")
    fileops.sync_directory(root)


def without_fsync(root: Path) -> None:
    write(root / "new", sync=False)
    fileops.rename(root / "new", root / "file")
    fileops.sync_directory(root)


def without_fsync_of_the_directory(root: Path) -> None:
    write(root / "new", sync=True)
    fileops.rename(root / "new", root / "file")


def removing_the_old_one_first(root: Path) -> None:
    write(root / "new", sync=True)
    fileops.unlink(root / "file")
    fileops.rename(root / "new", root / "file")
    fileops.sync_directory(root)


def losses(root: Path, act: Callable[[Path], None]) -> list[PowerLoss]:
    (root / "file").write_bytes(OLD)
    before = DirectoryTree.of(root)
    operations = record(lambda: act(root))
    assert tree_after(operations, before).files() == DirectoryTree.of(root).files()
    return list(power_loss_states(operations, before, samples=8))


def contents(found: list[PowerLoss]) -> set[bytes | None]:
    return {loss.tree.files().get("file") for loss in found}


def test_a_careful_writer_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    found = losses(tmp_path, careful)
    assert contents(found) == {OLD, NEW}
    assert contents([loss for loss in found if loss.finished]) == {NEW}


@pytest.mark.case("V17")
def test_a_rename_without_fsync_leaves_an_empty_file_or_zeros(tmp_path: Path) -> None:
    found = contents(losses(tmp_path, without_fsync))
    assert {b"", bytes(len(NEW))} < found


@pytest.mark.case("V17")
def test_a_rename_is_not_durable_before_its_directory_is_synced(tmp_path: Path) -> None:
    found = [loss for loss in losses(tmp_path, without_fsync_of_the_directory) if loss.finished]
    assert contents(found) == {OLD, NEW}


def test_a_name_removed_before_the_new_one_is_there_may_be_gone(tmp_path: Path) -> None:
    assert None in contents(losses(tmp_path, removing_the_old_one_first))


def test_two_names_that_are_exchanged_change_together(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(NEW)
    found = losses(tmp_path, lambda root: fileops_exchange(root))
    pairs = {(files["file"], files["other"]) for files in (loss.tree.files() for loss in found)}
    assert pairs == {(OLD, NEW), (NEW, OLD)}


def fileops_exchange(root: Path) -> None:
    assert fileops.exchange(root / "file", root / "other")


def test_a_written_tree_keeps_hard_links_symlinks_and_modes(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "below").mkdir(parents=True)
    (source / "one").write_bytes(OLD)
    (source / "one").chmod(0o444)
    (source / "below" / "two").hardlink_to(source / "one")
    (source / "link").symlink_to("one")
    DirectoryTree.of(source).write_to(copy)
    assert (copy / "one").samefile(copy / "below" / "two")
    assert os.readlink(copy / "link") == "one"
    assert (copy / "one").stat().st_mode & 0o777 == 0o444
    assert DirectoryTree.of(copy).files() == DirectoryTree.of(source).files()
