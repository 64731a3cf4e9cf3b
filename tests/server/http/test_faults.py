"""What a connection does when something is missing, comes too soon, or goes away."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from corpus_server.admission.admission import Admission
from corpus_server.admission.request import MAX_HEAD_BYTES
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.http import connection as connection_module
from corpus_server.http.connection import Connection
from corpus_server.responses.response import Response
from corpus_server.responses.service import Service
from corpus_server.settings import Settings
from corpus_server.work import ClientLeft
from tests.corpora import some_tokens, write_raw
from tests.raw_http import RawConnection, check_raw_problem, get
from tests.server.responses.world import with_certificate
from tests.serving import RunningServer

MIB = 2**20
LARGE = {"corpus": "a", "seq_len": 1024, "batch_size": 64, "step": 3, "count": 150}
SMALL = {"corpus": "a", "seq_len": 64, "batch_size": 8, "checksum": "tail"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_raw(tmp_path_factory.mktemp("corpus") / "a.bin", some_tokens(2_000_000))


@pytest.fixture(scope="module")
def server(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = "[server]\nmax_concurrent_responses = 3\n"
    with RunningServer({"a": corpus}, tmp_path_factory.mktemp("server"), config=config) as running:
        yield running


def test_without_descriptors_requests_are_answered_and_no_slot_is_lost(server: RunningServer) -> None:
    """Catalogue row 37."""
    pid = server.worker_pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with RawConnection(server) as connection:
        connection.send(get("/v1/batches", **SMALL, step=3))
        right = connection.read().body
        used = max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            for _ in range(50):
                connection.send(get("/v1/batches", **SMALL, step=3))
                assert connection.read().body == right
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert used > 3
        connection.send(get("/v1/batches", **SMALL, step=3))
        assert connection.read().body == right
    server.wait_until_idle()


@pytest.mark.parametrize("target", ["/healthz", "/v1/corpora/a", "/v1/batches"])
def test_pipelined_requests_of_a_half_closed_connection_are_all_answered(
    server: RunningServer, target: str
) -> None:
    query = {**SMALL, "step": 1} if target == "/v1/batches" else {}
    with RawConnection(server) as connection:
        connection.send(get(target, **query), get("/healthz"), get(target, **query))
        connection.socket.shutdown(socket.SHUT_WR)
        first = connection.read()
        assert first.status == 200
        assert connection.read().json() == {"status": "alive"}
        assert connection.read().body == first.body
        assert connection.ended()


CHUNKED = get("/v1/plans", "Transfer-Encoding: chunked", method="POST")
REFUSED = {
    "bare line feeds": (b"GET /healthz HTTP/1.1\nHost: x\n\n", 400),
    "a bare line feed": (b"GET /healthz HTTP/1.1\nHost: x\r\n\r\n", 400),
    "part of a line": (b"GET /hea", 400),
    "part of a head": (b"GET /healthz HTTP/1.1\r\nHost: x\r\n", 400),
    "no method": (b"\0\1", 400),
    "an unknown method": (get("/healthz", method="FROB"), 400),
    "no method of the route": (get("/v1/batches", method="DELETE"), 405),
    "a large head": (get("/healthz", "X: " + "a" * MAX_HEAD_BYTES), 431),
    "a long URL": (get("/" + "a" * 70_000), 414),
    "a large body": (get("/v1/plans", "Content-Length: 10000000000", method="POST"), 413),
    "no body": (get("/v1/plans", "Content-Length: 10", method="POST"), 400),
    "part of a body": (get("/v1/plans", "Content-Length: 10", method="POST") + b"{", 400),
    "part of a chunk": (CHUNKED + b"5\r\n{", 400),
    "part of the chunks": (CHUNKED + b"1\r\n{\r\n", 400),
}
"""Of each kind one, and the status of its refusal."""


@pytest.mark.parametrize("before", [0, 1], ids=["first", "pipelined"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refused_request_of_a_half_closed_connection_is_told_why(
    server: RunningServer, kind: str, before: int
) -> None:
    sent, status = REFUSED[kind]
    with RawConnection(server) as connection:
        connection.send(get("/healthz") * before, sent)
        connection.socket.shutdown(socket.SHUT_WR)
        for _ in range(before):
            assert connection.read().status == 200
        check_raw_problem(connection.read(), status)
        assert connection.ended()


def test_bare_line_feeds_are_refused_at_once(server: RunningServer) -> None:
    """Not after the time-out of a head, which they never end: that is another refusal."""
    with RawConnection(server) as connection:
        connection.send(b"GET /healthz HTTP/1.1\nHost: x\n\n")
        check_raw_problem(connection.read(), 400, "bad-request")
        assert connection.ended()


@pytest.mark.parametrize("checksum", ["tail", "false"])
def test_a_large_response_to_a_half_closed_connection_comes_whole(
    server: RunningServer, checksum: str
) -> None:
    with RawConnection(server) as connection:
        connection.send(get("/v1/batches", **LARGE, checksum=checksum))
        connection.socket.shutdown(socket.SHUT_WR)
        response = connection.read()
        assert (response.status, len(response.body)) == (200, 150 * 64 * 1025 * 2 + 8 * (checksum == "tail"))
        assert connection.ended()


@pytest.fixture(scope="module")
def over_tls(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("tls")
    arguments, uds = with_certificate(folder), folder / "socket"
    with RunningServer({"a": corpus}, folder, uds=uds, arguments=arguments) as running:
        running.port = int(running.log().partition("https://127.0.0.1:")[2].split()[0])
        running.tls = ssl.create_default_context(cafile=str(folder / "certificate.pem"))
        running.tls.check_hostname = False
        yield running


@pytest.mark.parametrize("way", ["server", "over_tls"])
@pytest.mark.parametrize("path", ["/v1/batches", "/v1/corpora/a/tokens"])
def test_what_a_client_that_left_did_not_take_is_not_counted(
    way: str, path: str, request: pytest.FixtureRequest
) -> None:
    """Catalogue row 42."""
    server: RunningServer = request.getfixturevalue(way)
    query = LARGE if path == "/v1/batches" else {"count": 2_000_000, "format": "raw"}
    route = f'route="{"/v1/corpora/{name}/tokens" if "corpora" in path else path}"'

    def counted(name: str, *labels: str) -> float:
        lines = server.get("/metrics").body.decode().splitlines()
        found = [line for line in lines if name in line and all(each in line for each in (route, *labels))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    before = [counted("sent_bytes_total"), counted("requests_total", 'status="499"')]
    with RawConnection(server, receive_buffer=4096) as connection:
        connection.send(get(path, **query))
        connection.await_some(600)
        connection.reset()
    server.wait_until_idle()
    deadline = time.monotonic() + 20
    while counted("requests_total", 'status="499"') == before[1]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert counted("sent_bytes_total") - before[0] < 8 * MIB


def test_a_response_that_is_made_when_its_client_has_left_is_no_failure(corpus: Path, tmp_path: Path) -> None:
    """Under uvloop, which refuses to write to a closed connection by a RuntimeError."""
    errors: list[Exception] = []

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.start", "status": 422, "headers": []})
        try:
            await send({"type": "http.response.body", "body": b"late"})
        except Exception as error:  # noqa: BLE001 - which one is the question
            errors.append(error)

    async def ask(service: Service) -> None:
        shared = SimpleNamespace(connections=set(), default_headers=[])
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(service, late, shared), "127.0.0.1", 0
        )
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(get("/healthz"))
        await writer.drain()
        reset = struct.pack("ii", 1, 0)  # else the client would only have stopped sending
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        writer.transport.abort()
        deadline = time.monotonic() + 20
        while not errors and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        server.close()

    settings = Settings(corpora=(CorpusSpec(name="a", path=corpus),), state_dir=tmp_path)
    with Service.open(settings) as service:
        uvloop.run(ask(service))
    assert [type(each) for each in errors] == [ClientLeft]


def test_a_plan_that_grows_costs_no_more_than_its_own_responses(server: RunningServer) -> None:
    """Catalogue row 36: rows of one token, then a stage of a thousand times their number."""
    stages = [
        {"from_step": 0, "global_batch_size": 1, "mixture": {"a": 1}},
        {"from_step": 3, "global_batch_size": 2048, "mixture": {"a": 1}},
    ]
    plan = server.post_plan({"seq_len": 512, "seed": 1, "stages": stages}).json()["id"]
    process = psutil.Process(server.worker_pid)
    rss, before = process.memory_info().rss, sum(process.cpu_times()[:2])
    with RawConnection(server) as connection:
        for step in range(3):
            connection.send(get("/v1/batches", corpus="a", seq_len=1, batch_size=1, step=step))
            assert connection.read().status == 200
        for step in range(4):
            connection.send(get("/v1/batches", plan=plan, step=step))
            assert connection.read().status == 200
    assert process.memory_info().rss - rss < 60 * MIB
    assert sum(process.cpu_times()[:2]) - before < 1


def test_a_chunk_of_any_size_is_refused_at_once(server: RunningServer) -> None:
    for size in (b"1000000000000000000", b"fffffffffffff"):  # 2^72; one that httptools takes
        with RawConnection(server) as connection:
            connection.send(get("/v1/plans", "Transfer-Encoding: chunked", method="POST"), size + b"\r\n")
            assert connection.read().status in (400, 413)  # after the time-out of a body it would be 408


@pytest.mark.parametrize("lines", [("Content-Type: text/plain",), ("Content-Type: multipart/form-data",), ()])
def test_a_page_of_another_site_cannot_post_a_plan(server: RunningServer, lines: tuple[str, ...]) -> None:
    """A browser sends these without asking first, and always says where they come from."""
    body = b'{"seq_len":8,"stages":[{"global_batch_size":1,"mixture":{"a":1}}]}'
    for more, status in ((("Origin: http://evil.example",), 403), ((), 200)):
        with RawConnection(server) as connection:
            connection.send(
                get("/v1/plans", f"Content-Length: {len(body)}", *lines, *more, method="POST") + body
            )
            response = connection.read()
            assert response.status == status
            if status == 403:
                check_raw_problem(response, 403, "forbidden")


@pytest.mark.parametrize("place", ["parsing", "admission", "making", "sending", "the application"])
def test_an_unforeseen_error_is_answered_and_no_slot_is_lost(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Inside one process, because memory cannot be made to end where a test wants it to."""
    targets = {
        "parsing": (connection_module, "Message"),
        "admission": (Admission, "admit"),
        "making": (connection_module, "respond"),
        "sending": (Response, "head"),
    }

    async def no_memory(*_: object) -> None:
        raise MemoryError

    async def ask(service: Service) -> bytes:
        shared = SimpleNamespace(connections=set(), default_headers=[])
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(service, no_memory, shared), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        target = "/healthz" if place == "the application" else "/v1/batches"
        writer.write(get(target, **SMALL, step=1))
        response = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        server.close()
        return response

    if place in targets:
        owner, name = targets[place]
        right = getattr(owner, name)
        failures = [MemoryError()]

        def fail_once(*arguments: object) -> object:
            if failures:
                raise failures.pop()
            return right(*arguments)

        monkeypatch.setattr(owner, name, fail_once)
    settings = Settings(corpora=(CorpusSpec(name="a", path=corpus),), state_dir=tmp_path)
    with Service.open(settings) as service:
        response = asyncio.run(ask(service))
        assert not service.admission.slots
    assert response.startswith(b"HTTP/1.1 500 ")
    assert b"internal-error" in response
