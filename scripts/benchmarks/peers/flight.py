"""Arrow Flight: one DoGet, whose record batches have a column of fixed-size binary, a window each.

Neither side copies in Python: the server's buffers are the gathered array, the consumer's tensors are
views of what was received. Several small steps share a record batch, as with gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.flight as flight  # type: ignore[import-untyped]

from scripts.benchmarks.contender import Shape
from scripts.benchmarks.peers.common import REQUEST, Streamed, Windows, publish, steps_per_message
from scripts.benchmarks.servers import Address


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
            tokens = self._windows.gather(step, count, rows, length)
            column = pa.Array.from_buffers(schema.field(0).type, len(tokens), [None, pa.py_buffer(tokens)])
            yield pa.record_batch([column], schema=schema)
            step += count


class Flight(Streamed):
    """Reads one record batch after another."""

    def __init__(self, name: str, peer: Address, shape: Shape) -> None:
        super().__init__(name, peer, shape)
        self._client = flight.connect(f"grpc://127.0.0.1:{peer.at}")
        ticket = flight.Ticket(REQUEST.pack(0, shape.rows, shape.length))
        self._reader = self._client.do_get(ticket)

    def _receive(self) -> memoryview:
        _, content = self._reader.read_chunk().data.column(0).buffers()
        return memoryview(content)

    def close(self) -> None:
        self._reader.cancel()
        self._client.close()
