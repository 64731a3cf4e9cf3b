"""Arrow Flight: one DoGet, whose record batches have a column of fixed-size binary, a window each.

Neither side copies in Python: the server's buffers are the gathered array, the consumer's tensors are
views of what was received. Several small steps share a record batch, as with gRPC.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.flight as flight  # type: ignore[import-untyped]
import torch

from scripts.benchmarks.contender import Shape, read_only_tensor
from scripts.benchmarks.peers.common import REQUEST, Windows, publish, starts_of, steps_per_message
from scripts.benchmarks.peers.grpc_stream import WINDOW_BYTES


def serve(path: Path, address_file: Path) -> None:
    server = _Server(Windows(path))
    publish(address_file, str(server.port))
    server.serve()


class _Server(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, windows: Windows) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._windows = windows

    def do_get(self, context: Any, ticket: Any) -> Any:
        step, rows, length = REQUEST.unpack(ticket.ticket)
        schema = pa.schema([("window", pa.binary(2 * length))])
        return flight.GeneratorStream(schema, self._batches(schema, step, rows, length))

    def _batches(self, schema: Any, step: int, rows: int, length: int) -> Iterator[Any]:
        count = steps_per_message(rows, length)
        while True:
            tokens = self._windows.gather_steps(step, count, rows, length)
            column = pa.Array.from_buffers(schema.field(0).type, len(tokens), [None, pa.py_buffer(tokens)])
            yield pa.record_batch([column], schema=schema)
            step += count


class Flight:
    """Reads one record batch after another."""

    def __init__(self, name: str, address: str, pids: list[int], shape: Shape, num_tokens: int) -> None:
        self.name = name
        self.pids = pids
        self.ahead_bytes = WINDOW_BYTES
        self._shape, self._num_tokens = shape, num_tokens
        self._client = flight.connect(f"grpc://127.0.0.1:{address}")
        ticket = flight.Ticket(REQUEST.pack(0, shape.rows, shape.length))
        self._reader = self._client.do_get(ticket)
        self._batches: deque[torch.Tensor] = deque()

    def next(self) -> torch.Tensor:
        if not self._batches:
            _, content = self._reader.read_chunk().data.column(0).buffers()
            message = read_only_tensor(memoryview(content))
            self._batches.extend(message.view(-1, self._shape.rows, self._shape.length))
        return self._batches.popleft()

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        return starts_of(step, self._num_tokens, self._shape.rows, self._shape.length)

    def close(self) -> None:
        self._reader.cancel()
        self._client.close()
