"""Publishes a file whole or not at all, also after a crash: written aside, flushed to disk, renamed.

The file aside is hidden, lies in the same folder (a rename does not cross file systems) and is
locked while it is written; what a killed process left of it is unlocked, and taken over.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def publishing(path: Path) -> Iterator[BinaryIO]:
    """Yield an empty file that becomes `path` when the block ends without an error.

    Raises:
        OSError: the folder or the disk refuses, or another process is writing the same file; `path`
            is what it was before.
    """
    temporary = _temporary(path)
    try:
        with _open_locked(temporary) as file:
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        # An interrupt may come as soon as the file exists. What another process writes is locked, and stays.
        with suppress(OSError):
            remove_stale(path)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def remove_stale(path: Path) -> None:
    """Remove what a killed process left aside of `path`, if anything; `publishing` does so by itself."""
    temporary = _temporary(path)
    if temporary.exists():
        with _open_locked(temporary):
            temporary.unlink()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _open_locked(temporary: Path) -> BinaryIO:
    while True:
        file = os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Before it was locked here, another process may have published or removed this very file.
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
