"""The two distributions share no code: here is proof that they share the names."""

from __future__ import annotations

import numpy as np

from corpus_client import wire as client
from corpus_server import errors as server_errors
from corpus_server import wire as server
from corpus_server.formats import TOKEN_DTYPES


def _subclasses(kind: type) -> list[type]:
    return [each for sub in kind.__subclasses__() for each in (sub, *_subclasses(sub))]


def test_header_names_are_the_same() -> None:
    assert (server.SHAPE, server.DTYPE, server.PLAN, server.CHECKSUM) == (
        client.SHAPE_HEADER,
        client.DTYPE_HEADER,
        client.PLAN_HEADER,
        client.CHECKSUM_HEADER,
    )
    assert server.checksum_of(b"").startswith(client.CHECKSUM_PREFIX)


def test_the_client_knows_every_error_of_the_server() -> None:
    # A corpus that cannot be opened stops the server before it answers anything.
    slugs = {each.slug for each in _subclasses(server_errors.CorpusServerError)} - {"unreadable-corpus"}
    assert slugs <= set(client.ERRORS)


def test_the_client_knows_every_dtype_of_the_server() -> None:
    assert set(TOKEN_DTYPES) <= set(client.ITEM_BYTES)
    assert all(np.dtype(name).itemsize == size for name, size in client.ITEM_BYTES.items())
