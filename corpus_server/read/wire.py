"""Arrays as bytes and names: what the client's `corpus_client.network.wire` reads.

Both halves know the same header names, dtype names and checksum; golden bytes in `tests/contract`
hold them together.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal, get_args

import numpy as np
import xxhash

SHAPE = "Corpus-Shape"
DTYPE = "Corpus-Dtype"
PLAN = "Corpus-Plan"
PLAN_STEP = "Corpus-Plan-Step"
CHECKSUM = "Corpus-Checksum"
RANGE = "Corpus-Range"
TIMING = "Server-Timing"

TAIL = "xxh3-64=tail"
"""Value of the checksum header where the checksum follows the array: 8 bytes, the last of the body."""

TAIL_BYTES = 8

ChecksumPlace = Literal["true", "tail", "false"]
Format = Literal["raw", "npy", "json", "text"]
FORMATS: tuple[Format, ...] = get_args(Format)

MEDIA_TYPES: Mapping[Format, str] = {
    "raw": "application/octet-stream",
    "npy": "application/x-npy",
    "json": "application/json",
    "text": "text/plain; charset=utf-8",
}

IMMUTABLE = "max-age=31536000, immutable"
"""`Cache-Control` where a plan's id stands for the content of its corpora."""

REVALIDATED = "no-cache"
"""`Cache-Control` where a corpus is named, which another corpus may be called tomorrow: a 304 says if not."""


def array_headers(shape: Sequence[int], dtype: np.dtype[np.integer]) -> dict[str, str]:
    """Return the headers that describe an array: `4,64,1025` and `uint16`."""
    return {SHAPE: ",".join(map(str, shape)), DTYPE: _name(dtype)}


def checksum_value(digest: xxhash.xxh3_64) -> str:
    """Return the value of the checksum header: `xxh3-64=` and 16 hex digits."""
    return f"xxh3-64={digest.hexdigest()}"


def timing_value(seconds: float) -> str:
    """Return the value of `Server-Timing` (W3C): `answer;dur=` and milliseconds."""
    return f"answer;dur={seconds * 1e3:.3f}"


def npy_header(shape: Sequence[int], dtype: np.dtype[np.integer]) -> bytes:
    """Return the bytes that make raw tokens an NPY file (format 1.0, C order, little-endian)."""
    prefix = io.BytesIO()
    fields = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(prefix, fields)
    return prefix.getvalue()


def negotiate(accept: str | None, default: Format) -> Format:
    """Return the answer's format for an `Accept` header: the known type of the highest weight.

    Of equal weights the first counts (RFC 9110, 12.5.1); where no type is known, the default.
    """
    chosen, best = default, 0.0
    for item in (accept or "").split(","):
        media_type, *parameters = (part.strip().lower() for part in item.split(";"))
        weight = next((_weight(part[2:]) for part in parameters if part.startswith("q=")), 1.0)
        for name in FORMATS:
            if weight > best and media_type == MEDIA_TYPES[name].partition(";")[0]:
                chosen, best = name, weight
    return chosen


@cache
def _name(dtype: np.dtype[np.integer]) -> str:
    return dtype.name  # NumPy spells it anew each time, in 5 microseconds


def _weight(text: str) -> float:
    """Return a weight in [0, 1]; one that cannot be read counts as not given."""
    try:
        return min(1.0, float(text))
    except ValueError:
        return 1.0
