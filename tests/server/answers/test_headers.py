"""Arrays as bytes and names: exact values, because clients read them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import xxhash

from corpus_server.answers import response as wire


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((4, 64, 1025), "<u2", {"Corpus-Shape": "4,64,1025", "Corpus-Dtype": "uint16"}),
        ((0,), "<i4", {"Corpus-Shape": "0", "Corpus-Dtype": "int32"}),
        ((1,), "u1", {"Corpus-Shape": "1", "Corpus-Dtype": "uint8"}),
    ],
)
def test_headers(shape: tuple[int, ...], dtype: str, expected: dict[str, str]) -> None:
    assert wire.array_headers(shape, np.dtype(dtype)) == expected


def test_checksums_are_the_published_ones_of_xxh3() -> None:
    """XXH3_64bits of no bytes, seed 0, as in xxHash's own sanity checks."""
    digest = xxhash.xxh3_64(b"")
    assert wire.checksum_value(digest) == "xxh3-64=2d06800538d394c2"
    assert digest.digest() == bytes.fromhex("2d06800538d394c2")
    assert wire.TAIL_BYTES == 8


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("shape", [(0,), (7,), (2, 3, 4)], ids=str)
def test_the_npy_prefix_makes_a_file_that_numpy_loads(shape: tuple[int, ...], dtype: str) -> None:
    array = np.arange(np.prod(shape)).astype(dtype).reshape(shape)
    loaded = np.load(io.BytesIO(wire.npy_header(shape, array.dtype) + array.tobytes()))
    assert loaded.dtype == array.dtype
    assert (loaded == array).all()
    assert loaded.shape == shape


def test_the_npy_prefix_is_these_bytes() -> None:
    prefix = wire.npy_header((4, 64, 1025), np.dtype("<u2"))
    text = b"{'descr': '<u2', 'fortran_order': False, 'shape': (4, 64, 1025), }"
    assert prefix == b"\x93NUMPY\x01\x00\x76\x00" + text.ljust(117) + b"\n"
    assert len(prefix) == 128


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "raw"),
        ("*/*", "raw"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "raw"),
        ("application/json", "json"),
        ("APPLICATION/JSON; charset=utf-8", "json"),
        ("application/x-npy", "npy"),
        ("image/png, application/x-npy, application/json", "npy"),
        ("application/json;q=0.5, application/x-npy", "npy"),
        ("application/json;q=0, application/x-npy;q=0.1", "npy"),
        (";;;,,,q=", "raw"),
        ("application/json;q=zero", "json"),
        ("application/json;q=zero, application/x-npy", "json"),
        ("application/x-npy, application/json;q=5", "npy"),
        ("application/x-npy;q=0.25, application/json; charset=utf-8; q=0.75", "json"),
        ("application/json;q=-1", "raw"),
    ],
)
def test_negotiation(accept: str | None, expected: str) -> None:
    assert wire.negotiate(accept, "raw") == expected
    assert wire.negotiate("image/png", "json") == "json"
