"""Decode JSON arrays of any size, one element at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from corpus_server.user_files import json_limits, once_each

_SPACE: Final = re.compile(r"[ \t\n\r\ufeff]*")  # `cat` leaves byte order marks between arrays
# Characters before the end of what was read at which an error may come from the end: -Infinity and \\ud83d.
_NEAR: Final = 64


def records(texts: Iterator[str]) -> Iterator[Any]:
    """Yield the elements of the arrays that follow one another in a text, which comes some at a time.

    Numbers keep their digits, NaN and Infinity are numbers, as Python writes them.

    Raises:
        GivenTwice: an object gives a name twice.
        ValueError: it is no such text.
    """
    text = _Text(texts)
    while mark := text.next():
        text.expect("[")
        mark = text.next()
        while mark != "]":
            yield text.value()
            mark = text.next()
            if mark != "]":
                text.expect(",")
        text.expect("]")


class _Text:
    """A text that comes some at a time, of which little more than one value is held."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts, self._held, self._at = texts, "", 0
        self._decoder = json.JSONDecoder(object_pairs_hook=once_each)

    def next(self) -> str:
        """Return the next character that is no white space, "" at the end."""
        while True:
            if (found := _SPACE.match(self._held, self._at)) is not None:
                self._at = found.end()
            if self._at < len(self._held):
                return self._held[self._at]
            if not self._more():
                return ""

    def expect(self, mark: str) -> None:
        """Pass a character."""
        if (found := self.next()) != mark:
            raise ValueError(f"expected {mark!r}, found {found!r}" if found else "it ends inside an array")
        self._at += 1

    def value(self) -> Any:
        """Pass a value and return it."""
        self.next()
        while True:
            try:
                with json_limits():
                    value, stop = self._decoder.raw_decode(self._held, self._at)
            except json.JSONDecodeError as error:
                is_cut = error.pos > len(self._held) - _NEAR or error.msg.startswith("Unterminated string")
                if not is_cut or not self._more():
                    raise ValueError(error.msg) from error
                continue
            if stop < len(self._held) or not self._more():  # else a number may go on
                self._at = stop
                return value

    def _more(self) -> bool:
        """Hold at least twice as much, so that a large value is not decoded again for each piece of it."""
        self._held, self._at = self._held[self._at :], 0
        some, size = [self._held], 0
        for text in self._texts:
            some.append(text)
            size += len(text)
            if size >= max(1, len(self._held)):
                break
        self._held = "".join(some)
        return size > 0
