"""Writing an archive of `torch.save` through the file operations of Milepost, with its digest."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from milepost.errors import FormatError, UnencodableError, UnsafePickleError
from milepost.layouts.archive_reader import TorchArchive
from milepost.layouts.archive_zip import (
    COMMENT_NBYTES,
    COMMENT_PREFIX,
    END_RECORD,
    END_SIGNATURE,
)
from milepost.storage import fileops
from milepost.storage.atomic import remove_quietly
from milepost.storage.fileops import PathLike
from milepost.storage.space import storage_error

PIECE_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenArchive:
    """What was written; `digest` covers all bytes before the comment that records it."""

    path: Path
    nbytes: int
    digest: str


def write_archive(path: PathLike, payload: Any, *, mode: int = 0o666) -> WrittenArchive:
    """Write `payload` to the new file `path` and sync it; the caller renames it into place.

    Refuses first what could not be loaded again (`UnencodableError`, see `check_loadable`). Tensors
    are written from the CPU and without bytes of their base that they do not show; ties stay. On
    an error the file is removed; one of the file system becomes `StorageError`.
    """
    from milepost.layouts.archive_payload import prepare

    target = Path(path)
    prepared = prepare(payload)
    try:
        descriptor = fileops.open_file(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise storage_error(error, target) from error
    try:
        written = _write(descriptor, target, prepared)
        _read_back(target)
    except BaseException as error:
        fileops.close_file(descriptor)
        remove_quietly(target)
        if isinstance(error, OSError):
            raise storage_error(error, target) from error
        raise
    fileops.close_file(descriptor)
    return written


def archive_bytes(payload: Any) -> bytes:
    """A small archive in memory, for a file that is written with others; it has no digest inside.

    Refuses what could not be loaded again: `UnencodableError`.
    """
    import torch

    from milepost.layouts.archive_payload import prepare

    buffer = io.BytesIO()
    torch.save(prepare(payload), buffer)
    return buffer.getvalue()


def _write(descriptor: int, target: Path, prepared: Any) -> WrittenArchive:
    import torch

    stream = _Stream(descriptor)
    torch.save(prepared, stream)  # type: ignore[arg-type]
    digest = stream.finish()
    fileops.sync_data(descriptor)
    return WrittenArchive(path=target, nbytes=stream.offset, digest=digest)


def _read_back(target: Path) -> None:
    """Read the structure as a load would; this touches no byte of a tensor."""
    try:
        TorchArchive.open(target).close()
    except (FormatError, UnsafePickleError) as error:
        raise UnencodableError(
            f"the state cannot be read back from what torch.save made of it: {error}", key=""
        ) from error


class _Stream:
    """What `torch.save` writes to.

    The zip end record is held back, because it gets a comment. After a failed write the rest is
    swallowed and `finish` raises: an error inside torch's writer would be replaced by its own
    complaint that the position is wrong.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.offset = 0
        self.tail = b""
        self.digest = xxhash.xxh3_128()
        self.failure: OSError | None = None

    def write(self, data: memoryview | bytes) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes >= END_RECORD.size:
            self._put(self.tail)
            self._put(view[: -END_RECORD.size])
            self.tail = bytes(view[-END_RECORD.size :])
        else:
            joined = self.tail + bytes(view)
            self._put(joined[: -END_RECORD.size])
            self.tail = joined[-END_RECORD.size :]
        return view.nbytes

    def flush(self) -> None:
        """Nothing is buffered except the end record."""

    def finish(self) -> str:
        """Write the end record and the comment with the digest of all before it."""
        if self.failure is not None:
            raise self.failure
        signature, *middle, comment_nbytes = END_RECORD.unpack(self.tail)
        assert (signature, comment_nbytes) == (END_SIGNATURE, 0), "torch ended the zip otherwise"
        self._put(END_RECORD.pack(signature, *middle, COMMENT_NBYTES))
        digest = str(self.digest.hexdigest())
        self._put(COMMENT_PREFIX + digest.encode())
        if self.failure is not None:
            raise self.failure
        return digest

    def _put(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        for start in range(0, view.nbytes, PIECE_NBYTES):
            if self.failure is not None:
                return
            piece = view[start : start + PIECE_NBYTES]
            try:
                fileops.write_at(self.descriptor, piece, self.offset)
            except OSError as error:
                self.failure = error
                return
            self.digest.update(piece)
            self.offset += piece.nbytes
