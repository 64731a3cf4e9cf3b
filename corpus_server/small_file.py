"""Read small files that a person names: configuration, access tokens.

Such a path may be a pipe, a device, or a file of gigabytes. None of these may make the process wait or take
its memory.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 16 * 2**20
"""Bytes of a configuration of 10,000 corpora, four times over."""


def read_small_file(path: Path, *, max_bytes: int = MAX_BYTES) -> tuple[str, os.stat_result]:
    """Return the text of a regular file, and its state before it was read.

    Raises:
        OSError: it cannot be read, is no regular file, is too large, or changed meanwhile.
        UnicodeDecodeError: it is no UTF-8.
    """
    # O_NONBLOCK: opening a pipe to which nobody writes would wait; regular files ignore it.
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # noqa: PTH123
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "expected a regular file, found another kind", str(path))
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise OSError(errno.EFBIG, f"expected at most {max_bytes} bytes, found more", str(path))
        if len(content) != about.st_size:
            raise OSError(errno.EAGAIN, "the file changed while it was read", str(path))
    return content.decode("utf-8"), about


def reason_of(error: Exception) -> str:
    """Return why a file could not be read or parsed, in one short line."""
    if isinstance(error, RecursionError):
        return "its tables and lists are nested too deeply"
    return f"{getattr(error, 'strerror', None) or error}"[:300]
