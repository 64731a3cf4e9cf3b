"""Tables of flatbuffers, read one field at a time; Arrow's metadata consists of them.

Fields have the numbers of their places in the schema (`*.fbs`); a field that is absent is 0, empty or None.
Damage raises struct.error or ValueError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any


def unpack(form: str, data: bytes, at: int) -> Any:
    """Return the number at byte `at`."""
    if at < 0:  # `unpack_from` would count from the end
        raise ValueError("an offset in its metadata is negative")
    return struct.unpack_from(form, data, at)[0]


@dataclass(frozen=True, slots=True)
class Table:
    """A table, and the flatbuffer that holds it."""

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> Table:
        """Return the table that a flatbuffer is."""
        return cls(data, unpack("<I", data, 0))

    def _place(self, field: int) -> int:
        vtable = self.at - unpack("<i", self.data, self.at)
        if 4 + 2 * field >= unpack("<H", self.data, vtable):
            return 0
        offset: int = unpack("<H", self.data, vtable + 4 + 2 * field)
        return self.at + offset if offset else 0

    def _target(self, field: int) -> int:
        place = self._place(field)
        return place + unpack("<I", self.data, place) if place else 0

    def number(self, field: int, form: str) -> int:
        """Return a number of the form of `struct`."""
        place = self._place(field)
        return int(unpack(form, self.data, place)) if place else 0

    def table(self, field: int) -> Table | None:
        """Return a table inside this one."""
        target = self._target(field)
        return Table(self.data, target) if target else None

    def vector(self, field: int, form: str) -> list[tuple[Any, ...]]:
        """Return a list of numbers or structs of one form."""
        if not (target := self._target(field)):
            return []
        count, size = unpack("<I", self.data, target), struct.calcsize(form)
        found = self.data[target + 4 : target + 4 + count * size]
        if len(found) != count * size:
            raise ValueError("a list in its metadata is longer than the metadata")
        return list(struct.iter_unpack(form, found))

    def text(self, field: int) -> str:
        """Return a text."""
        return b"".join(byte for (byte,) in self.vector(field, "<c")).decode()

    def tables(self, field: int) -> list[Table]:
        """Return a list of tables."""
        first = self._target(field) + 4
        offsets = self.vector(field, "<I")
        return [Table(self.data, first + 4 * i + offset) for i, (offset,) in enumerate(offsets)]
