"""Publish a file or a folder completely or not at all, even if the process crashes.

The content is written to a temporary file, flushed to disk and renamed. The temporary file is hidden, lies
in the same folder (a rename cannot cross file systems) and is locked while it is written. The kernel
unlocks what a killed process left behind, and the next writer takes it over. A folder is treated alike.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def publishing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield an empty file that becomes `path` when the block ends without an error.

    If not `durable`, it need not outlive a crash of the machine, and the disk is not waited for.

    Raises:
        OSError: the folder or the disk refuses, or another process is writing the same file.
    """
    temporary = _temporary(path)
    try:
        with _open_locked(temporary) as file:
            file.truncate()
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        # Not if another process holds the lock: the file is its own.
        with suppress(OSError):
            remove_stale(path)
        raise
    if durable:
        sync_folder(path.parent)


@contextmanager
def publishing_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `path` when the block ends without an error.

    The block flushes the files that it writes; the names in the folder and its subfolders are flushed here.

    Raises:
        OSError: the folder or the disk refuses, `path` is not empty, or another process is writing it.
    """
    temporary = _temporary(path)
    temporary.mkdir(exist_ok=True)
    lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and lock, another process may have published this folder.
            ours = os.path.samestat(os.fstat(lock), temporary.stat())
        except (BlockingIOError, FileNotFoundError):
            ours = False
        if not ours:
            raise BlockingIOError(errno.EAGAIN, "another process is writing it")
        try:
            _empty(temporary)
            yield temporary
            for folder, _, _ in os.walk(temporary):
                sync_folder(Path(folder))
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        os.close(lock)
    sync_folder(path.parent)


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
        with _open_locked(temporary):
            temporary.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _open_locked(temporary: Path) -> BinaryIO:
    while True:
        file = os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and lock, another process may have published or removed this file.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), temporary.stat()):
                    return file
        except BlockingIOError as error:
            file.close()
            raise BlockingIOError(errno.EAGAIN, "another process is writing it") from error
        except BaseException:
            file.close()
            raise
        file.close()
