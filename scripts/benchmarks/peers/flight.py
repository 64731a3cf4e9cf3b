"""Arrow Flight: one DoGet, whose record batches have a column of fixed-size binary, a window each.

Neither side copies in Python: the server's buffers are the gathered array, the consumer's tensors are
views of what was received. A stream of raw bytes over gRPC, on which Flight stands, was tried: 0.9 and 0.7 of
the tokens/s at two shapes, with 1.3 and 1.4 times the CPU.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.flight as flight  # type: ignore[import-untyped]
import torch

from scripts.benchmarks.contender import Shape
from scripts.benchmarks.peers.common import REQUEST, Peer, Windows, publish
from scripts.benchmarks.servers import Address

STREAM_BYTES = 16 << 20  # gRPC lets a stream's flow-control window grow about this far
MESSAGE_BYTES = 1 << 20  # of a record batch: single batches of 64 x 1,025 are delivered half as fast


def serve(path: Path, address_file: Path) -> None:
    server = _Server(Windows(path))
    publish(address_file, str(server.port))
    server.serve()


class _Server(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    def __init__(self, windows: Windows) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._windows = windows

    def do_get(self, context: Any, ticket: Any) -> Any:
        _, step, count, rows, length = REQUEST.unpack(ticket.ticket)
        schema = pa.schema([("window", pa.binary(2 * length))])
        return flight.GeneratorStream(schema, self._batches(schema, step, count, rows, length))

    def _batches(self, schema: Any, step: int, count: int, rows: int, length: int) -> Iterator[Any]:
        while True:
            tokens = self._windows.gather(step, count, rows, length)
            column = pa.Array.from_buffers(schema.field(0).type, len(tokens), [None, pa.py_buffer(tokens)])
            yield pa.record_batch([column], schema=schema)
            step += count


class Flight(Peer):
    """Reads one record batch after another; each holds several small steps."""

    def __init__(self, name: str, peer: Address, shape: Shape) -> None:
        super().__init__(name, peer, shape, STREAM_BYTES)
        self._batches: deque[torch.Tensor] = deque()
        self._client = flight.connect(f"grpc://127.0.0.1:{peer.at}")
        count = max(1, MESSAGE_BYTES // shape.num_bytes)
        self._reader = self._client.do_get(flight.Ticket(REQUEST.pack(0, 0, count, shape.rows, shape.length)))

    def next(self) -> torch.Tensor:
        if not self._batches:
            _, content = self._reader.read_chunk().data.column(0).buffers()
            with warnings.catch_warnings():  # torch warns once that it cannot forbid writing
                warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
                tokens = torch.frombuffer(memoryview(content), dtype=torch.uint16)
            self._batches.extend(tokens.view(-1, self._shape.rows, self._shape.length))
        return self._batches.popleft()

    def close(self) -> None:
        self._reader.cancel()
        self._client.close()
