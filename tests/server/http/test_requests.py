"""What a request means: the same the second time as the first, or a refusal that says why."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator

import pytest
import xxhash

from corpus_server.admission.request import MAX_HEAD_BYTES
from tests.corpora import some_tokens, write_raw
from tests.raw_http import Ended, RawConnection, RawResponse, check_raw_problem, get
from tests.reference import batch, one_source
from tests.serving import RunningServer

SEQ_LEN, ROWS, NUM_TOKENS = 32, 4, 20_000
PLAN = one_source("a", SEQ_LEN, ROWS, seed=3)
KNOWN = "format=raw&checksum=tail"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    corpus = write_raw(folder / "a.bin", some_tokens(NUM_TOKENS))
    with RunningServer({"a": corpus}, folder) as running:
        yield running


@pytest.fixture(scope="module")
def plan_id(server: RunningServer) -> str:
    return str(server.post_plan(PLAN).json()["id"])


def right(step: int, count: int = 1) -> bytes:
    """The body of a response with its checksum behind."""
    tokens = [some_tokens(NUM_TOKENS)]
    array = batch(PLAN, tokens, step, count=count).astype("<u2").tobytes()
    return array + xxhash.xxh3_64_digest(array)


def ask(server: RunningServer, request: bytes) -> RawResponse:
    """Send a request over a connection of its own; also what is more than a socket takes."""
    with RawConnection(server) as connection:

        def send() -> None:
            with contextlib.suppress(OSError):  # it may be refused before it was sent whole
                connection.send(request)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            return connection.read()
        finally:
            connection.close()
            sender.join()


SPELLINGS = {
    "plain": ("GET /v1/batches?plan={p}&{k}&step={s} HTTP/1.1", 200),
    "step-first": ("GET /v1/batches?step={s}&plan={p}&{k} HTTP/1.1", 200),
    "leading-zeros": ("GET /v1/batches?plan={p}&{k}&step=000{s} HTTP/1.1", None),
    "fragment-with-a-step": ("GET /v1/batches?plan={p}&{k}&step={s}#&step=9 HTTP/1.1", 400),
    "step-in-the-fragment": ("GET /v1/batches?plan={p}&{k}&step=9#&step={s} HTTP/1.1", 400),
    "fragment-in-the-path": ("GET /v1/batches#?plan={p}&{k}&step={s} HTTP/1.1", 400),
    "encoded-hash": ("GET /v1/batches?plan={p}&{k}&step={s}%23 HTTP/1.1", 422),
    "repeated": ("GET /v1/batches?plan={p}&{k}&step={s}&step=9 HTTP/1.1", None),
    "repeated-encoded": ("GET /v1/batches?plan={p}&{k}&step={s}&%73tep=9 HTTP/1.1", None),
    "encoded-name": ("GET /v1/batches?plan={p}&{k}&%73tep={s} HTTP/1.1", None),
    "encoded-ampersand": ("GET /v1/batches?plan={p}&{k}&step={s}%26count=2 HTTP/1.1", 422),
    "upper-case-name": ("GET /v1/batches?plan={p}&{k}&STEP={s} HTTP/1.1", 422),
    "plus-before": ("GET /v1/batches?plan={p}&{k}&step=+{s} HTTP/1.1", 422),
    "semicolon": ("GET /v1/batches?plan={p}&{k}&step={s};count=2 HTTP/1.1", 422),
    "second-question-mark": ("GET /v1/batches?plan={p}&{k}&step={s}?count=2 HTTP/1.1", 422),
    "empty-parameter": ("GET /v1/batches?plan={p}&&{k}&step={s}& HTTP/1.1", None),
    "nameless": ("GET /v1/batches?plan={p}&{k}&step={s}&=2 HTTP/1.1", None),
    "without-a-value": ("GET /v1/batches?plan={p}&{k}&step={s}&count HTTP/1.1", None),
    "unknown": ("GET /v1/batches?plan={p}&{k}&step={s}&x=1 HTTP/1.1", 422),
    "encoded-path": ("GET /v1/b%61tches?plan={p}&{k}&step={s} HTTP/1.1", None),
    "upper-case-path": ("GET /V1/batches?plan={p}&{k}&step={s} HTTP/1.1", 404),
    "absolute": ("GET http://x/v1/batches?plan={p}&{k}&step={s} HTTP/1.1", None),
    "lower-case-method": ("get /v1/batches?plan={p}&{k}&step={s} HTTP/1.1", None),
    "space-in-the-target": ("GET /v1/batches?plan={p}&{k}&step={s} &count=2 HTTP/1.1", 400),
    "tab-for-space": ("GET\t/v1/batches?plan={p}&{k}&step={s}\tHTTP/1.1", None),
    "nul-in-the-target": ("GET /v1/batches?plan={p}&{k}&step={s}\0 HTTP/1.1", None),
}
"""Request line and status; None: any status, but the same every time."""


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_gets_another_meaning_the_second_time(
    server: RunningServer, plan_id: str, spelling: str
) -> None:
    """Catalogue row 30: what was remembered of a request never reads it differently than the parser."""
    line, status = SPELLINGS[spelling]
    found: dict[int, set[tuple[int, str | None, bytes]]] = {3: set(), 7: set()}
    for step in (3, 7, 3):
        request = f"{line.format(p=plan_id, k=KNOWN, s=step)}\r\nHost: x\r\n\r\n".encode("latin-1")
        response = ask(server, request)
        if response.status == 200:
            tag = response.headers["etag"].split(".")
            assert response.body == right(int(tag[2]), int(tag[3]))
        else:
            assert 400 <= response.status < 500, response
            check_raw_problem(response, response.status)
        if response.status == 200:
            said = response.body
        else:  # each response names its own request
            said = response.body.replace(response.headers["x-request-id"].encode(), b"")
        found[step].add((response.status, response.headers.get("etag"), said))
    for step, responses in found.items():
        assert len(responses) == 1, (step, [each[:2] for each in responses])
        ((got, tag, _),) = responses
        if status is not None:
            assert got == status, responses
        if status == 200:
            assert tag == f'"{plan_id}.batches.{step}.1.0.1.raw+tail"'


@pytest.fixture(params=["batches", "application"])
def target(request: pytest.FixtureRequest, server: RunningServer, plan_id: str) -> str:
    """A route of the fast path, and one of the application."""
    if request.param == "application":
        return "/v1/corpora/a"
    return f"/v1/batches?plan={plan_id}&{KNOWN}&step=11"


@pytest.mark.parametrize("host", ["x", "", "127.0.0.1:8000", "[::1]:1"])
def test_any_single_host_will_do(server: RunningServer, target: str, host: str) -> None:
    assert ask(server, get(target, f"Host: {host}", host=False)).status == 200


@pytest.mark.parametrize("lines", [[], ["Connection: keep-alive"]], ids=["closed", "kept"])
def test_http_1_0_needs_no_host_and_closes(server: RunningServer, target: str, lines: list[str]) -> None:
    for _ in range(2):
        with RawConnection(server) as connection:
            connection.send(get(target, *lines, version="1.0", host=False))
            response = connection.read()
            assert response.status == 200
            if "batches" in target:
                assert xxhash.xxh3_64_digest(response.body[:-8]) == response.body[-8:]
            if response.headers.get("connection", "close").lower() != "keep-alive":
                assert connection.ended()


NO_HTTP = {
    "a-word": b"NONSENSE\r\n\r\n",
    "zeros": b"\0\0\0\0\r\n\r\n",
    "tls": bytes.fromhex("16030100a5010000a10303") + b"\r\n\r\n",
    "no-colon": b"GET /healthz HTTP/1.1\r\nHost: x\r\nNo colon\r\n\r\n",
    "two-hosts": b"GET /v1/batches?step=1 HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
    "length-below-zero": b"POST /v1/plans HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "two-kinds-of-length": b"GET /v1/batches?step=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
}
"""Of each kind one; `BAD_HEADS` of test_message.py are more."""


@pytest.mark.parametrize("before", [[], ["/v1/corpora/a"]], ids=["first", "behind-the-application"])
@pytest.mark.parametrize("nonsense", NO_HTTP)
def test_what_is_no_http_is_refused_by_a_problem_document(
    server: RunningServer, nonsense: str, before: list[str]
) -> None:
    with RawConnection(server) as connection:
        for path in before:
            connection.send(get(path))
            assert connection.read().status == 200
        connection.send(NO_HTTP[nonsense])
        response = connection.read()
        assert response.status in (400, 501, 505), response
        check_raw_problem(response, response.status)
        assert response.headers["connection"].lower() == "close"
        assert connection.ended()


@pytest.mark.parametrize("num_bytes", [9_000, 60_000, 64 * 1024, 70_000, 2**20])
@pytest.mark.parametrize("path", ["/v1/corpora/", "/v1/batches?plan="])
def test_a_url_of_any_length_gets_414(server: RunningServer, path: str, num_bytes: int) -> None:
    check_raw_problem(ask(server, get(path + "a" * num_bytes)), 414, "url-too-long")


@pytest.mark.parametrize("lines", [b"\r\n", b"\r\n" * 50], ids=len)
def test_empty_lines_between_requests_are_ignored(server: RunningServer, target: str, lines: bytes) -> None:
    """RFC 9112, 2.2: some clients send one behind a body."""
    with RawConnection(server) as connection:
        connection.send(
            lines + get(target) + lines + get(target) + lines, get(target) + lines + get("/nothing")
        )
        assert [connection.read().status for _ in range(4)] == [200, 200, 200, 404]


@pytest.mark.parametrize("before", [False, True], ids=["first", "pipelined"])
@pytest.mark.parametrize("repeated", [1, 300])
def test_the_limit_of_a_head_is_exact(
    server: RunningServer, target: str, repeated: int, before: bool
) -> None:
    """Bytes as they were sent, whichever way the request takes."""
    head = get(target)[:-2] + b"X: y\r\n" * repeated + b"Y: "
    for num_bytes, status in ((MAX_HEAD_BYTES, 200), (MAX_HEAD_BYTES + 1, 431)):
        with RawConnection(server) as connection:
            whole = head + b"a" * (num_bytes - len(head) - 4) + b"\r\n\r\n"
            connection.send(get(target) * before + whole)
            for _ in range(before):
                assert connection.read().status == 200
            response = connection.read()
            assert response.status == status
            if status != 200:
                check_raw_problem(response, status, "head-too-large")


def test_a_head_that_has_as_many_bytes_as_it_may_and_no_end_gets_431(server: RunningServer) -> None:
    head = b"GET /v1/batches?x HTTP/1.1\r\nX: "
    request = head + b"a" * (MAX_HEAD_BYTES - len(head))
    check_raw_problem(ask(server, request), 431, "head-too-large")


BROKEN_CHUNKS = [
    b"ZZ\r\n{}\r\n0\r\n\r\n",
    b"2\r\n{}NO\r\n",
    b"f" * 40 + b"\r\n{}",
]


@pytest.mark.parametrize("method", ["POST", "GET"])
@pytest.mark.parametrize("chunks", BROKEN_CHUNKS, ids=repr)
def test_broken_chunks_are_refused(server: RunningServer, plan_id: str, chunks: bytes, method: str) -> None:
    """Never silence: a client would wait for ever."""
    path = "/v1/plans" if method == "POST" else f"/v1/batches?plan={plan_id}&{KNOWN}&step=3"
    with RawConnection(server) as connection:
        connection.send(get(path, "Transfer-Encoding: chunked", method=method) + chunks)
        response = connection.read()
        # A route that needs no body may have answered before the chunks came.
        if method == "GET" and response.status == 200:
            assert response.body == right(3)
            found = connection.read_or_end()
            if isinstance(found, Ended):
                assert not found.head
                return
            response = found
        check_raw_problem(response, 400)
        assert connection.ended()


@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_a_body_is_never_taken_for_a_request(server: RunningServer, plan_id: str, is_chunked: bool) -> None:
    """A GET of batches may have a body, which is dropped; the request behind it is answered or not read."""
    count = 1 + 2 * is_chunked
    path = f"/v1/batches?plan={plan_id}&{KNOWN}&count={count}&step="
    hidden = get(path + "9")
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden) if is_chunked else hidden
    line = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(hidden)}"
    for step, parts in (
        (3, (get(path + "3", line) + body, get(path + "4"))),
        (5, (get(path + "5", line), body[:20], body[20:] + get(path + "6"))),
    ):
        with RawConnection(server) as connection:
            connection.send(*parts)
            response = connection.read()
            assert response.body == right(step, count)
            if "connection" not in response.headers:
                assert connection.read().body == right(step + 1, count)
                connection.send(get("/healthz", "Connection: close"))
                assert connection.read().json() == {"status": "alive"}
            assert connection.ended()


@pytest.mark.parametrize("protocol", ["websocket", "h2c", "TLS/1.0"])
def test_an_upgrade_is_not_taken(server: RunningServer, target: str, protocol: str) -> None:
    """RFC 9110, 7.8: a server may ignore it, and answers the request as it is."""
    lines = ["Connection: Upgrade", f"Upgrade: {protocol}"]
    response = ask(server, get(target, *lines))
    if response.status != 200:
        check_raw_problem(response, response.status)
    assert response.status in (200, 400, 426)


@pytest.mark.parametrize("path", ["/v1/batches", "/v1/plans"])
def test_an_upgrade_does_not_hide_a_body_in_chunks(server: RunningServer, plan_id: str, path: str) -> None:
    """As Java's client sends it; the body is read as one, and the request behind it is answered."""
    lines = ["Connection: Upgrade", "Upgrade: h2c", "Transfer-Encoding: chunked"]
    plan = json.dumps(PLAN).encode()
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (plan[:9], plan[9:])) + b"0\r\n\r\n"
    request = get(f"/v1/batches?plan={plan_id}&{KNOWN}&step=3", *lines)
    if path == "/v1/plans":
        request = get(path, *lines).replace(b"GET", b"POST", 1)
    with RawConnection(server) as connection:
        connection.send(request + body + get("/healthz"))
        response = connection.read()
        assert response.status == 200
        assert response.json()["id"] == plan_id if path == "/v1/plans" else response.body == right(3)
        assert connection.read().json() == {"status": "alive"}


@pytest.mark.parametrize(("path", "status"), [("/nothing", 404), ("/v1/corpora/a", 405)])
def test_a_chunk_that_is_too_large_is_no_failure(server: RunningServer, path: str, status: int) -> None:
    """Whoever is refused for another reason hears that one."""
    request = get(path, "Transfer-Encoding: chunked").replace(b"GET", b"POST", 1)
    with RawConnection(server) as connection:
        connection.send(request + b"fffff\r\n" + b"a" * 100)
        assert connection.read().status == status
