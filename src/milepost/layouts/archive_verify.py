"""Whether the bytes of a `.pt` are those that were saved, and whose bytes are not."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import xxhash

from milepost.errors import DamagedError, UnsafePickleError
from milepost.layouts.archive_reader import find_root, read_tree, walk_tensors
from milepost.layouts.archive_zip import ArchiveFile, Record
from milepost.layouts.checkpoint import Problem, Severity
from milepost.storage.fileops import PathLike

PIECE_NBYTES = 4 * 2**20


def verify_archive(path: PathLike) -> list[Problem]:
    """What is wrong with an archive of `torch.save`; nothing, or only warnings, when it is sound.

    With a recorded digest every changed byte is found, without one those in a record (by its CRC32)
    or in the structure; then one warning says that no digest is recorded. Damage in a tensor names
    the tensor. Raises `NotFoundError` when there is no file; other damage is reported, not raised.
    """
    try:
        file = ArchiveFile(path)
    except DamagedError as error:
        return [_error(str(path), str(error))]
    try:
        return _verify(file)
    finally:
        file.close()


def _verify(file: ArchiveFile) -> list[Problem]:
    where = str(file.path)
    recorded = file.recorded_digest
    if recorded is not None and recorded == _digest(file):
        return _structure(file)
    bad = bad_records(file)
    problems: list[Problem] = []
    if recorded is not None:
        place = "" if bad else "; the damage lies in no record, so in zip headers or padding"
        message = f"its bytes do not give the recorded digest {recorded}{place}"
        problems.append(_error(where, message))
    elif file.comment:
        problems.append(_error(where, "the zip comment is no digest of ours; was it damaged?"))
    else:
        warning = "no digest is recorded; only the structure and the zip checksums were checked"
        problems.append(Problem(severity=Severity.WARNING, file=where, message=warning))
    return [*problems, *bad, *_structure(file)]


def bad_records(file: ArchiveFile) -> list[Problem]:
    """The records whose bytes do not give their CRC32, each with the tensor that it holds.

    An archive written without checksums (all zero) cannot be checked this way.
    """
    if not any(record.crc32 for record in file.records.values()):
        return []
    bad = [r for r in file.records.values() if _crc32(file, r) != r.crc32]
    if not bad:
        return []
    keys = _tensor_keys(file)
    return [_bad_record(file, record, keys) for record in bad]


def _bad_record(file: ArchiveFile, record: Record, keys: dict[str, list[str]]) -> Problem:
    names = keys.get(record.name, [])
    holds = f", which holds {', '.join(names[:5])}" if names else ""
    return Problem(
        severity=Severity.ERROR,
        file=str(file.path),
        message=f"the bytes of record {record.name}{holds} do not give its checksum",
        tensor=names[0] if names else None,
    )


def _structure(file: ArchiveFile) -> list[Problem]:
    """Problems of the zip entries and the pickle; a pickle that we refuse to read is no damage."""
    try:
        read_tree(file, find_root(file), ())
    except UnsafePickleError as error:
        message = f"its structure was not checked: {error}"
        return [Problem(severity=Severity.WARNING, file=str(file.path), message=message)]
    except DamagedError as error:
        return [_error(str(file.path), str(error))]
    return []


def _tensor_keys(file: ArchiveFile) -> dict[str, list[str]]:
    """Dotted keys of the tensors in each record, as far as the pickle can still be read."""
    keys: dict[str, list[str]] = {}
    try:
        root = find_root(file)
        tree = read_tree(file, root, ())
    except (DamagedError, UnsafePickleError):
        return keys
    for key, tensor in walk_tensors(tree):
        keys.setdefault(f"{root}/data/{tensor.storage_key}", []).append(key)
    return keys


def _digest(file: ArchiveFile) -> str:
    digest = xxhash.xxh3_128()
    for piece in _pieces(file, 0, file.nbytes - len(file.comment)):
        digest.update(piece)
    return str(digest.hexdigest())


def _crc32(file: ArchiveFile, record: Record) -> int:
    value = 0
    for piece in _pieces(file, record.start, record.end):
        value = zlib.crc32(piece, value)
    return value


def _pieces(file: ArchiveFile, start: int, end: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PIECE_NBYTES, max(end - start, 0))))
    for offset in range(start, end, PIECE_NBYTES):
        piece = buffer[: min(PIECE_NBYTES, end - offset)]
        file.read_into(piece, offset)
        yield piece


def _error(file: str, message: str) -> Problem:
    return Problem(severity=Severity.ERROR, file=file, message=message)
