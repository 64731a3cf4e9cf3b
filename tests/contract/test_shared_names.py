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
    assert (server.SHAPE, server.DTYPE, server.PLAN, server.CHECKSUM, server.TIMING) == (
        client.SHAPE_HEADER,
        client.DTYPE_HEADER,
        client.PLAN_HEADER,
        client.CHECKSUM_HEADER,
        client.TIMING_HEADER,
    )
    assert (server.TAIL, server.TAIL_BYTES) == (client.CHECKSUM_TAIL, client.TAIL_BYTES)


def test_the_client_reads_how_long_the_server_took() -> None:
    assert client.server_seconds({server.TIMING: server.timing_value(0.0123456)}) == 0.012346
    assert client.server_seconds({server.TIMING: "cache;desc=hit, " + server.timing_value(2)}) == 2.0
    assert client.server_seconds({server.TIMING: "answer"}) == 0.0
    assert client.server_seconds({}) == 0.0


def test_the_client_knows_every_error_of_the_server() -> None:
    # A corpus that cannot be opened stops the server before it answers anything.
    slugs = {each.slug for each in _subclasses(server_errors.CorpusServerError)} - {"unreadable-corpus"}
    assert slugs <= set(client.ERRORS)


def test_the_client_knows_every_dtype_of_the_server() -> None:
    assert set(TOKEN_DTYPES) <= set(client.ITEM_BYTES)
    assert all(np.dtype(name).itemsize == size for name, size in client.ITEM_BYTES.items())
