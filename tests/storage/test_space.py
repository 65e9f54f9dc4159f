"""How much room there is, in words that say what to do."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from milepost.errors import ExistsError, NoSpaceError, StorageError
from milepost.storage.space import free_nbytes, human, require_space, storage_error


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**20 - 1, "1024.0 KiB"),
        (3 * 2**40, "3.0 TiB"),
        (5 * 2**50, "5120.0 TiB"),
    ],
)
def test_sizes_are_said_in_the_largest_fitting_unit(nbytes: float, text: str) -> None:
    assert human(nbytes) == text


def test_room_is_that_of_the_nearest_parent_that_exists(tmp_path: Path) -> None:
    assert free_nbytes(tmp_path / "not" / "there") > 0
    require_space(tmp_path / "not" / "there", 0)


def test_too_little_room_says_how_much_is_needed_how_much_is_there_and_what_to_do(
    tmp_path: Path,
) -> None:
    needed = free_nbytes(tmp_path) + 2**40
    with pytest.raises(NoSpaceError, match="milepost prune") as caught:
        require_space(tmp_path, needed)
    assert caught.value.needed_nbytes == needed
    assert caught.value.free_nbytes is not None
    assert caught.value.errno == errno.ENOSPC
    assert f"needs {human(needed)}" in str(caught.value)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_a_full_quota_become_no_space(number: int, tmp_path: Path) -> None:
    error = storage_error(OSError(number, "x"), tmp_path, needed_nbytes=1024)
    assert isinstance(error, NoSpaceError)
    assert "the save needs 1.0 KiB" in str(error)
    assert "more room" in str(storage_error(OSError(number, "x"), tmp_path))


def test_another_error_keeps_its_number_and_the_file_it_hit(tmp_path: Path) -> None:
    error = storage_error(OSError(errno.EROFS, "Read-only file system", "/a/b"), tmp_path)
    assert type(error) is StorageError
    assert error.errno == errno.EROFS
    assert str(error).startswith("/a/b: Read-only file system while saving")
    assert storage_error(error, tmp_path) is error


def test_errors_of_storage_are_caught_as_the_builtin_ones_too() -> None:
    assert issubclass(NoSpaceError, OSError)
    assert issubclass(ExistsError, FileExistsError)
