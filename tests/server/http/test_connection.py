"""Requests known by their text: in any company, cut anywhere, to slow readers, and when they fail."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO

import pytest
import xxhash

from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer

SEQ_LEN, ROWS, STEPS = 256, 16, 120
PLAN = {"seq_len": SEQ_LEN, "seed": 3, "stages": [{"global_batch_size": ROWS, "mixture": {"a": 1}}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    corpus = write_raw(folder / "a.bin", some_tokens(1_000_000))
    with RunningServer({"a": corpus}, folder) as running:
        yield running


@pytest.fixture(scope="module")
def plan_id(server: RunningServer) -> str:
    return str(server.post_plan(PLAN).json()["id"])


@pytest.fixture(scope="module")
def batches(server: RunningServer, plan_id: str) -> list[bytes]:
    """Of all steps, as the whole way answers them: one that begins with its step is never known."""
    found = [server.get(f"/v1/batches?step={step}&plan={plan_id}&format=raw") for step in range(STEPS)]
    return [answer.body + xxhash.xxh3_64_digest(answer.body) for answer in found]


def known(plan_id: str, step: int, count: int = 1) -> bytes:
    """A request as the client's; all are the same but for their step."""
    query = f"plan={plan_id}&step={step}&count={count}&format=raw&checksum=tail"
    return f"GET /v1/batches?{query} HTTP/1.1\r\nHost: x\r\nAccept-Encoding: identity\r\n\r\n".encode()


def read_answer(stream: IO[bytes]) -> tuple[int, bytes]:
    """The status and body of the next answer."""
    status = int(stream.readline().split()[1])
    length = 0
    while line := stream.readline().strip():
        name, _, value = line.partition(b":")
        length = int(value) if name.lower() == b"content-length" else length
    return status, stream.read(length)


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


@pytest.mark.parametrize("seed", range(8))
def test_in_any_company_and_cut_anywhere(
    server: RunningServer, plan_id: str, batches: list[bytes], seed: int
) -> None:
    """Many requests on the wire, known ones and others, in pieces of any size: the answers come in order."""
    draw = random.Random(seed)
    requests, wanted, step = [], [], draw.randrange(STEPS)
    for _ in range(150):
        kind = draw.random()
        if kind < 0.8:
            step = (step + 1) % STEPS if draw.random() < 0.9 else draw.randrange(STEPS)
            requests.append(known(plan_id, step))
            wanted.append((200, batches[step]))
        elif kind < 0.85:
            requests.append(known("0" * 64, step))
            wanted.append((404, b"unknown-plan"))
        elif kind < 0.9:
            requests.append(known(plan_id, 2**41))
            wanted.append((422, b"invalid-parameter"))
        elif kind < 0.95:
            requests.append(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            wanted.append((200, b""))
        else:
            body = json.dumps(PLAN).encode()
            requests.append(
                b"POST /v1/plans HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            wanted.append((200, plan_id.encode()))
    sent = b"".join(requests)

    with connect(server) as sock, sock.makefile("rb") as stream:

        def send() -> None:
            at = 0
            while at < len(sent):
                size = draw.choice([1, 30, 200, 1000, 5000])
                sock.sendall(sent[at : at + size])
                at += size
                if draw.random() < 0.2:
                    time.sleep(draw.random() * 2e-3)

        sender = threading.Thread(target=send)
        sender.start()
        for status, body in wanted:
            got = read_answer(stream)
            assert got[0] == status
            assert got[1] == body if body in batches else body in got[1]
        sender.join()


def test_a_slow_reader_gets_everything_in_order(
    server: RunningServer, plan_id: str, batches: list[bytes]
) -> None:
    """More small answers than the kernel takes, asked for before the first is read."""
    with connect(server) as sock, sock.makefile("rb") as stream:
        sock.sendall(b"".join(known(plan_id, step) for step in range(STEPS)) * 20)
        time.sleep(0.5)
        for _ in range(20):
            for step in range(STEPS):
                assert read_answer(stream) == (200, batches[step])


def test_answers_under_way_are_finished_before_the_end(tmp_path: Path) -> None:
    corpus = write_raw(tmp_path / "a.bin", some_tokens(1_000_000))
    codes: list[int] = []
    with RunningServer({"a": corpus}, tmp_path) as server:
        plan_id = server.post_plan(PLAN).json()["id"]
        with connect(server) as sock, sock.makefile("rb") as stream:
            for step in (0, 2000):  # the second one is known
                sock.sendall(known(plan_id, step, count=2000))
                if not step:
                    first = read_answer(stream)
            time.sleep(0.3)
            stopping = threading.Thread(target=lambda: codes.append(server.stop()))
            stopping.start()
            time.sleep(0.3)
            status, body = read_answer(stream)
            assert (status, len(body)) == (200, len(first[1]))
            assert xxhash.xxh3_64_digest(body[:-8]) == body[-8:]
            assert stream.read() == b""
        stopping.join(20)
        assert codes == [0]


def test_a_request_that_cannot_be_answered_goes_the_whole_way(tmp_path: Path) -> None:
    """Its shard has changed: refused by the application, and so is the one behind it."""
    corpus = write_raw(tmp_path / "a.bin", some_tokens(100_000))
    with RunningServer({"a": corpus}, tmp_path) as server:
        plan_id = server.post_plan(PLAN).json()["id"]
        with connect(server) as sock, sock.makefile("rb") as stream:
            for step in range(3):
                sock.sendall(known(plan_id, step))
                assert read_answer(stream)[0] == 200
            corpus.write_bytes(bytes(200_000))
            os.utime(corpus, ns=(1, 1))
            # Step 3 was made ahead, 90 was not; more are on the wire behind them.
            for together in ([3, 4], [90, 3, 91]):
                sock.sendall(b"".join(known(plan_id, step) for step in together))
                for _ in together:
                    status, body = read_answer(stream)
                    assert (status, json.loads(body)["type"]) == (503, "corpus-changed")


def test_a_connection_that_breaks_off_hurts_nobody(
    server: RunningServer, plan_id: str, batches: list[bytes]
) -> None:
    for step in range(40):
        with closing(connect(server)) as sock:
            sock.sendall(known(plan_id, step) + known(plan_id, step + 1) + known(plan_id, 5)[: 3 * step])
            if step % 2:
                sock.recv(1000)
    with connect(server) as sock, sock.makefile("rb") as stream:
        sock.sendall(known(plan_id, 7))
        assert read_answer(stream) == (200, batches[7])
    server.wait_until_idle()
