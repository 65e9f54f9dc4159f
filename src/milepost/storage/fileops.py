"""The file operations of Milepost, one function each: the only place that changes a file system.

Everything that is saved goes through here, so a test can record the operations of a real save and
make each of them fail, be cut short, or be the last thing the process does (`hooked`). Offsets and
sizes are in bytes. Functions raise `OSError` as the system call does; callers turn it into
`StorageError` where they know which part of which checkpoint is concerned.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

Buffer: TypeAlias = bytes | bytearray | memoryview
PathLike: TypeAlias = str | os.PathLike[str]
T = TypeVar("T")

Hook: TypeAlias = Callable[[str, str, Callable[..., Any], tuple[Any, ...]], Any]
"""Called as `hook(operation, target, function, arguments)`; it calls the function or does not."""

_hook: Hook | None = None
_paths: dict[int, str] = {}

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
SYNC_FILE_RANGE_WRITE = 2
FALLOC_FL_KEEP_SIZE = 1
_AT_FDCWD = -100
_FICLONE = 0x40049409
_NO_CLONES = frozenset(
    {
        errno.EOPNOTSUPP,
        errno.ENOTTY,
        errno.ENOSYS,
        errno.EINVAL,
        errno.EXDEV,
        errno.EPERM,
        errno.EACCES,
        errno.ENOENT,
    }
)


@contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Send every operation of this process through `hook` while the block runs.

    Inside another such block, `hook` comes first, and what it calls goes through the outer one.
    """
    global _hook
    before = _hook
    _hook = hook if before is None else _chained(hook, before)
    try:
        yield
    finally:
        _hook = before


def _chained(inner: Hook, outer: Hook) -> Hook:
    def hook(
        operation: str, target: str, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Any:
        def through_outer(*passed: Any) -> Any:
            return outer(operation, target, function, passed)

        return inner(operation, target, through_outer, arguments)

    return hook


def _run(operation: str, target: str, function: Callable[..., T], *arguments: Any) -> T:
    while True:
        try:
            if _hook is None:
                return function(*arguments)
            result: T = _hook(operation, target, function, arguments)
            return result
        except InterruptedError:  # a signal came first; none of these operations has half happened
            continue


def _libc() -> ctypes.CDLL:
    global _libc_handle
    if _libc_handle is None:
        _libc_handle = ctypes.CDLL(None, use_errno=True)
    return _libc_handle


_libc_handle: ctypes.CDLL | None = None


def _checked(result: int, path: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)


def open_file(path: PathLike, flags: int, mode: int = 0o666) -> int:
    """Open for writing and return the descriptor; the mode is cut by the umask."""
    descriptor = _run("open", str(path), os.open, path, flags | os.O_CLOEXEC, mode)
    _paths[descriptor] = str(path)
    return descriptor


def close_file(descriptor: int) -> None:
    _paths.pop(descriptor, None)
    os.close(descriptor)


def _name(descriptor: int) -> str:
    return _paths.get(descriptor, f"descriptor {descriptor}")


def write_at(descriptor: int, data: Buffer, offset: int) -> None:
    """Write all of `data` at `offset`; a short write is continued."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        count = _run("write", _name(descriptor), os.pwrite, descriptor, view, offset)
        if count == 0:
            raise OSError(errno.EIO, "a write made no progress", _name(descriptor))
        view = view[count:]
        offset += count


def map_file(descriptor: int, offset: int, nbytes: int) -> mmap.mmap:
    """Bytes of a file, from a multiple of the page size on, as memory that is written through."""
    return _run("map", _name(descriptor), _mmap, descriptor, offset, nbytes)


def _mmap(descriptor: int, offset: int, nbytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, nbytes, offset=offset)


def truncate_file(descriptor: int, nbytes: int) -> None:
    _run("truncate", _name(descriptor), os.ftruncate, descriptor, nbytes)


def reserve_file(descriptor: int, nbytes: int) -> bool:
    """Reserve blocks for `nbytes` and set the size; False where the file system cannot."""
    return _run("reserve", _name(descriptor), _fallocate, descriptor, nbytes)


def _fallocate(descriptor: int, nbytes: int) -> bool:
    if nbytes == 0:
        return True
    call = _libc().fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(descriptor, 0, 0, nbytes) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(number, os.strerror(number), _name(descriptor))


def start_writeback(descriptor: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to begin writing this range to disk; a hint, so a refusal is no error."""
    call = _libc().sync_file_range
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call(descriptor, offset, nbytes, SYNC_FILE_RANGE_WRITE)


def sync_data(descriptor: int) -> None:
    """`fdatasync`. A failure is final: what it lost is not known, so it is never tried again."""
    _run("fsync", _name(descriptor), os.fdatasync, descriptor)


def sync_directory(path: PathLike) -> None:
    """Make the entries of a directory durable: names created, renamed or removed in it."""
    _run("fsync-directory", str(path), _fsync_directory, path)


def _fsync_directory(path: PathLike) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: PathLike, mode: int = 0o777) -> None:
    _run("mkdir", str(path), os.mkdir, path, mode)


def make_directories(path: PathLike) -> None:
    """Create a directory and its missing parents, each made durable in its own parent."""
    target = Path(path)
    if target.is_dir():
        return
    make_directories(target.parent)
    try:
        make_directory(target)
    except FileExistsError:
        if not target.is_dir():
            raise
        return
    sync_directory(target.parent)


def rename(source: PathLike, target: PathLike) -> None:
    """Rename; a file that has the target's name is replaced at once."""
    _run("rename", f"{source} -> {target}", os.rename, source, target)


def rename_no_replace(source: PathLike, target: PathLike) -> None:
    """Rename; `FileExistsError` when the target exists, even as an empty directory."""
    _run("rename", f"{source} -> {target}", _rename_no_replace, str(source), str(target))


def _rename_no_replace(source: str, target: str) -> None:
    try:
        _renameat2(source, target, RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EINVAL):
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(source, target)


def exchange(first: PathLike, second: PathLike) -> bool:
    """Swap two names at once; False where the file system or kernel cannot."""
    return _run("exchange", f"{first} <-> {second}", _exchange, str(first), str(second))


def _exchange(first: str, second: str) -> bool:
    try:
        _renameat2(first, second, RENAME_EXCHANGE)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL):
            return False
        raise
    return True


def _renameat2(source: str, target: str, flags: int) -> None:
    call = getattr(_libc(), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    _checked(call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags), source)


def link(source: PathLike, target: PathLike) -> None:
    """Hard link; `OSError` (EPERM, EOPNOTSUPP, EXDEV, EMLINK) where that cannot be."""
    _run("link", f"{source} -> {target}", os.link, source, target)


def clone_file(descriptor: int, source: PathLike) -> bool:
    """Give an empty file the bytes of `source`, which the two then share on disk (a reflink).

    Neither changes with the other. False, and nothing is changed, where that cannot be.
    """
    return _run("clone", _name(descriptor), _clone, descriptor, str(source))


def _clone(descriptor: int, source: str) -> bool:
    try:
        origin = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, _FICLONE, origin)
        finally:
            os.close(origin)
    except OSError as error:
        if error.errno not in _NO_CLONES:
            raise
        return False
    return True


def symlink(content: str, target: PathLike) -> None:
    _run("symlink", str(target), os.symlink, content, target)


def unlink(path: PathLike) -> None:
    """Remove a name; no error when it is gone already."""
    _run("unlink", str(path), _unlink, path)


def _unlink(path: PathLike) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


def remove_directory(path: PathLike) -> None:
    _run("rmdir", str(path), os.rmdir, path)


def change_mode(path: PathLike, mode: int) -> None:
    _run("chmod", str(path), os.chmod, path, mode)


def set_times(path: PathLike, *, ns: tuple[int, int]) -> None:
    """Set access and modification time, in nanoseconds since the epoch."""
    _run("utime", str(path), _utime, path, ns)


def _utime(path: PathLike, ns: tuple[int, int]) -> None:
    os.utime(path, ns=ns)


def remove_tree(path: PathLike) -> None:
    """Remove a directory and all below it, never through a symlink; no error when it is gone.

    The caller has renamed it out of the way first, so a crash in the middle leaves nothing that
    looks like a checkpoint.
    """
    try:
        entries = list(os.scandir(path))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            remove_tree(entry.path)
        else:
            unlink(entry.path)
    remove_directory(path)
