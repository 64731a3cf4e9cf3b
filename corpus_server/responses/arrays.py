"""Responses that hold an array: raw or as an NPY file, with a checksum, and arrays beside the first one."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType

import numpy as np
import xxhash

from corpus_server.admission.request import RequestHead
from corpus_server.read.reading import PIECE_BYTES, Reading, hash_arrays, num_bytes, read_pieces
from corpus_server.responses.response import (
    ARRAYS_HEADER,
    CHECKSUM_HEADER,
    DTYPE_HEADER,
    MEDIA_TYPES,
    SHAPE_HEADER,
    Buffer,
    ChecksumPlace,
    Format,
    Response,
)
from corpus_server.work import Budget

TAIL = "xxh3-64=tail"
"""Value of the checksum header where the checksum follows the array: 8 bytes, the last of the body."""

TAIL_BYTES = 8

_JOINED_BYTES = 64 * 1024
"""Arrays behind the tokens up to this size leave in the same write as the last piece of the tokens."""


def array_response(
    reading: Reading,
    headers: Mapping[str, str],
    chosen: Format,
    checksum: ChecksumPlace,
    request: RequestHead,
    budget: Budget,
    beside: Mapping[str, Reading] = MappingProxyType({}),
) -> Response:
    """Make the response that holds a reading's bytes.

    The first piece is read here, and a row of each array beside it, so that a shard or a mask that changed
    is an error response and no cut connection.

    Args:
        headers: what decides caching.
        chosen: `raw` for the bare array, or `npy`.
        checksum: its place; in the header, everything is read and hashed before the first byte is sent,
            and what exceeds one piece is read twice.
        request: for a HEAD nothing is read.
        budget: of the question.
        beside: arrays that follow in a raw body, by name.
    """
    readings = reading, *beside.values()
    size = num_bytes(*readings)
    prefix = npy_header(reading.shape, reading.dtype) if chosen == "npy" else b""
    length = len(prefix) + size + (TAIL_BYTES if checksum == "tail" else 0)
    headers = {
        **headers,
        **array_headers(reading, beside),
        "Content-Length": str(length),
        "Content-Type": MEDIA_TYPES[chosen],
    }
    if checksum == "tail":
        headers[CHECKSUM_HEADER] = TAIL
    if request.method == "HEAD":
        return Response(200, headers)
    digest = xxhash.xxh3_64(prefix)
    pieces = read_pieces(*readings)
    if checksum == "true":
        if size <= PIECE_BYTES:
            kept = list(pieces)
            for piece in kept:
                digest.update(piece)
            pieces = iter(kept)
        else:
            hash_arrays(digest, budget, *readings)
        headers[CHECKSUM_HEADER] = checksum_value(digest)
    else:
        for each in beside.values():
            each.read(0, 1)
    first = next(pieces, memoryview(b""))
    joined = size - num_bytes(reading) if beside else 0
    if joined > _JOINED_BYTES:
        joined = 0
    body = _groups(prefix, first, pieces, size, joined, digest if checksum == "tail" else None)
    return Response(200, headers, body)


def _groups(
    prefix: bytes,
    piece: memoryview,
    pieces: Iterator[memoryview],
    size: int,
    joined: int,
    digest: xxhash.xxh3_64 | None,
) -> Iterator[list[Buffer]]:
    """Yield the body piece by piece; the checksum goes with the last piece, to leave in the same write.

    So do the last `joined` bytes. Holds no piece while tokens are read: a response costs the memory of one.
    """
    group: list[Buffer] = [prefix] if prefix else []
    left = size
    while True:
        left -= len(piece)
        group.append(piece)
        if digest is not None:
            digest.update(piece)
            if not left:
                group.append(digest.digest())
        del piece
        if not 0 < left <= joined:
            yield group
            if not left:
                return
            group = []
        piece = next(pieces)


def array_headers(reading: Reading, beside: Mapping[str, Reading]) -> dict[str, str]:
    """Return headers of an array, `4,64,1025` and `uint16`, and of others behind it, `rows uint32 4,64`."""
    headers = {SHAPE_HEADER: _sizes(reading.shape), DTYPE_HEADER: _name(reading.dtype)}
    if beside:
        described = (f"{name} {_name(each.dtype)} {_sizes(each.shape)}" for name, each in beside.items())
        headers[ARRAYS_HEADER] = "; ".join(described)
    return headers


def checksum_value(digest: xxhash.xxh3_64) -> str:
    """Return the value of the checksum header: `xxh3-64=` and 16 hex digits."""
    return f"xxh3-64={digest.hexdigest()}"


def npy_header(shape: Sequence[int], dtype: np.dtype[np.integer]) -> bytes:
    """Return the bytes that make raw tokens an NPY file (format 1.0, C order, little-endian)."""
    prefix = io.BytesIO()
    fields = {"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(prefix, fields)
    return prefix.getvalue()


def _sizes(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


@cache
def _name(dtype: np.dtype[np.integer]) -> str:
    return dtype.name  # NumPy spells it anew each time, in 5 microseconds
