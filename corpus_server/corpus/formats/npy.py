"""NumPy's `.npy` files: 1-D arrays of tokens.

Layout (numpy.lib.format): `\\x93NUMPY`, version major and minor (1 byte each), header length
(`<u2` in version 1, `<u4` in 2 and 3), header (a Python dict literal), data.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from corpus_server.corpus.files import OpenFile
from corpus_server.corpus.formats.layout import (
    ACCEPTED_DTYPES,
    COPY_AGAIN,
    TOKEN_DTYPES,
    Format,
    ShardLayout,
    TokenDtype,
    counted_run,
)

_MAGIC: Final = b"\x93NUMPY"
_MAX_HEADER_BYTES: Final = 10_000  # numpy's own limit, so that a hostile literal is not parsed
# By major version. Version 3 is version 2 in UTF-8, and the header of a token array is ASCII.
_READERS: Final = {
    1: np.lib.format.read_array_header_1_0,
    2: np.lib.format.read_array_header_2_0,
    3: np.lib.format.read_array_header_2_0,
}


def _read(file: OpenFile, dtype: TokenDtype | None, in_folder: bool) -> ShardLayout | None:
    return read_array(
        file, TOKEN_DTYPES, f"tokens must be little-endian {ACCEPTED_DTYPES}", cast_to=lambda _: "uint32"
    )


def read_array(
    file: OpenFile,
    dtypes: Mapping[str, np.dtype[Any]],
    expected: str,
    *,
    cast_to: Callable[[np.dtype[Any]], str],
) -> ShardLayout | None:
    """Return where the items of an NPY file lie, None for any other file.

    `expected` is what an error says of an array that is of none of `dtypes`; `cast_to` says to which one it
    may be cast.
    """
    head = file.head(12 + _MAX_HEADER_BYTES)
    if not head.startswith(_MAGIC):
        return None  # OLMo's headerless dumps are called .npy, too: see `olmo`
    shape, fortran_order, found, data_offset = _parse_header(file, head)
    # Not `.get(...) != found`: for NumPy, None is float64.
    if found not in dtypes.values():
        raise file.unreadable(
            f"{expected}, its header says {np.lib.format.dtype_to_descr(found)!r}",
            f"save it again: numpy.save(path, array.astype('{cast_to(found)}'))",
        )
    if len(shape) != 1 or type(shape[0]) is not int or shape[0] < 0:
        raise file.unreadable(
            f"expected a 1-D array, got shape {shape!r}", "save it flat: numpy.save(path, array.reshape(-1))"
        )
    if fortran_order:
        raise file.unreadable(
            "expected C order, the header says Fortran order",
            "save it again: numpy.save(path, numpy.ascontiguousarray(array))",
        )
    dtype = dtypes[found.name]
    runs = counted_run(file, dtype, data_offset=data_offset, num_tokens=shape[0])
    return ShardLayout(format="npy", reason=r"begins with \x93NUMPY", dtype=dtype, runs=runs)


def _parse_header(file: OpenFile, head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[np.generic], int]:
    """Return shape, Fortran order, dtype, and the byte at which the data begins."""
    stream = io.BytesIO(head)
    try:
        major, _ = np.lib.format.read_magic(stream)
        if major in _READERS:
            return *_READERS[major](stream, max_header_size=_MAX_HEADER_BYTES), stream.tell()
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError) as error:
        raise file.unreadable(f"its NPY header is damaged: {error}", COPY_AGAIN) from error
    raise file.unreadable(f"NPY version {major} is unknown", "save it with a numpy release of today")


FORMAT: Final = Format(read=_read)
