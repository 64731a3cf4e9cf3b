"""The two distributions share no code: here is proof that they share the names."""

from __future__ import annotations

import numpy as np

from corpus_client.network import layout
from corpus_client.network import wire as client
from corpus_server import errors as server_errors
from corpus_server.corpus.formats.layout import TOKEN_DTYPES
from corpus_server.read.beside import BESIDE
from corpus_server.read.reading import ALIGNMENT
from corpus_server.responses import arrays
from corpus_server.responses import response as server


def _subclasses(kind: type) -> list[type]:
    return [each for sub in kind.__subclasses__() for each in (sub, *_subclasses(sub))]


def test_header_names_are_the_same() -> None:
    for name in (
        "SHAPE_HEADER",
        "DTYPE_HEADER",
        "ARRAYS_HEADER",
        "PLAN_HEADER",
        "CHECKSUM_HEADER",
        "TIMING_HEADER",
    ):
        assert getattr(server, name).lower() == getattr(client, name)
    assert (arrays.TAIL, arrays.TAIL_BYTES) == (client.CHECKSUM_TAIL, client.TAIL_BYTES)


def test_the_client_reads_how_long_the_server_took() -> None:
    assert client.server_seconds({client.TIMING_HEADER: server.timing_value(0.0123456)}) == 0.012346
    assert client.server_seconds({client.TIMING_HEADER: "cache;desc=hit, " + server.timing_value(2)}) == 2.0
    assert client.server_seconds({client.TIMING_HEADER: "response"}) == 0.0
    assert client.server_seconds({}) == 0.0


def test_errors_that_the_client_treats_apart_are_named_as_the_server_names_them() -> None:
    slugs = {each.slug for each in _subclasses(server_errors.CorpusServerError)}
    assert set(client.ERRORS) <= slugs


def test_the_client_knows_every_dtype_of_the_server() -> None:
    assert set(TOKEN_DTYPES) <= set(layout.ITEM_BYTES)
    assert all(np.dtype(name).itemsize == size for name, size in layout.ITEM_BYTES.items())


def test_the_client_knows_every_array_beside_the_tokens() -> None:
    assert set(layout.BESIDE) == set(BESIDE) - {"rows"}  # which a loader has no use for
    assert layout.ALIGNMENT == ALIGNMENT
