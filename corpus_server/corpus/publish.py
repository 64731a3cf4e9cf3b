"""Publish a file or a folder completely or not at all, even if the process crashes.

The content is written to a temporary file, flushed to disk and renamed. The temporary file is hidden, lies
in the same folder (a rename cannot cross file systems) and is locked while it is written. The kernel
unlocks what a killed process left behind, and the next writer takes it over. A folder is treated alike.
A command publishes nothing if a file that it has open changed, see `watched`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from corpus_server import watched
from corpus_server.errors import InvalidParameter
from corpus_server.user_files import reason_of

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux
_BUSY = "another process is writing it"


def check_new(path: Path) -> None:
    """Raise InvalidParameter where no new file can be written, before hours are spent on what it is to hold.

    Commands replace no file that exists: one that they wrote themselves may be in use.
    """
    try:
        if path.exists() or path.is_symlink():
            raise InvalidParameter(f"{path} exists; name another file, or remove it")
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        raise InvalidParameter(f"{path} cannot be written: {reason_of(error)}; name another place") from error


@contextmanager
def publishing(
    path: Path, *, durable: bool = True, of: Iterable[watched.Watched] | None = None
) -> Iterator[BinaryIO]:
    """Yield an empty file that becomes `path` when the block ends without an error.

    Args:
        durable: else it need not outlive a crash of the machine, and the disk is not waited for.
        of: the files that its content follows from; None: all that are open.

    Raises:
        OSError: BlockingIOError if another process is writing the same file; `path` is a folder, or a device.
        CorpusChanged, ReadFailed: see `watched.check`.
    """
    temporary = _temporary(path)
    if path.exists() and not path.is_file():  # a rename would put the file in place of /dev/null
        raise OSError(errno.EINVAL, "expected a new or a regular file, found another kind", str(path))
    try:
        with os.fdopen(_lock(temporary, os.O_RDWR | os.O_CREAT), "r+b") as file:
            file.truncate()
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            watched.check(of)
            watched.published(file.fileno())
            temporary.replace(path)
    except BaseException:
        # Not if another process holds the lock: the file is its own.
        with suppress(OSError):
            remove_stale(path)
        raise
    if durable:
        sync_folder(path.parent)


@contextmanager
def publishing_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `path`, as `publishing` does.

    The block flushes the files that it writes; the names in the folder and its subfolders are flushed here.
    `path` must not hold anything, unless `replace` is set: then what it holds is removed.
    """
    temporary = _temporary(path)
    with suppress(FileExistsError):  # `exist_ok` would look again, when somebody may have removed it
        temporary.mkdir()
    lock = _lock(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            for entry in temporary.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            yield temporary
            for folder, _, _ in os.walk(temporary):
                sync_folder(Path(folder))
            watched.check()
            if replace and path.exists():
                _replace(temporary, path)
            else:
                temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        os.close(lock)
    sync_folder(path.parent)


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield a new hidden folder, which is removed in the end; that of a killed process by the next one."""
    flags = os.O_RDONLY | os.O_DIRECTORY
    for stale in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # BlockingIOError: its process lives
            lock = _lock(stale, flags)
            shutil.rmtree(stale, ignore_errors=True)
            os.close(lock)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(BlockingIOError):  # one that begins at the same time took it for stale
            lock = _lock(folder, flags)
            break
    try:
        try:
            yield folder
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(temporary: Path, path: Path) -> None:
    """Give a folder the name of another one, and remove that."""
    first, second = os.fsencode(temporary), os.fsencode(path)
    if ctypes.CDLL(None, use_errno=True).renameat2(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE):
        # Network file systems cannot exchange names: for a moment there is no folder of this name.
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        temporary.rename(path)
        shutil.rmtree(old)
    else:
        shutil.rmtree(temporary)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to disk, so that a rename or a new file survives a power failure."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_stale(path: Path) -> None:
    """Remove the temporary file that a killed process left, if any. `publishing` needs no such call."""
    temporary = _temporary(path)
    if temporary.exists():
        lock = _lock(temporary, os.O_RDWR | os.O_CREAT)
        try:
            temporary.unlink()
        finally:
            os.close(lock)


def _temporary(path: Path) -> Path:
    if path.name in ("", ".."):  # `.` and `/`
        raise IsADirectoryError(errno.EISDIR, "it is the name of a folder", str(path))
    return path.with_name(f".{path.name}.tmp")


def _lock(temporary: Path, flags: int) -> int:
    """Open a temporary file or folder and lock it; return the descriptor."""
    while True:
        try:
            fd, is_ours = os.open(temporary, flags | os.O_CLOEXEC, 0o666), False
        except FileNotFoundError as error:
            if not flags & os.O_DIRECTORY:
                raise
            raise BlockingIOError(errno.EAGAIN, _BUSY) from error  # who removed a folder also writes it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and lock, another process may have published or removed it.
            with suppress(FileNotFoundError):
                is_ours = os.path.samestat(os.fstat(fd), temporary.stat())
        except BlockingIOError as error:
            raise BlockingIOError(errno.EAGAIN, _BUSY) from error
        finally:
            if not is_ours:
                os.close(fd)
        if is_ours:
            return fd
        if not flags & os.O_CREAT:  # a folder that is published now cannot be replaced
            raise BlockingIOError(errno.EAGAIN, _BUSY)
