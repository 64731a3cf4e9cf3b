"""FastAPI as one would write it in ten minutes, read with httpx."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt
import torch

from scripts.benchmarks.contender import Shape
from scripts.benchmarks.peers.common import publish, starts_of


def serve(path: Path, address_file: Path) -> None:
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
    publish(address_file, str(listener.getsockname()[1]))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    server.run(sockets=[listener])


class Naive:
    """`httpx.Client().get(...).content`, copied into a tensor that may be written."""

    def __init__(self, name: str, address: str, pids: list[int], shape: Shape, num_tokens: int) -> None:
        self.name = name
        self.pids = pids
        self.ahead_bytes = 0
        self._url = f"http://127.0.0.1:{address}/batch"
        self._shape, self._num_tokens = shape, num_tokens
        self._client = httpx.Client()
        self._step = 0

    def next(self) -> torch.Tensor:
        query = {"step": self._step, "rows": self._shape.rows, "length": self._shape.length}
        self._step += 1
        content = self._client.get(self._url, params=query).raise_for_status().content
        tokens = torch.frombuffer(bytearray(content), dtype=torch.uint16)
        return tokens.view(self._shape.rows, self._shape.length)

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        return starts_of(step, self._num_tokens, self._shape.rows, self._shape.length)

    def close(self) -> None:
        self._client.close()
