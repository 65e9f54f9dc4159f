"""Whole small files, replaced at once and durable when the call returns."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from milepost.storage import fileops
from milepost.storage.fileops import Buffer, PathLike


def temporary_name(path: PathLike) -> Path:
    """A hidden name beside `path` that no other writer uses."""
    target = Path(path)
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")


def write_new_file(path: PathLike, data: Buffer, *, mode: int = 0o666) -> None:
    """Write a file that does not exist yet and fsync it, not its directory."""
    descriptor = fileops.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        fileops.write_at(descriptor, data, 0)
        fileops.sync_data(descriptor)
    finally:
        fileops.close_file(descriptor)


def write_unsynced_file(path: PathLike, data: Buffer) -> None:
    """Write a file that does not exist yet into the page cache only."""
    descriptor = fileops.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        fileops.write_at(descriptor, data, 0)
    finally:
        fileops.close_file(descriptor)


def replace_file(path: PathLike, data: Buffer, *, mode: int = 0o666) -> None:
    """Make `path` hold `data`: temporary name, write, fsync, rename, fsync the directory.

    A reader sees the old content or the new; a crash leaves one of the two. On an error the
    temporary file is removed and the old content stays.
    """
    target = Path(path)
    temporary = temporary_name(target)
    try:
        write_new_file(temporary, data, mode=mode)
        fileops.rename(temporary, target)
    except BaseException:
        remove_quietly(temporary)
        raise
    fileops.sync_directory(target.parent)


def remove_quietly(path: PathLike) -> None:
    """Remove a left-over; when that fails too, the next save cleans it up."""
    try:
        fileops.unlink(path)
    except OSError:
        return
