"""Read files that a person names: tokens, indexes, tokenizers, configuration, access tokens; lock folders.

Such a path may lead to a named pipe, whose reader waits for a writer, to a device without an end, or to
gigabytes. Such a text may be nested 10,000 deep or hold a number of 5,000 digits. Readers get an OSError
or a ValueError at once.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import io
import json
import os
import stat
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
"""Bytes of a configuration of 10,000 corpora, four times over."""

_TOO_DEEP = "is nested deeper than the 1,000 levels or so that can be read"
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_fd(path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; return its descriptor and status. Never waits for a writer."""
    try:
        # A named pipe would block without O_NONBLOCK, which regular files ignore.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as error:  # a NUL in the path
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            found = _KINDS.get(stat.S_IFMT(status.st_mode), "another kind")
            raise OSError(errno.EINVAL, f"expected a regular file, found {found}", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd, status


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file as `open_fd` does; unbuffered."""
    return io.FileIO(open_fd(path)[0])


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.readall()


def read_small_file(path: Path, *, max_bytes: int = MAX_BYTES) -> tuple[str, os.stat_result]:
    """Return the UTF-8 text of a regular file, and its state before it was read.

    Raises an OSError if the file is too large, or changed meanwhile.
    """
    fd, about = open_fd(path)
    with io.FileIO(fd) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"expected at most {max_bytes} bytes, found more", str(path))
    if len(content) != about.st_size:
        raise OSError(errno.EAGAIN, "the file changed while it was read", str(path))
    return content.removeprefix(codecs.BOM_UTF8).decode(), about


def read_given(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Return the UTF-8 text of a file, or of a pipe while somebody writes into it, as `<(...)` of a shell.

    For what a command reads once. Never waits for a writer to come, as opening a named pipe does.

    Raises an OSError if it is too large, a device, or a pipe into which nobody writes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:  # noqa: PTH123
        mode = os.fstat(fd).st_mode
        if stat.S_ISCHR(mode) and not os.isatty(fd):  # /dev/zero has no end
            raise OSError(errno.EINVAL, "expected a file, found a device", str(path))
        os.set_blocking(fd, True)
        content = file.read(max_bytes + 1)
    if stat.S_ISFIFO(mode) and not content:
        raise OSError(errno.EINVAL, "expected a file, found a pipe into which nobody writes", str(path))
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"expected at most {max_bytes} bytes, found more", str(path))
    return content.removeprefix(codecs.BOM_UTF8).decode()


def is_lfs_pointer(head: bytes) -> bool:
    """Tell whether a file begins as the note that Git LFS leaves in place of a large file."""
    return head.startswith(b"version https://git-lfs")


class BeyondLimit(ValueError):
    """A text that is right, and beyond what can be read; the message is a predicate."""


class GivenTwice(BeyondLimit):
    """An object of JSON in which a name stands twice: which of its values is meant is not known."""


@contextmanager
def json_limits() -> Iterator[None]:
    """Raise `BeyondLimit` where Python's parser meets one of its limits."""
    try:
        yield
    except RecursionError:
        raise BeyondLimit(_TOO_DEEP) from None
    except (UnicodeError, GivenTwice):
        raise
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise
        digits = sys.get_int_max_str_digits()
        raise BeyondLimit(f"holds a whole number of more than {digits:,} digits") from None


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of some names and values, as `object_pairs_hook` of `json.loads` gives them."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise GivenTwice(f"{name!r:.80} is given twice")
    return fields


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it cannot be read, or an object gives a name twice.
    """
    with json_limits():
        return json.loads(text, object_pairs_hook=once_each)


def parse_toml(text: str) -> dict[str, Any]:
    """Return what a TOML text says; raise ValueError for whatever cannot be read."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise BeyondLimit(_TOO_DEEP) from None


def reason_of(error: BaseException) -> str:
    """Return why a file could not be read or parsed, in one short line without the path and the number."""
    return f"{getattr(error, 'strerror', None) or error}"[:300]


def folders_with(folder: Path | None, holds: Callable[[Path], bool]) -> dict[str, Path]:
    """Return a folder and the folders in it, as far as `holds` says so; by name, in order of the names.

    A folder in it that cannot be looked into is returned, too: to read it says why. One that another user
    keeps to himself must not hide all others.
    """
    if folder is None or not folder.exists():
        return {}
    found = {folder.name: folder} if holds(folder) else {}
    for each in sorted(each for each in folder.iterdir() if each.is_dir()):
        try:
            is_there = holds(each)
        except OSError:
            is_there = True
        if is_there:
            found[each.name] = each
    return found


@contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Be the only one, of all processes, who does something with a folder; a lock ends with its process."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
