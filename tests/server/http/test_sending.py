"""Writing to a connection from a thread: everything, a part, or nothing any more."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from corpus_server.answers.response import ClientLeft
from corpus_server.http import sending
from corpus_server.http.sending import UNIX_BUFFER_BYTES, Descriptor, send, widen

PARTS = [b"head", memoryview(bytes(range(256)) * 4000), b"", b"tail"]
WHOLE = b"".join(bytes(part) for part in PARTS)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection: the writer, which never blocks, and the reader."""
    writer, reader = socket.socketpair()
    writer.setblocking(False)
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 50_000)
    with writer, reader:
        yield writer, reader


def take(reader: socket.socket) -> bytes:
    """Read what is there."""
    found = b""
    while True:
        try:
            found += reader.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return found


def test_what_was_not_taken_in_time_is_returned(pair: tuple[socket.socket, socket.socket]) -> None:
    writer, reader = pair
    found, rest, rounds = b"", PARTS, 0
    with Descriptor(writer.fileno()) as to:
        while rest:
            rest = send(to, rest, time.monotonic() - 1.0)
            found += take(reader)
            rounds += 1
            assert found + b"".join(bytes(part) for part in rest) == WHOLE
    assert rounds > 2
    assert send(to, [], 0.0) == []


def test_a_reader_is_waited_for_until_the_time_is_over(pair: tuple[socket.socket, socket.socket]) -> None:
    writer, _ = pair
    began = time.monotonic()
    with Descriptor(writer.fileno()) as to:
        assert send(to, PARTS, began + 0.05)
    assert time.monotonic() - began >= 0.04


@pytest.mark.parametrize(
    ("patience", "waits"), [(2.5, [2500.0]), (0.5, [500.0]), (0.0, []), (-0.5, [])], ids=str
)
def test_a_reader_is_waited_for_as_long_as_was_said(
    pair: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    patience: float,
    waits: list[float],
) -> None:
    found: list[float] = []
    registered: list[tuple[int, int]] = []

    class Poll:
        def register(self, number: int, events: int) -> None:
            registered.append((number, events))

        def poll(self, milliseconds: float) -> list[tuple[int, int]]:
            found.append(milliseconds)
            return []

    monkeypatch.setattr(sending.select, "poll", Poll)
    monkeypatch.setattr(sending.time, "monotonic", lambda: 100.0)
    with Descriptor(pair[0].fileno()) as to:
        assert send(to, PARTS, 100.0 + patience)
        assert found == waits
        assert registered == [(to.number, select.POLLOUT)] * len(waits)


def test_a_reader_that_goes_on_gets_everything(pair: tuple[socket.socket, socket.socket]) -> None:
    writer, reader = pair
    found = bytearray()

    def read() -> None:
        while len(found) < len(WHOLE):
            found.extend(reader.recv(10_000))

    thread = threading.Thread(target=read)
    thread.start()
    with Descriptor(writer.fileno()) as to:
        assert not send(to, PARTS, time.monotonic() + 60)
    thread.join(60)
    assert found == WHOLE


def test_a_client_that_has_left_is_told_from_a_slow_one(pair: tuple[socket.socket, socket.socket]) -> None:
    writer, reader = pair
    reader.close()
    with Descriptor(writer.fileno()) as to, pytest.raises(ClientLeft, match=r"^the connection is closed$"):
        send(to, PARTS, time.monotonic() + 60)


@pytest.mark.parametrize("how", ["context", "close", "forgotten"])
def test_a_descriptor_is_a_second_one_that_is_closed_at_its_end(
    pair: tuple[socket.socket, socket.socket], how: str
) -> None:
    writer, reader = pair
    to = Descriptor(writer.fileno())
    writer.close()
    os.write(to.number, b"x")
    assert reader.recv(10) == b"x"
    with pytest.raises(BlockingIOError):
        reader.recv(10, socket.MSG_DONTWAIT)
    if how == "context":
        with to as entered:
            assert entered is to
        assert to.number == -1
    elif how == "close":
        to.close()
        to.close()
    else:
        del to
    assert reader.recv(10, socket.MSG_DONTWAIT) == b""


def test_a_connection_that_is_closed_has_no_second_descriptor() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        Descriptor(-1)
    for number in (0, 1, 2):  # nothing else was closed
        os.fstat(number)


def test_only_unix_sockets_are_widened(pair: tuple[socket.socket, socket.socket]) -> None:
    writer, _ = pair
    before = writer.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    widen(writer)
    most = 2 * UNIX_BUFFER_BYTES  # the kernel counts its own overhead as well
    assert before < writer.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= most
    with socket.socket() as tcp:
        before = tcp.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        widen(tcp)
        assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before


def test_without_the_right_to_exceed_the_limit_a_buffer_is_as_large_as_it_may_be() -> None:
    class Limited(socket.socket):
        """A socket of a process without CAP_NET_ADMIN."""

        asked: list[tuple[int, int, int]]

        def setsockopt(self, *option: int) -> None:  # type: ignore[override]
            self.asked.append(option)  # type: ignore[arg-type]
            if option[1] != socket.SO_SNDBUF:
                raise PermissionError

    with Limited(socket.AF_UNIX) as limited:
        limited.asked = []
        widen(limited)
    assert limited.asked[1:] == [(socket.SOL_SOCKET, socket.SO_SNDBUF, UNIX_BUFFER_BYTES)]
