"""Heads of HTTP/1.1 messages as the data plane needs them; no I/O.

The standard library's parser costs more than receiving a small batch. It still reads whatever is no plain
good answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from corpus_client import errors

MAX_BYTES = 65_536
END = b"\r\n\r\n"

_UNFIT_TARGET = re.compile(r"[^!-~]")
_UNFIT_HEADER = re.compile(r"[^\t -~\x80-\xff]")
_GOOD = re.compile(rb"HTTP/1\.1 200(?: [^\r\n]*)?\r\n")


class Headers:
    """Headers of an answer; names in any case, of repeated ones the last.

    Args:
        lines: of the head, without its first one.
    """

    def __init__(self, lines: bytes) -> None:
        self._values: dict[str, str] = {}
        for line in lines.decode("latin-1").split("\r\n"):
            name, _, value = line.partition(":")
            self._values[name.lower()] = value.strip()

    def get(self, name: str, /) -> str | None:
        """The header's value."""
        return self._values.get(name.lower())


def good_answer(head: bytes) -> Headers | None:
    """Headers of a head that says 200 in HTTP/1.1; None: it says something else."""
    line = _GOOD.match(head)
    return None if line is None else Headers(head[line.end() : -len(END)])


def request_lines(host: str, headers: Mapping[str, str]) -> bytes:
    """All of a request's head but its first line.

    Raises:
        InvalidArgument: a header would be more than one line.
    """
    lines = {"Host": host, "Accept-Encoding": "identity", **headers}
    for name, value in lines.items():
        if _UNFIT_HEADER.search(name + value) or ":" in name or not name:
            raise errors.InvalidArgument(f"headers must be single lines of Latin-1, got {name!r}")
    return "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1") + b"\r\n"


def request_line(target: str) -> bytes:
    """First line of a GET.

    Raises:
        InvalidArgument: the target holds what a URL spells with percent signs.
    """
    if _UNFIT_TARGET.search(target):
        raise errors.InvalidArgument(f"url must be percent-encoded ASCII, got {target!r}")
    return f"GET {target} HTTP/1.1\r\n".encode()
