"""How token answers leave: checksums at their end, threads and loop by turns, other servers' protocols."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import xxhash

from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer, ask, host_and_port

TAIL_BYTES = 8
NUM_TOKENS = 3_000_000
BATCH = "/v1/batches?corpus=big&seq_len=1024&batch_size=64&step=5"
TARGETS = [
    BATCH,
    BATCH + "&count=20",  # more than is ever held at a time
    "/v1/batches?corpus=big&seq_len=1&batch_size=10000&step=5",  # small, and located in parts
    "/v1/corpora/big/tokens?start=7&count=900001&format=raw",
    "/v1/corpora/big/tokens?start=7&count=0&format=raw",
    "/v1/indices?corpus=big&seq_len=1024&batch_size=64&step=5&format=raw",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_raw(tmp_path_factory.mktemp("big") / "big.bin", some_tokens(NUM_TOKENS))


@pytest.fixture(scope="module")
def running(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer({"big": corpus}, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.parametrize("target", TARGETS)
def test_a_tail_is_the_header_s_checksum_after_the_same_array(running: RunningServer, target: str) -> None:
    with_header, with_tail = running.get(target), running.get(target + "&checksum=tail")
    array, tail = with_tail.body[:-TAIL_BYTES], with_tail.body[-TAIL_BYTES:]
    assert array == with_header.body == running.get(target + "&checksum=false").body
    assert with_header.headers["Corpus-Checksum"] == f"xxh3-64={tail.hex()}"
    assert tail == xxhash.xxh3_64_digest(array)
    assert with_tail.headers["Corpus-Checksum"] == "xxh3-64=tail"
    assert int(with_tail.headers["Content-Length"]) == len(array) + TAIL_BYTES
    for name in ("Corpus-Shape", "Corpus-Dtype", "Corpus-Plan", "Cache-Control", "Content-Type"):
        assert with_tail.headers[name] == with_header.headers[name]


def test_with_a_tail_it_is_another_representation(running: RunningServer) -> None:
    """A cache that compares tags must never give one for the other."""
    tag = running.get(BATCH).headers["ETag"]
    tail = running.get(BATCH + "&checksum=tail")
    assert tail.headers["ETag"] not in (tag, None)
    kept = running.get(BATCH + "&checksum=tail", headers={"If-None-Match": tail.headers["ETag"]})
    assert (kept.status, kept.body) == (304, b"")
    assert running.get(BATCH + "&checksum=tail", headers={"If-None-Match": tag}).status == 200


def test_head_of_a_tail(running: RunningServer) -> None:
    head = running.get(BATCH + "&checksum=tail", method="HEAD")
    assert (head.status, head.body, head.headers["Content-Length"]) == (200, b"", str(64 * 1025 * 2 + 8))


@pytest.mark.parametrize("chosen", ["npy", "json"])
@pytest.mark.parametrize("target", [BATCH, "/v1/corpora/big/tokens?start=7", "/v1/indices" + BATCH[11:]])
def test_only_raw_arrays_have_tails(running: RunningServer, target: str, chosen: str) -> None:
    answer = running.get(f"{target}&checksum=tail&format={chosen}")
    assert (answer.status, answer.json()["type"]) == (422, "invalid-parameter")


def slow_reader(server: RunningServer) -> socket.socket:
    """Return a connection whose kernel takes little ahead."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(20)
    connection.connect(host_and_port(server.url))
    return connection


def next_answer(stream: http.client.HTTPResponse | socket.socket, received: bytearray) -> bytes:
    """Read one answer's body off a connection, in sips; what is behind it stays in `received`."""
    assert isinstance(stream, socket.socket)
    while b"\r\n\r\n" not in received:
        received += stream.recv(1000)
    head, _, rest = bytes(received).partition(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    length = int(lines[b"content-length"])
    body = bytearray(rest)
    while len(body) < length:
        part = stream.recv(50_000)
        assert part
        body += part
    received[:] = body[length:]
    return bytes(body[:length])


def test_an_answer_waits_for_what_the_loop_still_sends(running: RunningServer) -> None:
    """A large JSON answer to a slow reader, and at once a token answer, which a thread would send past it."""
    targets = [
        BATCH + "&count=4&format=json",
        BATCH,
        BATCH + "&count=20&checksum=tail",
        BATCH + "&format=json",
    ]
    expected = [running.get(target).body for target in targets]
    with closing(slow_reader(running)) as connection:
        connection.sendall(
            "".join(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n" for target in targets).encode()
        )
        time.sleep(0.3)
        received = bytearray()
        assert [next_answer(connection, received) for _ in targets] == expected
        assert not received


@pytest.mark.parametrize("head", ["HTTP/1.0\r\n", "HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"])
def test_a_connection_that_is_not_kept_ends_with_the_answer(running: RunningServer, head: str) -> None:
    expected = running.get(BATCH).body
    with closing(slow_reader(running)) as connection:
        connection.sendall(f"GET {BATCH} {head}\r\n".encode())
        received = bytearray()
        assert next_answer(connection, received) == expected
        assert connection.recv(1) == b""


def test_a_reader_that_breaks_off_leaves_nothing_behind(running: RunningServer) -> None:
    num_descriptors = len(list(Path(f"/proc/{running.worker_pid}/fd").iterdir()))
    for _ in range(5):
        with closing(slow_reader(running)) as connection:
            connection.sendall(f"GET {BATCH}&count=200&checksum=tail HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert connection.recv(12) == b"HTTP/1.1 200"
    running.wait_until_idle()
    assert "unexpected=" not in running.log()
    assert len(list(Path(f"/proc/{running.worker_pid}/fd").iterdir())) <= num_descriptors + 1
    assert running.get(BATCH).status == 200


def test_many_readers_of_every_speed_at_once(running: RunningServer) -> None:
    """More answers than threads; a slow one holds none of them, and no byte goes astray."""
    expected = {step: running.get(f"{BATCH[:-1]}{step}&count=10").body for step in range(12)}
    wrong: list[int] = []

    def read(step: int) -> None:
        with closing(slow_reader(running) if step % 3 == 0 else running.connect()) as connection:
            if isinstance(connection, socket.socket):
                connection.sendall(f"GET {BATCH[:-1]}{step}&count=10 HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                body = next_answer(connection, bytearray())
            else:
                body = ask(connection, f"{BATCH[:-1]}{step}&count=10").body
            if body != expected[step]:
                wrong.append(step)

    threads = [threading.Thread(target=read, args=(step,)) for step in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
