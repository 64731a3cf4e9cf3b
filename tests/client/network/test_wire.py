"""Names, headers and problem documents, without any I/O."""

from __future__ import annotations

import dataclasses
import json
import re

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


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("uint8", 30), ("uint16", 60), ("uint32", 120), ("int32", 120), ("int64", 240)]
)
def test_an_array_is_as_long_as_its_items(dtype: str, num_bytes: int) -> None:
    request = dataclasses.replace(REQUEST, dtype=dtype)
    assert request.num_bytes == num_bytes
    for verify in (False, True):
        headers = {**GOOD, "corpus-dtype": dtype, "content-length": str(num_bytes + 8 * verify)}
        wire.check_headers(headers, dataclasses.replace(request, verify=verify))
        with pytest.raises(errors.ResponseCorrupt, match="content-length must be"):
            wire.check_headers(headers, dataclasses.replace(request, verify=not verify))


def test_a_plan_and_a_checksum_that_were_not_asked_for_are_not_checked() -> None:
    request = wire.ArrayRequest(path="/", shape=(2,), dtype="int64", plan_id=None, verify=False)
    headers = {"content-length": "16", "corpus-shape": "2", "corpus-dtype": "int64"}
    wire.check_headers(headers, request)
    wire.check_headers({**headers, "corpus-plan": "cd", "corpus-checksum": "md5", "etag": "x"}, request)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("value", [None, "", "61", "2,3,6", "uint32", "cd"])
def test_each_wrong_header_is_named(name: str, value: str | None) -> None:
    headers = {key: text for key, text in {**GOOD, name: value}.items() if text is not None}
    with pytest.raises(errors.ResponseCorrupt) as caught:
        wire.check_headers(headers, REQUEST)
    assert str(caught.value) == f"{name} must be {GOOD[name]!r}, got {value!r}"


PIECES = wire.steps_request(
    "/v1/indices", (2, 3, 5), "int64", step=7, verify=True, are_pieces=True, plan="ab"
)


@pytest.mark.parametrize("num_pieces", [1, 6, 30])
def test_how_many_pieces_rows_join_is_known_from_the_response(num_pieces: int) -> None:
    """At most one for each token."""
    assert (PIECES.shape, PIECES.num_bytes) == ((30, 4), 30 * 32)
    headers = {**GOOD, "corpus-dtype": "int64", "corpus-shape": f"{num_pieces},4"}
    headers["content-length"] = str(32 * num_pieces + 8)
    wire.check_headers(headers, PIECES)
    assert wire.array_bytes(headers, PIECES) == 32 * num_pieces
    with pytest.raises(errors.ResponseCorrupt, match="content-length must be"):
        wire.check_headers({**headers, "content-length": str(32 * num_pieces)}, PIECES)


@pytest.mark.parametrize("shape", ["", "0,4", "31,4", "2,3", "2,3,4", "-1,4", "x,4", "9" * 40 + ",4"])
def test_pieces_of_another_shape_are_refused(shape: str) -> None:
    with pytest.raises(errors.ResponseCorrupt, match="must be"):
        wire.check_headers({**GOOD, "corpus-dtype": "int64", "corpus-shape": shape}, PIECES)


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
def test_the_tag_of_another_response_is_refused(tag: str) -> None:
    """Another plan, route, step, count, rank, world size or form, each with a valid checksum."""
    with pytest.raises(errors.ResponseCorrupt, match=re.escape(f"etag must be {TAG}, got {tag}")):
        wire.check_headers({**GOOD, "etag": tag}, REQUEST)


def test_a_tag_is_checked_against_the_plan_that_the_response_names() -> None:
    """Where a plan is spelled, its id is not known before."""
    request = dataclasses.replace(REQUEST, plan_id=None)
    wire.check_headers({**GOOD, "etag": TAG}, request)
    with pytest.raises(errors.ResponseCorrupt, match="etag must be"):
        wire.check_headers({**GOOD, "corpus-plan": "cd", "etag": TAG}, request)


def test_checksum_is_that_of_xxh3_64() -> None:
    """The empty array's published digest, and one bit further."""
    tail = bytes.fromhex("2d06800538d394c2")
    assert wire.checked_array(tail) == b""
    with pytest.raises(
        errors.ResponseCorrupt, match="checksum must be 2d06800538d394c2, got c44bdff4074eecdb"
    ):
        wire.checked_array(b"\0" + tail)


def test_a_request_for_steps_says_which_and_knows_the_tag_of_its_response() -> None:
    """Where no rank is named, the rows of the whole global batch are meant."""
    whole = wire.steps_request("/v1/batches", (3, 4, 5), "uint16", step=7, verify=True, plan="ab")
    assert whole == wire.ArrayRequest(
        path="/v1/batches?plan=ab&step=7&count=3&rank=0&world_size=1&format=raw&checksum=tail",
        shape=(3, 4, 5),
        dtype="uint16",
        plan_id="ab",
        identity="batches.7.3.0.1.raw+tail",
    )
    of_a_rank = wire.steps_request(
        "/data/v1/indices", (2, 1, 2), "int64", step=0, rank=1, world_size=4, verify=False, corpus="w b"
    )
    assert of_a_rank == wire.ArrayRequest(
        path="/data/v1/indices?corpus=w+b&step=0&count=2&rank=1&world_size=4&format=raw&checksum=false",
        shape=(2, 1, 2),
        dtype="int64",
        plan_id=None,
        verify=False,
        identity="indices.0.2.1.4.raw",
    )


@pytest.mark.parametrize(
    ("head", "status", "headers"),
    [
        (b"HTTP/1.1 200 OK\r\nA: b\r\nC-D:  e:f \r\n\r\n", 200, {"a": "b", "c-d": "e:f"}),
        (b"HTTP/1.0 503 \r\nA: b\r\na: c\r\n\r\n", 503, {"a": "c"}),
        (b"HTTP/1.1 404\r\nA: \xe4\r\n\r\n", 404, {"a": "\xe4"}),
    ],
    ids=["two", "repeated", "Latin-1"],
)
def test_a_head_is_a_status_and_headers(head: bytes, status: int, headers: dict[str, str]) -> None:
    assert wire.read_head(head) == (status, headers)


@pytest.mark.parametrize(
    ("timing", "seconds"),
    [
        (None, 0.0),
        ("", 0.0),
        ("response;dur=1500", 1.5),
        ("door;dur=3, response;dur=250.5, x", 0.2505),
        ("noresponse;dur=3", 0.0),
        ("response", 0.0),
    ],
)
def test_the_servers_seconds_are_what_it_says(timing: str | None, seconds: float) -> None:
    assert wire.server_seconds({} if timing is None else {"server-timing": timing}) == seconds


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
    error = wire.error_from_response(422, headers, json.dumps(problem).encode())
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
def test_foreign_responses_are_errors_too(kind: str | None, body: bytes) -> None:
    error = wire.error_from_response(502, {"content-type": kind} if kind else {}, body)
    assert type(error) is errors.ServerError
    assert str(error) == f"HTTP 502: {body.decode('utf-8', 'replace')!r}"
    assert error.passing


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12", 12),
        ("0", 0),
        ("3600", 60),
        ("1" + 400 * "0", 60),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 1),
        ("", 1),
        ("\xb2", 1),
    ],
)
def test_retry_after_is_bounded_and_as_a_date_one_second(text: str, seconds: float) -> None:
    assert wire.error_from_response(503, {"retry-after": text}, b"").retry_after_seconds == seconds


@pytest.mark.parametrize("target", ["/a b", "/ä", "/a\r\nX: y", "/\x7f"])
def test_what_does_not_belong_into_a_url_is_never_sent(target: str) -> None:
    """Else a path could end the first line, and begin a header or a request of its own."""
    message = re.escape(f"url must be percent-encoded ASCII, got {target!r}")
    with pytest.raises(errors.InvalidArgument, match=message):
        wire.request_line(target)
    assert wire.request_line("/a%20b?c=d") == b"GET /a%20b?c=d HTTP/1.1\r\n"


def test_a_redirect_says_where_it_leads() -> None:
    """An ingress sends plain HTTP to https, and its response has no body."""
    error = wire.error_from_response(308, {"location": "https://data.example/"}, b"")
    assert str(error) == (
        "HTTP 308: no response of corpus-server, which explains its errors (redirects are not followed, and "
        "this one leads to https://data.example/; give the server's own URL)"
    )
    assert not error.passing
