"""Arrays as bytes and names: exact values, because clients read them."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from corpus_server.admission.request import RequestHead
from corpus_server.responses import arrays
from corpus_server.responses.response import negotiate


def test_checksums_are_the_published_ones_of_xxh3() -> None:
    """XXH3_64bits of no bytes, seed 0, as in xxHash's own sanity checks."""
    digest = xxhash.xxh3_64(b"")
    assert arrays.checksum_value(digest) == "xxh3-64=2d06800538d394c2"
    assert digest.digest() == bytes.fromhex("2d06800538d394c2")
    assert arrays.TAIL_BYTES == 8


def test_the_npy_prefix_is_these_bytes() -> None:
    prefix = arrays.npy_header((4, 64, 1025), np.dtype("<u2"))
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
    head = RequestHead("GET", b"/", {} if accept is None else {"accept": accept})
    assert negotiate(head, "raw") == expected
    assert negotiate(RequestHead("GET", b"/", {"accept": "image/png"}), "json") == "json"
