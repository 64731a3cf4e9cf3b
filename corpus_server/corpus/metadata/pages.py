"""Sizes of the pages of a Parquet column, from their headers alone: pyarrow tells them only after decoding.

A page header is a Thrift struct in the compact protocol, of which fields 2 and 3 are the bytes of the page
before and after compression (parquet.thrift of parquet-format 2.10; thrift-compact-protocol.md of Apache
Thrift 0.20). A value lies in one page, so no value is larger than the largest page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_HEADER_BYTES: Final = 1 << 14
"""Read at once: a header has some 30 bytes, or more with the range of the values, which writers cut."""

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(1, 13)


def largest_page(read: Callable[[int, int], bytes], start: int, stop: int) -> int:
    """Return the bytes of the largest page, uncompressed, of a column chunk in bytes [start, stop) of a file.

    Args:
        read: returns so many bytes of the file from an offset on.

    Raises:
        ValueError: there are no page headers.
    """
    largest = 0
    while start < stop:
        header = _Compact(read(start, min(_HEADER_BYTES, stop - start)))
        sizes = header.struct()
        size, compressed = sizes.get(2, -1), sizes.get(3, -1)
        if size < 0 or compressed < 0:
            raise ValueError(f"byte {start} begins no page of a column")
        largest = max(largest, size)
        start += header.at + compressed
    return largest


class _Compact:
    """Reads a Thrift struct; `at` is the byte after what was read."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.at = 0

    def struct(self) -> dict[int, int]:
        """Return the integers of a struct by the numbers of their fields; skip all else."""
        found, number = {}, 0
        while head := self._byte():
            kind, delta = head & 15, head >> 4
            number = number + delta if delta else _signed(self._varint())
            if kind in (_I16, _I32, _I64):
                found[number] = _signed(self._varint())
            elif kind not in (_TRUE, _FALSE):
                self._skip(kind)
        return found

    def _skip(self, kind: int) -> None:
        if kind in (_TRUE, _FALSE, _BYTE):  # of a list: a field's value is in its head
            self.at += 1
        elif kind in (_I16, _I32, _I64):
            self._varint()
        elif kind == _DOUBLE:
            self.at += 8
        elif kind == _BINARY:
            self.at += self._varint()
        elif kind in (_LIST, _SET):
            head = self._byte()
            for _ in range(self._varint() if head >> 4 == 15 else head >> 4):
                self._skip(head & 15)
        elif kind == _STRUCT:
            self.struct()
        else:
            raise ValueError(f"a page header has a field of type {kind}")

    def _byte(self) -> int:
        if self.at >= len(self._content):
            raise ValueError("a page header has no end")
        self.at += 1
        return self._content[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a page header has a number without an end")


def _signed(value: int) -> int:
    return (value >> 1) ^ -(value & 1)
