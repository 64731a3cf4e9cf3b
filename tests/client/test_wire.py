"""Names, headers and problem documents, without any I/O."""

from __future__ import annotations

import json

import pytest

from corpus_client import errors, wire

REQUEST = wire.ArrayRequest(path="/", shape=(2, 3, 5), dtype="uint16", plan_id="ab")
GOOD = {
    "Content-Length": "68",
    "Corpus-Shape": "2,3,5",
    "Corpus-Dtype": "uint16",
    "Corpus-Plan": "ab",
    "Corpus-Checksum": "xxh3-64=tail",
}


def test_right_headers_pass() -> None:
    wire.check_headers(GOOD, REQUEST)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("value", [None, "", "61", "2,3,6", "uint32", "cd"])
def test_each_wrong_header_is_named(name: str, value: str | None) -> None:
    headers = {key: text for key, text in {**GOOD, name: value}.items() if text is not None}
    with pytest.raises(errors.AnswerCorrupt, match=name):
        wire.check_headers(headers, REQUEST)


def test_checksum_is_that_of_xxh3_64() -> None:
    """The empty array's published digest, and one bit further."""
    tail = bytes.fromhex("2d06800538d394c2")
    assert wire.checked_array(tail) == b""
    with pytest.raises(errors.AnswerCorrupt, match="checksum must be 2d06800538d394c2"):
        wire.checked_array(b"\0" + tail)


def test_path_says_raw_and_leaves_the_checksum_out_on_request() -> None:
    assert (
        wire.array_path("/v1/batches", verify=True, step=3) == "/v1/batches?step=3&format=raw&checksum=tail"
    )
    assert wire.array_path("/r", verify=False, c="a b&c") == "/r?c=a+b%26c&format=raw&checksum=false"
    assert wire.corpus_path("a/b c") == "/v1/corpora/a%2Fb%20c"


@pytest.mark.parametrize("slug", wire.ERRORS)
def test_every_slug_becomes_its_own_error(slug: str) -> None:
    problem = {
        "type": slug,
        "detail": "no",
        "parameter": "step",
        "received": -1,
        "accepted": "[0, 9]",
        "remedy": "ask less",
    }
    headers = {"Content-Type": "application/problem+json; charset=utf-8", "Retry-After": "7"}
    error = wire.error_from_answer(422, headers, json.dumps(problem).encode())
    assert type(error) is wire.ERRORS[slug]
    assert error.slug == slug
    assert str(error) == "no (ask less)"
    assert (error.parameter, error.received, error.accepted) == ("step", -1, "[0, 9]")
    assert error.retry_after_seconds == 7


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("text/html", b"<h1>Bad Gateway</h1>"),
        ("application/problem+json", b"{"),
        ("application/problem+json", b"[]"),
        ("application/problem+json", b'{"type": ["list"]}'),
        ("application/problem+json", b'{"type": "of-tomorrow"}'),
        (None, b"\xff"),
    ],
)
def test_foreign_answers_are_errors_too(kind: str | None, body: bytes) -> None:
    error = wire.error_from_answer(502, {"Content-Type": kind} if kind else {}, body)
    assert type(error) is errors.ServerError
    assert str(error).startswith("HTTP 502: ")
    assert error.passing


@pytest.mark.parametrize(
    ("status", "passing"), [(400, False), (404, False), (422, False), (408, True), (429, True), (503, True)]
)
def test_only_passing_trouble_is_retried(status: int, passing: bool) -> None:
    assert wire.error_from_answer(status, {}, b"").passing is passing


def test_retry_after_as_a_date_is_one_second() -> None:
    headers = {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}
    assert wire.error_from_answer(503, headers, b"").retry_after_seconds == 1
