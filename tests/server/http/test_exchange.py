"""A request and its response, without a whole server."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
from corpus_server.http.ahead import following
from fastapi.testclient import TestClient
from uvicorn.server import ServerState

from corpus_server import metrics
from corpus_server.admission.access import ANYONE
from corpus_server.admission.load import MAX_BYTES, SMALL_BYTES
from corpus_server.admission.request import RequestHead, parse_simple_get
from corpus_server.answers.access_log import Answered, Requests
from corpus_server.answers.response import ClientLeft, Response, Slices
from corpus_server.answers.service import Service
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import (
    CorpusChanged,
    CorpusServerError,
    InvalidParameter,
    NotReady,
    Overloaded,
)
from corpus_server.http import exchange as module
from corpus_server.http.connection import Door
from corpus_server.http.exchange import Exchange, log_error, make_ahead
from corpus_server.http.sending import Descriptor
from corpus_server.metrics import STAGES, Part
from corpus_server.read.timing import OF_THREAD
from corpus_server.settings import Settings
from corpus_server.web.app import create_app
from tests.corpora import some_tokens, write_raw


async def ask(service: Service, rows: Sequence[int]) -> list[tuple[int, bytes]]:
    """Return status and body of responses on one connection, each of so many rows."""
    state, loop, answers = ServerState(), asyncio.get_running_loop(), []
    before = set(service.admission.slots)
    server = await loop.create_server(lambda: Door(service, state, asyncio.Protocol), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    for each in rows:
        target = f"/v1/batches?corpus=web&seq_len=1023&batch_size={each}&step=0"
        writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        (length,) = (line.split()[1] for line in head.splitlines() if line.startswith("content-length"))
        answers.append((int(head.split()[1]), await reader.readexactly(int(length))))
    writer.close()
    server.close()
    while (
        service.admission.slots != before
    ):  # a thread has sent the last byte before the loop gives the slot back
        await asyncio.sleep(0.001)
    return answers


def test_a_large_answer_is_refused_while_all_bytes_are_taken(tmp_path: Path) -> None:
    """Before anything of it is read. Its connection goes on, and a small one is not refused for its bytes."""
    path = write_raw(tmp_path / "web.bin", some_tokens(200_000))
    settings = Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state")
    most = SMALL_BYTES // 2048
    with Service.open(settings) as service:
        others = service.admission.admit(RequestHead("GET", b"/", {}))
        others.charge(MAX_BYTES)
        (refused, problem), (status, body) = asyncio.run(ask(service, (most + 1, most)))
        assert (service.admission.num_bytes, service.admission.slots) == (MAX_BYTES, {others})
        others.release()
        assert [each[0] for each in asyncio.run(ask(service, (most + 1,)))] == [200]
        assert service.admission.num_bytes == 0
    assert (refused, json.loads(problem)["type"]) == (503, "overloaded")
    assert (status, len(body)) == (200, SMALL_BYTES)


def test_the_stages_of_a_response_are_measured(tmp_path: Path) -> None:
    """A thread took the request from a queue: the wait, reading and sending are all within its seconds."""
    path = write_raw(tmp_path / "web.bin", some_tokens(200_000))
    settings = Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state")
    with Service.open(settings) as service, patch.object(Requests, "done") as done:
        assert asyncio.run(ask(service, (8,)))[0][0] == 200
    (answered,) = done.call_args.args
    assert len(answered.stages) == len(STAGES)
    assert all(seconds > 0 for seconds in answered.stages)
    assert sum(answered.stages) <= answered.seconds


def test_the_application_counts_bytes_as_the_door_does(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", some_tokens(200_000))
    app = create_app(Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state"))
    query = {"corpus": "web", "seq_len": 1023, "batch_size": SMALL_BYTES // 2048 + 1, "step": 0}
    with TestClient(app) as client:
        gate = app.app.state.service.admission
        others = gate.admit(RequestHead("GET", b"/", {}))
        others.charge(MAX_BYTES)
        for route in ("/v1/batches", "/v1/corpora/web/tokens"):
            asked = (
                query
                if route.endswith("batches")
                else {"start": 0, "count": SMALL_BYTES // 2 + 1, "format": "npy"}
            )
            assert client.get(route, params=asked).json()["type"] == "overloaded"
        assert client.get("/v1/batches", params={**query, "batch_size": 8}).status_code == 200
        assert gate.num_bytes == MAX_BYTES


TOKENS = some_tokens(2_000_000)
ROWS, SEQ_LEN = 8, 33
LARGE_ROWS = 50_000
"""Rows of a step of several pieces."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = write_raw(tmp_path / "web.bin", TOKENS)
    settings = Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state")
    with Service.open(settings) as service:
        yield service


def target(step: int | str, rows: int = ROWS) -> bytes:
    plan = f"corpus=web&seq_len={SEQ_LEN}&batch_size={rows}&order=sequential&checksum=false"
    return f"/v1/batches?{plan}&step={step}".encode()


def rows_of(step: int, rows: int = ROWS) -> bytes:
    starts = range(step * rows * SEQ_LEN, (step + 1) * rows * SEQ_LEN, SEQ_LEN)
    return b"".join(TOKENS[start : start + SEQ_LEN + 1].tobytes() for start in starts)


class Conversation:
    """One request over a pair of sockets, as the door conducts it."""

    def __init__(self, service: Service, target: bytes, *, close: bool = False) -> None:
        self.writer, self.reader = socket.socketpair()
        self.writer.setblocking(False)
        self.active = metrics.ACTIVE.number
        request = RequestHead("GET", target, {}, request_id="id-5")
        self.slot = service.admission.admit(RequestHead("GET", b"/", {}))
        request.charge = self.slot.charge
        self.exchange = Exchange(service, request, self.slot, [(b"corpus-via", b"door")], close=close)
        self.received = b""

    def advance(self, patience: float = 20.0) -> bytes:
        rest = self.exchange.advance(Descriptor(self.writer.fileno()), patience)
        return b"".join(bytes(part) for part in rest)

    def read(self) -> None:
        while True:
            try:
                self.received += self.reader.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return

    def end(self) -> list[Answered]:
        """Finish it, and return what was noted of it."""
        with patch.object(Requests, "done") as done:
            self.exchange.finish()
        self.writer.close()
        self.reader.close()
        assert metrics.ACTIVE.number == self.active
        return [call.args[0] for call in done.call_args_list]


@pytest.mark.parametrize("close", [False, True])
def test_a_small_response_is_sent_at_once(service: Service, close: bool) -> None:
    OF_THREAD.locate_seconds = 50.0  # of responses before
    conversation = Conversation(service, target(3), close=close)
    exchange = conversation.exchange
    assert metrics.ACTIVE.number == conversation.active + 1
    assert (exchange.done, exchange.status, exchange.sent_bytes, exchange.cancelled) == (False, 0, 0, False)
    assert conversation.advance() == b""
    conversation.read()
    head, _, body = conversation.received.partition(b"\r\n\r\n")
    assert body == rows_of(3)
    assert (exchange.done, exchange.status, exchange.sent_bytes) == (True, 200, len(body))
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    assert ("Connection: close" in lines) == close
    assert {"corpus-via: door", "X-Request-Id: id-5"} < set(lines)
    (timing,) = (line for line in lines if line.startswith("Server-Timing"))
    assert 0 < float(re.fullmatch(r"Server-Timing: answer;dur=(.*)", timing)[1]) < 600_000  # type: ignore[index]
    with (
        patch.object(metrics, "count_tokens") as count_tokens,
        patch.object(metrics, "count_part") as count_part,
    ):
        (answered,) = conversation.end()
    source, num_tokens = count_tokens.call_args.args
    assert (dict(source.shares), num_tokens) == ({"web": 1.0}, ROWS * (SEQ_LEN + 1))
    assert count_part.call_args.args == (Part(source.plan_id, 1, 0, 3, 1),)
    spent = count_part.call_args.kwargs
    assert spent["making_seconds"] > 0
    assert spent["sending_seconds"] > 0
    assert sum(spent.values()) == pytest.approx(answered.seconds)
    wait, locate, gather, send = answered.stages
    assert spent["making_seconds"] == pytest.approx(wait + locate + gather)
    assert min(answered.stages) > 0
    assert send + spent["making_seconds"] <= answered.seconds < 600
    assert (answered.route, answered.via, answered.status, answered.sent_bytes, answered.problem_type) == (
        "/v1/batches",
        "door",
        200,
        len(body),
        "",
    )
    assert not service.admission.slots
    assert service.admission.num_bytes == 0


def test_what_a_slow_reader_did_not_take_is_sent_by_others(service: Service) -> None:
    """Piece after piece, in order, with the length that was announced."""
    conversation = Conversation(service, target(0, LARGE_ROWS))
    rounds = 0
    while not conversation.exchange.done:
        rest = conversation.advance(0.0)
        conversation.read()
        conversation.received += rest
        assert not (conversation.exchange.done and rest)
        rounds += 1
    assert rounds > 3
    head, _, body = conversation.received.partition(b"\r\n\r\n")
    assert body == rows_of(0, LARGE_ROWS)
    assert f"Content-Length: {len(body)}" in head.decode()
    (answered,) = conversation.end()
    assert answered.sent_bytes == len(body)
    assert sum(answered.stages) <= answered.seconds


def test_a_wait_for_shards_counts_as_waiting_and_keeps_no_thread(service: Service) -> None:
    now, shards = [100.0], Future[None]()

    def respond(*_: object) -> Slices[Response]:
        yield shards
        return Response.whole(b"x", {})

    with patch.object(module, "respond", respond), patch.object(module.time, "monotonic", lambda: now[0]):
        conversation = Conversation(service, target(3))
        exchange = conversation.exchange
        now[0] += 1.0  # for a thread
        assert conversation.advance() == b""
        assert (exchange.waiting, exchange.done, exchange.status) == (shards, False, 0)
        now[0] += 5.0
        shards.set_result(None)
        assert conversation.advance() == b""
        assert (exchange.waiting, exchange.done, exchange.status) == (None, True, 200)
        (answered,) = conversation.end()
    assert (answered.stages, answered.seconds) == ((6.0, 0.0, 0.0, 0.0), 6.0)


def test_a_piece_is_let_go_before_the_next_one_is_made(service: Service) -> None:
    class Pieces:
        """Four pieces, each in memory of its own."""

        def __init__(self) -> None:
            self.arrays: list[weakref.ref[np.ndarray]] = []

        def __iter__(self) -> Iterator[list[memoryview]]:
            return self

        def __next__(self) -> list[memoryview]:
            assert not any(array() is not None for array in self.arrays)
            if len(self.arrays) == 4:
                raise StopIteration
            array = np.zeros(1000, np.uint8)
            self.arrays.append(weakref.ref(array))
            return [memoryview(array)]

    def respond(*_: object) -> Slices[Response]:
        yield None
        return Response(200, {}, Pieces())

    with patch.object(module, "respond", respond):
        conversation = Conversation(service, target(3))
        assert conversation.advance() == b""
    conversation.read()
    assert conversation.received.endswith(b"\r\n\r\n" + bytes(4000))
    conversation.end()


def test_all_pieces_together_have_the_reader_s_patience_once(service: Service) -> None:
    """A thread must not wait for a reader that takes a little of every piece."""
    conversation, waits = Conversation(service, target(0, LARGE_ROWS)), []
    clock = Mock(side_effect=(float(n) for n in range(10**6)))

    def send(to: Descriptor, group: Sequence[bytes], until: float) -> Sequence[bytes]:
        waits.append(until - clock())
        return ()

    with patch.object(module, "send", send), patch.object(module.time, "monotonic", clock):
        conversation.advance(100.0)
    assert len(waits) > 3
    assert waits == [99.0 - 2 * number for number in range(len(waits))]
    conversation.end()


def test_a_client_that_left_gets_nothing_more(service: Service) -> None:
    conversation = Conversation(service, target(0, LARGE_ROWS))
    assert conversation.advance(0.0)
    conversation.exchange.cancelled = True
    with pytest.raises(ClientLeft, match=r"^the client left$"):
        conversation.advance()
    with patch.object(metrics, "count_tokens") as tokens, patch.object(metrics, "count_part") as part:
        (answered,) = conversation.end()
    tokens.assert_not_called()
    part.assert_not_called()
    assert answered.status == 200
    assert answered.sent_bytes < LARGE_ROWS * (SEQ_LEN + 1) * 2


def test_a_client_that_left_before_its_response_is_not_counted(service: Service) -> None:
    conversation = Conversation(service, target(3))
    conversation.exchange.cancelled = True
    with pytest.raises(ClientLeft, match=r"^the client left$"):
        conversation.advance()
    assert conversation.end() == []
    assert not service.admission.slots


def test_a_refusal_is_a_problem_document(service: Service) -> None:
    conversation = Conversation(service, target("x"))
    conversation.advance()
    conversation.read()
    with patch.object(metrics, "count_tokens") as tokens, patch.object(metrics, "count_part") as part:
        (answered,) = conversation.end()
    body = json.loads(conversation.received.partition(b"\r\n\r\n")[2])
    assert (body["type"], body["request_id"], body["parameter"]) == ("invalid-parameter", "id-5", "step")
    assert (answered.status, answered.problem_type) == (422, "invalid-parameter")
    tokens.assert_not_called()
    part.assert_not_called()


def test_a_corpus_that_has_changed_is_logged(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "web.bin").write_bytes(b"")
    conversation = Conversation(service, target(3))
    conversation.advance()
    (answered,) = conversation.end()
    assert (answered.status, answered.problem_type) == (503, "corpus-changed")
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == ["corpus-changed"]


def test_a_failure_is_logged_and_is_no_silence(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with patch.object(service, "plan_of", side_effect=ValueError("secret")):
        conversation = Conversation(service, target(3))
        conversation.advance()
    conversation.read()
    (answered,) = conversation.end()
    assert (answered.status, answered.problem_type) == (500, "internal-error")
    assert b"secret" not in conversation.received
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.getMessage() == "/v1/batches failed"
    assert record.exc_info is not None


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        (CorpusServerError("what"), True),
        (CorpusChanged("what"), True),
        (NotReady("what"), True),
        (Overloaded("what"), False),
        (InvalidParameter("what"), False),
    ],
    ids=lambda each: getattr(each, "slug", ""),
)
def test_errors_of_the_server_s_own_are_logged(
    caplog: pytest.LogCaptureFixture, error: CorpusServerError, is_logged: bool
) -> None:
    log_error(error)
    assert [record.getMessage() for record in caplog.records] == [f"{error.slug}: what"] * is_logged


def test_a_response_under_five_hundred_is_the_caller_s(caplog: pytest.LogCaptureFixture) -> None:
    error = CorpusServerError("what")
    error.status = 499  # type: ignore[misc]
    log_error(error)
    assert not caplog.records


def text_of(step: int) -> bytes:
    return b"GET " + target(step) + b" HTTP/1.1\r\nHost: x\r\n\r\n"


def test_what_was_made_ahead_is_sent_as_if_it_were_made_now(service: Service) -> None:
    run = following(text_of(4), 3)
    made = make_ahead(service, run, ANYONE)
    assert list(made) == run
    for step, text in enumerate(run, 5):
        request = parse_simple_get(text)
        assert request is not None
        assert made[text].request == replace(request, caller=ANYONE)
        assert isinstance(made[text].response.body, list)  # read already, and may be read twice
        conversation = Conversation(service, target(step))
        with patch.object(metrics, "add") as add:
            head, *parts = conversation.exchange.whole(made[text].response)
        add.assert_called_once_with("corpus_made_ahead")
        content = rows_of(step)
        assert b"".join(bytes(part) for part in parts) == content
        assert bytes(head).startswith(b"HTTP/1.1 200 OK\r\n")
        assert (conversation.slot.num_bytes, service.admission.num_bytes) == (len(content), len(content))
        exchange = conversation.exchange
        assert (exchange.done, exchange.sent_bytes, exchange.status) == (True, len(content), 200)
        with patch.object(metrics, "count_part") as count_part:
            (answered,) = conversation.end()
        assert (answered.stages, answered.sent_bytes, answered.status) == ((), len(content), 200)
        spent = count_part.call_args.kwargs
        assert 0 < spent["making_seconds"] <= answered.seconds < 600
        assert spent["sending_seconds"] >= 0


def test_what_was_made_ahead_of_a_change_is_refused(
    service: Service, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = following(text_of(4))
    made = make_ahead(service, [text], ANYONE)
    (tmp_path / "web.bin").write_bytes(b"")
    conversation = Conversation(service, target(5))
    head, *parts = conversation.exchange.whole(made[text].response)
    assert bytes(head).startswith(b"HTTP/1.1 503 ")
    assert json.loads(b"".join(bytes(part) for part in parts))["type"] == "corpus-changed"
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == ["corpus-changed"]
    (answered,) = conversation.end()
    assert (answered.status, answered.problem_type) == (503, "corpus-changed")


@pytest.mark.parametrize(
    "text",
    [
        text_of(4).replace(b"Host", b"Expect: 100-continue\r\nHost"),
        text_of(4).replace(b"seq_len=33", b"seq_len=x"),
        text_of(4).replace(b"corpus=web", b"corpus=web&corpus=web"),
        text_of(4).replace(b"corpus=web", b"corpus=wbe"),
    ],
    ids=["not plain", "no number", "twice", "unknown"],
)
def test_what_would_be_refused_is_not_made_ahead(service: Service, text: bytes) -> None:
    assert make_ahead(service, following(text, 3), ANYONE) == {}


def test_a_response_that_would_wait_ends_what_is_made_ahead(service: Service) -> None:
    """For shards of another machine: the request itself will wait."""
    is_closed = []

    def respond(*_: object) -> Iterator[object]:
        try:
            yield None
            yield object()
        finally:
            is_closed.append(True)

    with patch.object(module, "respond", respond):
        assert make_ahead(service, following(text_of(4), 3), ANYONE) == {}
        assert is_closed == [True]
