"""Files that a person names, wrote or changed: plans, bills, proofs, tokens."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from typing import Any

_NONBLOCK = getattr(os, "O_NONBLOCK", 0)  # Windows has none, and no named pipes among its files


def without_waiting(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=)`; a named pipe would wait for its writer."""
    return os.open(path, flags | _NONBLOCK)


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the UTF-8 text of a file, or of a pipe while somebody writes into it, as `<(...)` of a shell.

    Never waits for a writer to come, as opening a named pipe does.

    Raises:
        OSError: it cannot be read, is a device, or a pipe into which nobody writes.
        UnicodeDecodeError: it is no text.
    """
    with open(path, "rb", opener=without_waiting) as file:
        mode = os.fstat(file.fileno()).st_mode
        if stat.S_ISCHR(mode) and not file.isatty():  # /dev/zero has no end
            raise OSError(errno.EINVAL, "expected a file, found a device", os.fspath(path))
        if _NONBLOCK:
            os.set_blocking(file.fileno(), True)
        content = file.read()
    if stat.S_ISFIFO(mode) and not content:
        raise OSError(errno.EINVAL, "expected a file, found a pipe into which nobody writes", os.fspath(path))
    return content.decode()


def parse_json(text: str) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it is none, or an object of it gives a name twice: which value is meant is not known.
    """
    return json.loads(text, object_pairs_hook=_once_each)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.80} is given twice")
    return fields
