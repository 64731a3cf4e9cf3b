"""gRPC server streaming of raw bytes: one call, to which the server sends step after step.

Generic handlers without protobuf, no limit on messages, several small steps in one message. Its asyncio
server and options for larger frames were tried and are not faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from scripts.benchmarks.contender import Shape
from scripts.benchmarks.peers.common import REQUEST, Streamed, Windows, publish, steps_per_message
from scripts.benchmarks.servers import Address

SERVICE, METHOD = "bench.Batches", "Stream"
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def serve(path: Path, address_file: Path) -> None:
    windows = Windows(path)

    def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        step, rows, length = REQUEST.unpack(request)
        count = steps_per_message(rows, length)
        while True:
            yield windows.gather(step, count, rows, length).tobytes()
            step += count

    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        METHOD: grpc.unary_stream_rpc_method_handler(stream)
    }
    server = grpc.server(ThreadPoolExecutor(4), options=UNLIMITED)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    publish(address_file, str(port))
    server.wait_for_termination()


class GrpcStream(Streamed):
    """Reads each message where gRPC left it: the tensors are views of its bytes."""

    def __init__(self, name: str, peer: Address, shape: Shape) -> None:
        super().__init__(name, peer, shape)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{peer.at}", options=UNLIMITED)
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(f"/{SERVICE}/{METHOD}")
        self._call = call(REQUEST.pack(0, shape.rows, shape.length))

    def _receive(self) -> bytes:
        return next(self._call)

    def close(self) -> None:
        self._call.cancel()
        self._channel.close()
