"""Responses as bytes: heads, arrays, caching and problem documents."""

from __future__ import annotations

import io
import json
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash

from corpus_server.admission.request import RequestHead
from corpus_server.errors import CorpusServerError, InvalidParameter, Overloaded, Unauthorized
from corpus_server.read.reading import PIECE_BYTES
from corpus_server.responses.arrays import array_response
from corpus_server.responses.problem import invalid_parameter, problem
from corpus_server.responses.response import (
    ChecksumPlace,
    Format,
    Response,
    not_modified,
)
from corpus_server.work import Budget
from tests.server.http.making import body

GET = RequestHead("GET", b"/v1/batches", {})


class Array:
    """A reading of an array, in units of one token."""

    unit_tokens = 1

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype, self.num_units = array, array.shape, array.dtype, array.size
        self.num_read = 0

    def read(self, first: int, num_units: int) -> np.ndarray:
        self.num_read += len(self.array.reshape(-1)[first : first + num_units])
        return self.array.reshape(-1)[first : first + num_units]


@pytest.mark.parametrize(
    ("status", "first"),
    [
        (200, b"HTTP/1.1 200 OK\r\n"),
        (304, b"HTTP/1.1 304 Not Modified\r\n"),
        (299, b"HTTP/1.1 299 \r\n"),
    ],
)
def test_a_head_has_all_headers(status: int, first: bytes) -> None:
    response = Response(status, {"ETag": '"x"', "Name": "\xe9"})
    found = response.head(RequestHead("GET", b"/", {}, request_id="id-1"), [(b"server", b"s")])
    assert found == first + b'ETag: "x"\r\nName: \xe9\r\nX-Request-Id: id-1\r\nserver: s\r\n\r\n'


SIZES = {"none": 0, "one piece": PIECE_BYTES, "more": PIECE_BYTES + 2, "three": 2 * PIECE_BYTES + 2}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("checksum", ["true", "tail", "false"])
@pytest.mark.parametrize("chosen", ["raw", "npy"])
def test_an_array_is_sent_in_pieces_with_its_checksum(
    chosen: Format, checksum: ChecksumPlace, size: str
) -> None:
    array = np.arange(SIZES[size] // 2, dtype="uint16")
    reading = Array(array)
    response = array_response(reading, {"ETag": "x"}, chosen, checksum, GET, Budget())
    pieces = [[bytes(part) for part in group] for group in response.body]
    sent = b"".join(part for group in pieces for part in group)
    assert len(pieces) == max(1, -(-SIZES[size] // PIECE_BYTES))
    content = array.tobytes()
    if chosen == "npy":
        file = io.BytesIO()
        np.save(file, array)
        content = file.getvalue()
    digest = xxhash.xxh3_64(content)
    assert sent == content + (digest.digest() if checksum == "tail" else b"")
    said = {"tail": {"Corpus-Checksum": "xxh3-64=tail"}, "false": {}}
    assert response.status == 200
    assert response.headers == {
        "ETag": "x",
        "Corpus-Shape": str(array.size),
        "Corpus-Dtype": "uint16",
        "Content-Length": str(len(sent)),
        "Content-Type": "application/x-npy" if chosen == "npy" else "application/octet-stream",
        **said.get(checksum, {"Corpus-Checksum": f"xxh3-64={digest.hexdigest()}"}),
    }
    # A second time only what does not fit into one piece, and whose checksum comes first.
    times = 2 if checksum == "true" and SIZES[size] > PIECE_BYTES else 1
    assert reading.num_read == times * array.size


@pytest.mark.parametrize("checksum", ["true", "tail", "false"])
@pytest.mark.parametrize(
    ("num_tokens", "others", "num_groups"),
    [
        (5, [3], 1),
        (4, [3], 1),
        (PIECE_BYTES, [3, 5], 2),  # with the last piece of the tokens, in one write
        (PIECE_BYTES, [PIECE_BYTES, 1], 5),
    ],
)
def test_arrays_beside_the_first_are_aligned_and_hashed_with_it(
    checksum: ChecksumPlace, num_tokens: int, others: list[int], num_groups: int
) -> None:
    arrays = [np.arange(1, size + 1, dtype="uint16") for size in (num_tokens, *others)]
    first, *rest = map(Array, arrays)
    beside = {f"array{number}": reading for number, reading in enumerate(rest)}
    response = array_response(first, {}, "raw", checksum, GET, Budget(), beside)
    groups = [b"".join(map(bytes, group)) for group in response.body]
    content = b""
    for array in arrays:
        content += bytes(-len(content) % 8) + array.tobytes()
    digest = xxhash.xxh3_64(content)
    assert b"".join(groups) == content + (digest.digest() if checksum == "tail" else b"")
    assert len(groups) == num_groups
    assert response.headers["Corpus-Arrays"] == "; ".join(
        f"array{number} uint16 {size}" for number, size in enumerate(others)
    )
    assert response.headers["Content-Length"] == str(sum(map(len, groups)))
    if checksum == "true":
        assert response.headers["Corpus-Checksum"] == f"xxh3-64={digest.hexdigest()}"
    again = array_response(first, {}, "raw", checksum, RequestHead("HEAD", b"/", {}), Budget(), beside)
    assert {**response.headers, **again.headers} == response.headers


@pytest.mark.parametrize(("checksum", "num_readings"), [("tail", 1), ("true", 2), ("false", 1)])
def test_a_piece_is_let_go_before_the_next_one_is_read(checksum: ChecksumPlace, num_readings: int) -> None:
    """A response costs the memory of one piece, however large it is."""
    pieces: list[weakref.ref[np.ndarray]] = []

    class Fresh(Array):
        def read(self, first: int, num_units: int) -> np.ndarray:
            assert not any(piece() is not None for piece in pieces)
            found = super().read(first, num_units).copy()
            pieces.append(weakref.ref(found))
            return found

    response = array_response(Fresh(np.zeros(2 * PIECE_BYTES, "uint16")), {}, "raw", checksum, GET, Budget())
    groups = iter(response.body)
    while next(groups, None):
        pass
    assert len(pieces) == 4 * num_readings


@pytest.mark.parametrize(
    ("checksum", "more"), [("tail", {"Corpus-Checksum": "xxh3-64=tail"}), ("true", {}), ("false", {})]
)
def test_for_a_head_nothing_is_read(checksum: ChecksumPlace, more: dict[str, str]) -> None:
    array = np.arange(6, dtype="int64").reshape(1, 3, 2)
    reading = Array(array)
    reading.read = None  # type: ignore[assignment,method-assign]
    response = array_response(reading, {}, "raw", checksum, RequestHead("HEAD", b"/", {}), Budget())
    assert (response.status, body(response)) == (200, b"")
    assert response.headers == {
        "Corpus-Shape": "1,3,2",
        "Corpus-Dtype": "int64",
        "Content-Length": str(48 + (8 if checksum == "tail" else 0)),
        "Content-Type": "application/octet-stream",
        **more,
    }


@pytest.mark.parametrize(
    ("given", "is_unchanged"),
    [
        (None, False),
        ('"a"', True),
        ('W/"a"', True),
        ("*", True),
        ('"b", W/"a" ', True),
        ('"b"', False),
        ("a", False),
        ("", False),
    ],
)
def test_a_client_that_holds_the_response_is_told_so(given: str | None, is_unchanged: bool) -> None:
    headers = {"ETag": '"a"', "Cache-Control": "x"}
    request = RequestHead("GET", b"/", {} if given is None else {"if-none-match": given})
    found = not_modified(request, headers)
    assert (found is not None) == is_unchanged
    if found is not None:
        assert (found.status, found.headers, body(found)) == (304, headers, b"")


@pytest.mark.parametrize(
    ("make_error", "status", "slug", "fields", "headers"),
    [
        (
            lambda: CorpusServerError("what", parameter="p", received=3, accepted="a", remedy="r"),
            *(500, "internal-error"),
            {"detail": "what", "parameter": "p", "received": 3, "accepted": "a", "remedy": "r"},
            {},
        ),
        (
            lambda: ValueError("secret"),
            *(500, "internal-error"),
            {"detail": "the server failed; its log says why"},
            {},
        ),
        (
            lambda: Overloaded("busy"),
            *(503, "overloaded"),
            {"detail": "busy", "remedy": "try again after 1 s"},
            {"Retry-After": "1"},
        ),
        (
            lambda: Unauthorized(is_given=False),
            *(401, "unauthorized"),
            {"detail": "this server asks for a token", "remedy": "send `Authorization: Bearer TOKEN`"},
            {"WWW-Authenticate": "Bearer"},
        ),
    ],
)
def test_an_error_becomes_a_problem_document(
    make_error: Callable[[], Exception],
    status: int,
    slug: str,
    fields: dict[str, Any],
    headers: dict[str, str],
) -> None:
    response = problem(make_error(), "id-7")
    content = body(response)
    title = slug.replace("-", " ").capitalize()
    general = {"type": slug, "title": title, "status": status, "request_id": "id-7"}
    assert json.loads(content) == {**general, **fields}
    assert response.headers == {
        "Content-Type": "application/problem+json",
        "Cache-Control": "no-store",
        "Content-Length": str(len(content)),
        **headers,
    }
    assert (response.status, response.problem_type) == (status, slug)


def test_a_parameter_is_named_without_the_place_of_its_kind() -> None:
    """As the application's router says it."""
    error = {"type": "missing", "loc": ("query", "step"), "msg": "Field required", "input": None}
    found = invalid_parameter([error])
    assert (found.detail, found.parameter) == ("step is missing", "step")


@pytest.mark.parametrize(
    ("received", "echoed"),
    [
        pytest.param(True, True, id="true"),
        pytest.param(2**63 - 1, 2**63 - 1, id="largest number"),
        pytest.param(2**63, str(2**63), id="too large a number"),
        pytest.param(10**250, "1" + "0" * 199, id="long number"),
        pytest.param("x" * 201, "x" * 200 + "...", id="long text"),
        pytest.param(float("nan"), "nan", id="no JSON"),
    ],
)
def test_what_came_is_sent_back_short_and_as_json(received: object, echoed: object) -> None:
    document = json.loads(body(problem(InvalidParameter("what", received=received), "")))
    assert document["received"] == echoed
    assert type(document["received"]) is type(echoed)
