"""Whether the files that a command reads are what they were when it opened them.

A command opens them in many places and reads them through maps and by `read`. So every file that is opened is
looked at in one place: before anything is published, before anything is printed, and when the command ends. A
server looks after each copy instead, and goes on when a file changed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from corpus_server.errors import CorpusServerError


class Watched(Protocol):
    """A file that is open."""

    @property
    def path(self) -> Path:
        """Where it lay at opening."""

    def unreported(self) -> CorpusServerError | None:
        """Return why bytes that were read may be wrong; None if they are right, or an error has said it."""


# Each change is one operation of C code: a garbage collection, which may close files, needs no lock.
_files: set[weakref.ref[Watched]] = set()
_closed: list[CorpusServerError] = []
_published: set[tuple[int, int]] = set()  # device and inode
_watches: list[object] = []


@contextmanager
def watching() -> Iterator[None]:
    """Raise at the end of the block what is wrong with a file that it read, also instead of another error.

    Numbers that a changed file holds lead anywhere: an error that they cause says what changed.
    """
    watch = object()
    _watches.append(watch)
    try:
        yield
        check()
    except Exception:
        check()
        raise
    finally:
        _watches.remove(watch)
        if not _watches:
            _closed.clear()
            _published.clear()


def is_watching() -> bool:
    """Tell whether a block of `watching` runs."""
    return bool(_watches)


def check(files: Iterable[Watched] | None = None) -> None:
    """Raise CorpusChanged or ReadFailed if a file that the block read may have been read wrong.

    Args:
        files: look at these alone; None: at all that are open, 3 us each.
    """
    if not _watches:
        return
    for error in _closed[:1]:
        raise error
    known = (each() for each in _files.copy()) if files is None else files
    for file in known:
        if file is not None and (found := _error(file)) is not None:
            raise found


def opened(file: Watched) -> None:
    """Note a file that is open."""
    _files.add(weakref.ref(file))


def closing(file: Watched) -> None:
    """Look at a file for the last time."""
    _files.discard(weakref.ref(file))
    if _watches and (found := _error(file)) is not None:
        _closed.append(found)


def published(fd: int) -> None:
    """Note a file that takes its place now: what it replaces was read before, and has not changed."""
    if _watches:
        status = os.fstat(fd)
        _published.add((status.st_dev, status.st_ino))


def _error(file: Watched) -> CorpusServerError | None:
    if (found := file.unreported()) is None:
        return None
    try:
        status = file.path.stat()
    except OSError:
        return found
    return None if (status.st_dev, status.st_ino) in _published else found
