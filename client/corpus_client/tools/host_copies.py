"""Copies within host memory: what a batch costs before it can set out.

NumPy does them, on one thread, as the thread of a loader would.
"""

from __future__ import annotations

import mmap
from functools import partial

import numpy as np
import numpy.typing as npt

from corpus_client.tools.measurement import Measurement, measured
from corpus_client.tools.timing import Call, HostMeter

Bytes = npt.NDArray[np.uint8]
HUGE_PAGE = 2 << 20
ROW = 2050
"""Bytes of 1,025 uint16 tokens, the row of the strided copies; rows lie two of these apart."""


def fresh(num_bytes: int, *, huge: bool = False) -> Bytes:
    """Memory from the kernel, page aligned: none of it is there before it is written to."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def touched(num_bytes: int) -> Bytes:
    """The same, written to once; the numbers 0 to 255 over and over."""
    memory = fresh(num_bytes)
    memory[:] = np.resize(np.arange(256, dtype=np.uint8), num_bytes)
    return memory


def by_size(sizes: list[int], repeats: int) -> list[Measurement]:
    """Into memory that was used before, off its page border, and into fresh pages, small and huge."""
    return [
        measured("copies", name, size, HostMeter().time(call, repeats=repeats))
        for size in sizes
        for name, call in _ways(size).items()
    ]


def _ways(size: int) -> dict[str, Call]:
    source, target = touched(size), touched(size + mmap.PAGESIZE)
    aligned, off = target[:size], target[1 : size + 1]
    ways: dict[str, Call] = {
        "host to host": lambda: np.copyto(aligned, source),
        "host to host, 1 byte off the page": lambda: np.copyto(off, source),
        "host to host, fresh pages": lambda: np.copyto(fresh(size), source),
    }
    if size >= HUGE_PAGE:
        ways["host to host, fresh huge pages"] = lambda: np.copyto(fresh(size, huge=True), source)
    return ways


def in_pieces(total: int, pieces: list[int], repeats: int) -> list[Measurement]:
    """The same bytes in one copy, or in many of `pieces` bytes each."""
    source, target = touched(total), touched(total)

    def copy(piece: int) -> None:
        for start in range(0, total, piece):
            np.copyto(target[start : start + piece], source[start : start + piece])

    found = []
    for piece in pieces:
        timing = HostMeter().time(partial(copy, piece), repeats=repeats)
        found.append(measured("pieces", "host to host", total, timing, parts=-(-total // piece)))
    return found


def strided(total: int, repeats: int) -> list[Measurement]:
    """Rows of `ROW` bytes that lie twice as far apart, against the same bytes side by side."""
    rows = max(1, total // ROW)
    wide = touched(2 * rows * ROW).reshape(rows, 2 * ROW)
    narrow = touched(rows * ROW).reshape(rows, ROW)
    other = touched(rows * ROW).reshape(rows, ROW)
    turned = touched(rows * ROW).reshape(ROW, rows).T

    def row_by_row() -> None:
        for target, source in zip(narrow, wide, strict=True):
            np.copyto(target, source[:ROW])

    calls = {
        "host, side by side": lambda: np.copyto(narrow, other),
        "host, from rows apart": lambda: np.copyto(narrow, wide[:, :ROW]),
        "host, to rows apart": lambda: np.copyto(wide[:, :ROW], narrow),
        "host, row by row": row_by_row,
        "host, from a transposed array": lambda: np.copyto(narrow, turned),
    }
    return [
        measured("strided", name, rows * ROW, HostMeter().time(call, repeats=repeats), parts=rows)
        for name, call in calls.items()
    ]


def widening(num_tokens: int, repeats: int) -> list[Measurement]:
    """uint16 tokens copied as they are, and widened to int64 on the way: four times the bytes written."""
    stored = touched(2 * num_tokens).view(np.uint16)
    same, wide = np.empty_like(stored), np.empty(num_tokens, np.int64)
    calls = {
        "host, as stored": lambda: np.copyto(same, stored),
        "host, widened to int64": lambda: np.copyto(wide, stored),
    }
    return [
        measured("widening", name, 2 * num_tokens, HostMeter().time(call, repeats=repeats))
        for name, call in calls.items()
    ]
