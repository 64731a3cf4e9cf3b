"""Measure the limit: a socket and a gather without a protocol. 24 bytes ask for steps, tokens come back.

Four ways to send the windows of the map:

    gather    NumPy's fancy index into a new array, a step at a time
    join      `b"".join` of the map's slices into new bytes, a step at a time
    piece     copy 896 KiB of the request's windows at a time into one reused buffer
    sendmsg   no copy: the kernel takes the map's slices

and two amounts in flight: a few requests of one step, and as many bytes as our client asks for. Which
combination is fastest depends on the shape and the machine, so the limit is the strongest one of each round.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch

from scripts.benchmarks.contender import Shape
from scripts.benchmarks.peers.common import REQUEST, Peer, Windows, publish
from scripts.benchmarks.servers import Address

Sending = Literal["gather", "join", "piece", "sendmsg"]
SENDINGS: tuple[Sending, ...] = get_args(Sending)

MAX_SLICES = 1024  # per call; Linux takes no more (IOV_MAX)
PIECE_BYTES = 896 << 10  # stays in 1 MiB of L2 cache between the copy and the send
FEW = 3  # requests in flight: one is sent, one is received, one waits


def serve(path: Path, address_file: Path) -> None:
    """Answer every connection in a thread of its own; the bench measures one at a time."""
    Windows(path)  # a wrong path fails before the address is published
    listener = socket.create_server(("127.0.0.1", 0))
    publish(address_file, str(listener.getsockname()[1]))
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=_response_all, args=(connection, Windows(path)), daemon=True).start()


class Bare(Peer):
    """Receive straight into a tensor.

    Args:
        in_flight: requests that are sent before the first response is read, this one included.
        steps: of one request.
    """

    def __init__(
        self,
        name: str,
        peer: Address,
        shape: Shape,
        *,
        sending: Sending,
        in_flight: int = FEW,
        steps: int = 1,
    ) -> None:
        super().__init__(name, peer, shape, in_flight * steps * shape.num_bytes)
        self._sending, self._steps = SENDINGS.index(sending), steps
        self._socket = socket.create_connection(("127.0.0.1", int(peer.at)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = (shape.rows, shape.length)
        self._ring = deque(torch.empty(size, dtype=torch.uint16) for _ in range(3))
        self._asked = self._received = 0
        for _ in range(in_flight - 1):
            self._ask()

    def next(self) -> torch.Tensor:
        if self._received % self._steps == 0:
            self._ask()
        self._received += 1
        batch = self._ring[0]
        self._ring.rotate(-1)
        view = batch.numpy().data.cast("B")
        while view:
            received = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionError(f"{self.name}: the peer closed the connection")
            view = view[received:]
        return batch

    def close(self) -> None:
        self._socket.close()

    def _ask(self) -> None:
        request = REQUEST.pack(self._sending, self._asked, self._steps, self._shape.rows, self._shape.length)
        self._socket.sendall(request)
        self._asked += self._steps


def makers(
    peer: Address, shape: Shape, steps: int, in_flight: int, sendings: Sequence[Sending] = SENDINGS
) -> Iterator[partial[Bare]]:
    """Yield what connects some ways to send, with few bytes in flight and with our client's.

    Args:
        steps, in_flight: of our client: steps of a request, and requests.
    """
    for sending in sendings:
        make = partial(Bare, peer=peer, shape=shape, sending=sending)
        yield partial(make, f"bare {sending}, {FEW} steps in flight")
        name = f"bare {sending}, {in_flight} x {steps} steps in flight"
        yield partial(make, name, steps=steps, in_flight=in_flight)


def _response_all(connection: socket.socket, windows: Windows) -> None:
    request, buffer = bytearray(REQUEST.size), np.empty(PIECE_BYTES // 2, np.uint16)
    with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the consumer left
        while connection.recv_into(request, REQUEST.size, socket.MSG_WAITALL) == REQUEST.size:
            sending, step, count, rows, length = REQUEST.unpack(request)
            if SENDINGS[sending] == "piece":
                starts, most = windows.starts(step, count, rows, length), len(buffer) // length
                for first in range(0, len(starts), most):
                    piece = buffer[: len(starts[first : first + most]) * length]
                    windows.copy(starts[first : first + most], length, piece)
                    connection.sendall(piece.data.cast("B"))
                continue
            for each in range(step, step + count):
                if SENDINGS[sending] == "gather":
                    connection.sendall(windows.gather(each, 1, rows, length).data.cast("B"))
                elif SENDINGS[sending] == "join":
                    connection.sendall(b"".join(windows.slices(each, rows, length)))
                else:
                    _send_slices(connection, windows.slices(each, rows, length))


def _send_slices(connection: socket.socket, left: list[memoryview]) -> None:
    while left:
        sent = connection.sendmsg(left[:MAX_SLICES])
        done = 0
        while done < len(left) and sent >= len(left[done]):
            sent -= len(left[done])
            done += 1
        left = left[done:]
        if left:
            left[0] = left[0][sent:]
