"""NumPy's `.npy` files: 1-D arrays of tokens.

Layout (numpy.lib.format): `\\x93NUMPY`, version major and minor (1 byte each), header length
(`<u2` in version 1, `<u4` in 2 and 3), header (a Python dict literal), data.
"""

from __future__ import annotations

import ast
from typing import Any, Final

import numpy as np

from corpus_server.formats.layout import TOKEN_DTYPES, ShardLayout, TokenDtype, unreadable
from corpus_server.openfile import OpenFile

MAGIC: Final = b"\x93NUMPY"

# numpy's own limit: a literal longer than this is no header of a token array.
_MAX_HEADER_BYTES: Final = 10_000


def read(file: OpenFile) -> ShardLayout:
    """Return the layout of a file that begins with `MAGIC`."""
    header, data_offset = _read_header(file)
    dtype = _token_dtype(file, header.get("descr"))
    shape = header.get("shape")
    if not isinstance(shape, tuple) or len(shape) != 1 or type(shape[0]) is not int or shape[0] < 0:
        raise unreadable(
            file.path,
            f"expected a 1-D array of tokens, got shape {shape!r}",
            "save it flat: numpy.save(path, array.reshape(-1))",
        )
    if header.get("fortran_order") is not False:
        raise unreadable(
            file.path,
            "expected C order, the header says Fortran order",
            "save it again: numpy.save(path, numpy.ascontiguousarray(array))",
        )
    num_tokens = shape[0]
    expected_bytes = data_offset + num_tokens * dtype.itemsize
    if file.size_bytes != expected_bytes:
        held = (file.size_bytes - data_offset) / dtype.itemsize
        raise unreadable(
            file.path,
            f"holds {held:g} tokens, its header says {num_tokens}"
            f" ({file.size_bytes} bytes, expected {expected_bytes})",
            "was the copy interrupted? Copy it again",
        )
    return ShardLayout(
        path=file.path, format="npy", dtype=dtype, data_offset=data_offset, num_tokens=num_tokens
    )


def _read_header(file: OpenFile) -> tuple[dict[str, Any], int]:
    """Return the header's dict and the byte at which the data begins."""
    prefix = file.head(12)
    truncated = unreadable(
        file.path, f"{file.size_bytes} bytes end inside the NPY header", "was the copy interrupted?"
    )
    if len(prefix) < 10:
        raise truncated
    major = prefix[6]
    if major not in (1, 2, 3):
        raise unreadable(
            file.path, f"NPY version {major} is unknown", "save it with a numpy release of today"
        )
    length_bytes = 2 if major == 1 else 4
    start = 8 + length_bytes
    if len(prefix) < start:
        raise truncated
    length = int.from_bytes(prefix[8:start], "little")
    if length > _MAX_HEADER_BYTES:
        raise unreadable(
            file.path,
            f"an NPY header of {length} bytes is none of a token array (limit {_MAX_HEADER_BYTES})",
            "save the tokens as a plain 1-D array",
        )
    if file.size_bytes < start + length:
        raise truncated
    text = file.read(start, length).decode("utf-8" if major == 3 else "latin1", errors="replace")
    try:
        header = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise unreadable(file.path, "its NPY header is damaged", "save or copy it again") from error
    if not isinstance(header, dict):
        raise unreadable(file.path, "its NPY header is not a dict", "save or copy it again")
    return header, start + length


def _token_dtype(file: OpenFile, descr: object) -> TokenDtype:
    try:
        found = np.dtype(descr) if isinstance(descr, str) else None
    except TypeError:
        found = None
    if found is None or TOKEN_DTYPES.get(found.name) != found:
        raise unreadable(
            file.path,
            f"tokens must be little-endian {', '.join(TOKEN_DTYPES)}, its header says {descr!r}",
            "save it again: numpy.save(path, array.astype('uint32'))",
        )
    return TOKEN_DTYPES[found.name]
