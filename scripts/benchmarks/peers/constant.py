"""Answer every request with the same bytes, on two ports: what a request costs without any work behind it.

UVICORN   an ASGI application of two messages, under uvicorn with httptools and uvloop
LOOP      a protocol of uvloop that waits for the end of a head, and parses nothing
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import cast

import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from scripts.benchmarks.peers.common import publish
from scripts.processes import HOST

UVICORN, LOOP = "constant bytes, uvicorn", "constant bytes, uvloop"


def serve(path: Path, address_file: Path) -> None:
    """Serve the response that a file holds, head and body, until SIGTERM."""
    listeners = [socket.create_server((HOST, 0)) for _ in (UVICORN, LOOP)]
    publish(address_file, " ".join(str(each.getsockname()[1]) for each in listeners))
    uvloop.run(_serve(path.read_bytes(), *listeners))


async def _serve(response: bytes, first: socket.socket, second: socket.socket) -> None:
    head, _, body = response.partition(b"\r\n\r\n")
    lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:]]
    headers = [(name, value) for name, _, value in lines if name.lower() != b"date"]  # uvicorn has its own

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    class Constant(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self._transport, self._received = cast("asyncio.WriteTransport", transport), b""

        def data_received(self, data: bytes) -> None:
            self._received += data
            if self._received.endswith(b"\r\n\r\n"):
                self._received = b""
                self._transport.write(response)

    await asyncio.get_running_loop().create_server(Constant, sock=second)
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, server_header=False)
    config.timeout_keep_alive = 3600  # its connection rests while others have their turn, for above 5 s
    await uvicorn.Server(config).serve(sockets=[first])
