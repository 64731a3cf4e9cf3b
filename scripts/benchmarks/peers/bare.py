"""The limit: a socket and a gather, no protocol. 16 bytes ask for a step, the answer is its tokens.

In four forms: over TCP or a Unix-domain socket, and with the windows copied together and sent
(`gather`, each token copied once before the socket) or sent from the map by the kernel (`sendmsg`).
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from scripts.benchmarks.contender import Shape
from scripts.benchmarks.peers.common import REQUEST, Windows, publish, starts_of

Transport = Literal["tcp", "unix"]
Sending = Literal["gather", "sendmsg"]

MAX_SLICES = 1024
"""Linux takes this many pieces in one call (IOV_MAX)."""


def serve(path: Path, address_file: Path, transport: Transport, sending: Sending) -> None:
    windows = Windows(path)
    answer = {"gather": _send_gathered, "sendmsg": _send_slices}[sending]
    if transport == "unix":
        address = str(address_file.with_suffix(".socket"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        address = str(listener.getsockname()[1])
    publish(address_file, address)
    while True:
        connection, _ = listener.accept()
        with connection:
            if transport == "tcp":
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _answer_all(connection, windows, answer)


class Bare:
    """Receives straight into a tensor, with `in_flight` requests on the wire.

    Args:
        address: a port of loopback or the path of a socket.
        num_tokens: of the corpus.
    """

    def __init__(
        self, name: str, address: str, pids: list[int], shape: Shape, num_tokens: int, *, in_flight: int = 2
    ) -> None:
        self.name = name
        self.pids = pids
        self.ahead_bytes = in_flight * shape.num_bytes
        self._shape, self._num_tokens = shape, num_tokens
        if address.startswith("/"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address)
        else:
            self._socket = socket.create_connection(("127.0.0.1", int(address)))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = (shape.rows, shape.length)
        self._ring = deque(torch.empty(size, dtype=torch.uint16) for _ in range(3))
        self._step = 0
        for _ in range(in_flight - 1):
            self._ask()

    def next(self) -> torch.Tensor:
        self._ask()
        batch = self._ring[0]
        self._ring.rotate(-1)
        view = batch.numpy().data.cast("B")
        while view:
            received = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionError(f"{self.name}: the peer closed the connection")
            view = view[received:]
        return batch

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        return starts_of(step, self._num_tokens, self._shape.rows, self._shape.length)

    def close(self) -> None:
        self._socket.close()

    def _ask(self) -> None:
        self._socket.sendall(REQUEST.pack(self._step, self._shape.rows, self._shape.length))
        self._step += 1


Answer = Callable[[socket.socket, Windows, int, int, int], None]


def _answer_all(connection: socket.socket, windows: Windows, answer: Answer) -> None:
    request = bytearray(REQUEST.size)
    try:
        while connection.recv_into(request, REQUEST.size, socket.MSG_WAITALL) == REQUEST.size:
            answer(connection, windows, *REQUEST.unpack(request))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the consumer left with answers under way


def _send_gathered(connection: socket.socket, windows: Windows, step: int, rows: int, length: int) -> None:
    connection.sendall(windows.gather(step, rows, length).data.cast("B"))


def _send_slices(connection: socket.socket, windows: Windows, step: int, rows: int, length: int) -> None:
    left = windows.slices(step, rows, length)
    while left:
        sent = connection.sendmsg(left[:MAX_SLICES])
        done = 0
        while done < len(left) and sent >= len(left[done]):
            sent -= len(left[done])
            done += 1
        left = left[done:]
        if left:
            left[0] = left[0][sent:]
