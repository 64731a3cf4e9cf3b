"""The servers that ours is compared with, each a process of its own.

`python -m scripts.benchmarks.peers bare|naive CORPUS PORT_FILE`

bare: a TCP socket and a gather, no protocol: 8 bytes ask for a step, the answer is its tokens. This is
the limit for a Python process that copies each answer once: the gather is the fastest that NumPy has.
naive: FastAPI as one would write it in ten minutes.
"""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path

import numpy as np

REQUEST = struct.Struct("<QII")
"""step, rows, window length."""


def starts_of(step: int, num_tokens: int, rows: int, length: int) -> np.ndarray:
    """Return the window starts of a step, `(rows,) int64`, as every peer computes them."""
    return np.random.default_rng(step).integers(0, num_tokens - length, rows)


def serve_bare(path: Path, port_file: Path) -> None:
    data = np.memmap(path, dtype=np.uint16, mode="r")
    listener = socket.create_server(("127.0.0.1", 0))
    _publish(port_file, listener.getsockname()[1])
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _answer(connection, data)


def _answer(connection: socket.socket, data: np.ndarray) -> None:
    views: dict[int, np.ndarray] = {}
    request = bytearray(REQUEST.size)
    while connection.recv_into(request, REQUEST.size, socket.MSG_WAITALL) == REQUEST.size:
        step, rows, length = REQUEST.unpack(request)
        if length not in views:
            views[length] = np.lib.stride_tricks.sliding_window_view(data, length)
        batch = views[length][starts_of(step, len(data), rows, length)]
        connection.sendall(memoryview(batch).cast("B"))


def serve_naive(path: Path, port_file: Path) -> None:
    import uvicorn
    from fastapi import FastAPI, Response

    data = np.memmap(path, dtype=np.uint16, mode="r")
    app = FastAPI()

    @app.get("/batch")
    def batch(step: int, rows: int, length: int) -> Response:
        starts = starts_of(step, len(data), rows, length)
        tokens = np.stack([data[start : start + length] for start in starts])
        return Response(tokens.tobytes(), media_type="application/octet-stream")

    listener = socket.create_server(("127.0.0.1", 0))
    _publish(port_file, listener.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    server.run(sockets=[listener])


def _publish(port_file: Path, port: int) -> None:
    partial = port_file.with_suffix(".partial")
    partial.write_text(str(port))
    partial.rename(port_file)


if __name__ == "__main__":
    {"bare": serve_bare, "naive": serve_naive}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
