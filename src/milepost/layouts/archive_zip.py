"""The zip container of `torch.save`: where each record lies, and the digest in its last comment.

torch stores records uncompressed, so a record is a range of bytes. The comment at the end of the
file is ours: `milepost xxh3-128:` and the digest, in hex, of all bytes before the comment.
"""

from __future__ import annotations

import io
import os
import re
import struct
import weakref
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from milepost.errors import FormatError, NotFoundError, StorageError
from milepost.storage.fileops import PathLike

if TYPE_CHECKING:
    from typing_extensions import Buffer

COMMENT_PREFIX = b"milepost xxh3-128:"
COMMENT_NBYTES = len(COMMENT_PREFIX) + 32
_COMMENT = re.compile(re.escape(COMMENT_PREFIX) + rb"([0-9a-f]{32})")
END_RECORD = struct.Struct("<4s4H2LH")
END_SIGNATURE = b"PK\x05\x06"
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19"
_ENCRYPTED = 0x1
MAX_READ_NBYTES = 2**30

_ZIP_ERRORS = (
    zipfile.BadZipFile,
    NotImplementedError,
    EOFError,
    ValueError,
    LookupError,
    OverflowError,
    struct.error,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One file of the archive: its bytes are `start` to `start + nbytes` of the container."""

    name: str
    start: int
    nbytes: int
    crc32: int

    @property
    def end(self) -> int:
        return self.start + self.nbytes


class ArchiveFile:
    """An open container. The descriptor stays open, so a file replaced meanwhile does not mix in.

    `records` are by name. `comment` is that of the zip end record. With `window`, the container is
    that byte range of the file, and all positions but those of messages count from its start.
    """

    def __init__(self, path: PathLike, *, window: tuple[int, int] | None = None) -> None:
        self.path = Path(path)
        self.descriptor = _open(self.path)
        self._close = weakref.finalize(self, os.close, self.descriptor)
        try:
            self.nbytes = os.fstat(self.descriptor).st_size
            self.start = 0
            if window is not None:
                self._narrow(*window)
            self.comment, self.records = self._directory()
        except BaseException:
            self._close()
            raise

    def _narrow(self, start: int, end: int) -> None:
        if not 0 <= start <= end <= self.nbytes:
            raise self._error(
                f"bytes {start} to {end} are expected, the file has {self.nbytes}; it was cut "
                "short: use another copy"
            )
        self.start, self.nbytes = start, end - start

    def close(self) -> None:
        self._close()

    @property
    def recorded_digest(self) -> str | None:
        """The digest in the comment, or None when it holds none."""
        return digest_in(self.comment)

    def read(self, start: int, nbytes: int) -> bytes:
        buffer = bytearray(nbytes)
        self.read_into(memoryview(buffer), start)
        return bytes(buffer)

    def read_into(self, view: memoryview, start: int) -> None:
        """Fill `view` from `start`; `FormatError` when the file ends before that."""
        while view.nbytes:
            try:
                count = os.preadv(self.descriptor, [view[:MAX_READ_NBYTES]], self.start + start)
            except OSError as error:
                raise _read_error(error, self.path) from error
            if count == 0:
                raise self._error(f"it ends at byte {start}, {view.nbytes} more are expected")
            view = view[count:]
            start += count

    def _error(self, message: str) -> FormatError:
        return FormatError(f"{self.path}: {message}", path=self.path)

    def _directory(self) -> tuple[bytes, Mapping[str, Record]]:
        self._check_beginning()
        try:
            with (
                io.BufferedReader(_Bytes(self)) as file,
                zipfile.ZipFile(file) as archive,
            ):
                comment, entries, end = archive.comment, archive.infolist(), archive.start_dir
        except _ZIP_ERRORS as error:
            raise self._error(
                f"the zip directory at its end is missing or damaged ({error}); was the file cut "
                f"short? Use another copy"
            ) from error
        except OSError as error:
            raise _read_error(error, self.path) from error
        self._check_end(comment)
        records = [self._record(entry, end) for entry in entries]
        self._check_overlaps(records)
        return comment, {record.name: record for record in records}

    def _check_beginning(self) -> None:
        if self.nbytes == 0:
            raise self._error("the file is empty (0 bytes); use another copy")
        first = self.read(0, min(self.nbytes, 32))
        if first.startswith(b"PK"):
            return
        if _LEGACY_MAGIC in first:
            raise self._error(
                "written by torch.save before 1.6 (or with the old serialization asked for), a "
                "stream of pickles; convert it with torch: "
                "torch.save(torch.load(path, weights_only=True), new_path)"
            )
        if first[:1] == b"\x80":
            raise self._error("a bare pickle, not an archive of torch.save")
        raise self._error(
            f"not an archive of torch.save: a zip file is expected, found {first[:8]!r}"
        )

    def _check_end(self, comment: bytes) -> None:
        start = self.nbytes - END_RECORD.size - len(comment)
        signature, *_, length = END_RECORD.unpack(self.read(max(start, 0), END_RECORD.size))
        if start < 0 or signature != END_SIGNATURE or length != len(comment):
            raise self._error("bytes follow the end of the zip archive, or its end is damaged")

    def _record(self, entry: zipfile.ZipInfo, end: int) -> Record:
        name = entry.filename
        if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
            raise self._error(
                f"record {name!r} is compressed; torch.save stores records as they are: load the "
                f"file with torch and save it again"
            )
        if entry.flag_bits & _ENCRYPTED:
            raise self._error(f"record {name!r} is encrypted")
        if not 0 <= entry.header_offset <= end - _LOCAL_HEADER.size:
            raise self._error(f"record {name!r} lies outside the archive")
        header = self.read(entry.header_offset, _LOCAL_HEADER.size)
        signature, *_, name_nbytes, extra_nbytes = _LOCAL_HEADER.unpack(header)
        if signature != b"PK\x03\x04":
            raise self._error(f"the header of record {name!r} is damaged")
        start = entry.header_offset + _LOCAL_HEADER.size + name_nbytes + extra_nbytes
        if start + entry.file_size > end:
            raise self._error(f"record {name!r} reaches beyond the data of the archive")
        return Record(name=name, start=start, nbytes=entry.file_size, crc32=entry.CRC)

    def _check_overlaps(self, records: list[Record]) -> None:
        if len({record.name for record in records}) < len(records):
            raise self._error("two records have one name")
        for first, second in pairwise(sorted(records, key=lambda record: record.start)):
            if second.start < first.end:
                raise self._error(f"records {first.name!r} and {second.name!r} overlap")


class _Bytes(io.RawIOBase):
    """The container as a file for the standard library."""

    def __init__(self, archive: ArchiveFile) -> None:
        super().__init__()
        self._archive = archive
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._archive.nbytes}
        if base[whence] + offset < 0:
            raise ValueError(f"a position before the start: {base[whence] + offset}")
        self._position = base[whence] + offset
        return self._position

    def readinto(self, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(view.nbytes, self._archive.nbytes - self._position))
        self._archive.read_into(view[:count], self._position)
        self._position += count
        return count


def digest_in(comment: bytes) -> str | None:
    """The digest in the comment of an archive, None when it holds none of ours."""
    found = _COMMENT.fullmatch(comment)
    return found[1].decode() if found else None


def _open(path: Path) -> int:
    try:
        if path.is_dir():
            raise FormatError(f"{path}: a directory, not an archive of torch.save", path=path)
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file", path=path) from error
    except OSError as error:
        raise _read_error(error, path) from error


def _read_error(error: OSError, path: Path) -> StorageError:
    text = error.strerror or str(error)
    return StorageError(f"{path}: {text} while reading", path=path, number=error.errno)
