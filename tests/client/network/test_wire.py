"""Names, headers and problem documents, without any I/O."""

from __future__ import annotations

import dataclasses
import json

import pytest

from corpus_client import errors
from corpus_client.network import wire

REQUEST = wire.ArrayRequest(
    path="/", shape=(2, 3, 5), dtype="uint16", plan_id="ab", identity="batches.7.2.1.4.raw+tail"
)
GOOD = {
    "content-length": "68",
    "corpus-shape": "2,3,5",
    "corpus-dtype": "uint16",
    "corpus-plan": "ab",
    "corpus-checksum": "xxh3-64=tail",
}
TAG = '"ab.batches.7.2.1.4.raw+tail"'


def test_right_headers_pass() -> None:
    wire.check_headers(GOOD, REQUEST)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("value", [None, "", "61", "2,3,6", "uint32", "cd"])
def test_each_wrong_header_is_named(name: str, value: str | None) -> None:
    headers = {key: text for key, text in {**GOOD, name: value}.items() if text is not None}
    with pytest.raises(errors.AnswerCorrupt, match=name):
        wire.check_headers(headers, REQUEST)


@pytest.mark.parametrize("tag", [None, TAG, f"W/{TAG}"])
def test_a_right_weak_or_missing_tag_passes(tag: str | None) -> None:
    """Proxies strip tags, and weaken them."""
    wire.check_headers({**GOOD, "etag": tag} if tag else GOOD, REQUEST)


@pytest.mark.parametrize(
    "tag",
    [
        TAG.replace("ab", "cd"),
        TAG.replace("batches", "indices"),
        TAG.replace(".7.", ".8."),
        TAG.replace(".2.", ".1."),
        TAG.replace(".1.4", ".0.4"),
        TAG.replace(".4.", ".8."),
        TAG.replace("+tail", ""),
        f"W/{TAG.replace('.7.', '.70.')}",
        TAG.strip('"'),
        "",
    ],
)
def test_the_tag_of_another_answer_is_refused(tag: str) -> None:
    """Another plan, route, step, count, rank, world size or form, each with a valid checksum."""
    with pytest.raises(errors.AnswerCorrupt, match="etag must be"):
        wire.check_headers({**GOOD, "etag": tag}, REQUEST)


def test_a_tag_is_checked_against_the_plan_that_the_answer_names() -> None:
    """Where a plan is spelled, its id is not known before."""
    request = dataclasses.replace(REQUEST, plan_id=None)
    wire.check_headers({**GOOD, "etag": TAG}, request)
    with pytest.raises(errors.AnswerCorrupt, match="etag must be"):
        wire.check_headers({**GOOD, "corpus-plan": "cd", "etag": TAG}, request)


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


@pytest.mark.parametrize("slug", [*wire.ERRORS, "invalid-plan"])
def test_a_problem_becomes_an_error_of_its_kind(slug: str) -> None:
    problem = {
        "type": slug,
        "detail": "no",
        "parameter": "step",
        "received": -1,
        "accepted": "[0, 9]",
        "remedy": "ask less",
    }
    headers = {"content-type": "application/problem+json; charset=utf-8", "retry-after": "7"}
    error = wire.error_from_answer(422, headers, json.dumps(problem).encode())
    assert type(error) is wire.ERRORS.get(slug, errors.ServerError)
    assert error.kind == slug
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
    error = wire.error_from_answer(502, {"content-type": kind} if kind else {}, body)
    assert type(error) is errors.ServerError
    assert str(error).startswith("HTTP 502: ")
    assert error.passing


@pytest.mark.parametrize(
    ("status", "passing"), [(400, False), (404, False), (422, False), (408, True), (429, True), (503, True)]
)
def test_only_passing_trouble_is_retried(status: int, passing: bool) -> None:
    assert wire.error_from_answer(status, {}, b"").passing is passing


@pytest.mark.parametrize(
    ("status", "denied"), [(400, False), (401, True), (402, False), (403, True), (404, False)]
)
def test_a_proxy_may_deny_access_in_words_of_its_own(status: int, denied: bool) -> None:
    error = wire.error_from_answer(status, {"content-type": "text/html"}, b"<h1>Go away</h1>")
    assert isinstance(error, errors.AccessDenied) is denied
    assert str(error).startswith(f"HTTP {status}: ")


def test_retry_after_as_a_date_is_one_second() -> None:
    headers = {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}
    assert wire.error_from_answer(503, headers, b"").retry_after_seconds == 1


@pytest.mark.parametrize("target", ["/a b", "/ä", "/a\r\nX: y", "/\x7f"])
def test_what_does_not_belong_into_a_url_is_never_sent(target: str) -> None:
    """Else a path could end the first line, and begin a header or a request of its own."""
    with pytest.raises(errors.InvalidArgument, match="percent-encoded"):
        wire.request_line(target)
    assert wire.request_line("/a%20b?c=d") == b"GET /a%20b?c=d HTTP/1.1\r\n"
