"""gRPC server streaming of raw bytes: one call, to which the server sends step after step.

Generic handlers without protobuf, no limit on messages, several small steps in one message. Its asyncio
server and options for larger frames were tried and are not faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import torch

from scripts.benchmarks.contender import Shape, read_only_tensor
from scripts.benchmarks.peers.common import REQUEST, Windows, publish, starts_of, steps_per_message

SERVICE, METHOD = "bench.Batches", "Stream"
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
WINDOW_BYTES = 16 << 20
"""gRPC lets a stream's flow-control window grow about this far."""


def serve(path: Path, address_file: Path) -> None:
    windows = Windows(path)

    def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        step, rows, length = REQUEST.unpack(request)
        count = steps_per_message(rows, length)
        while True:
            yield windows.gather_steps(step, count, rows, length).tobytes()
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


class GrpcStream:
    """Reads each message where gRPC left it: the tensors are views of its bytes."""

    def __init__(self, name: str, address: str, pids: list[int], shape: Shape, num_tokens: int) -> None:
        self.name = name
        self.pids = pids
        self.ahead_bytes = WINDOW_BYTES
        self._shape, self._num_tokens = shape, num_tokens
        self._channel = grpc.insecure_channel(f"127.0.0.1:{address}", options=UNLIMITED)
        call: grpc.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(f"/{SERVICE}/{METHOD}")
        self._call = call(REQUEST.pack(0, shape.rows, shape.length))
        self._batches: deque[torch.Tensor] = deque()

    def next(self) -> torch.Tensor:
        if not self._batches:
            message = read_only_tensor(next(self._call))
            self._batches.extend(message.view(-1, self._shape.rows, self._shape.length))
        return self._batches.popleft()

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        return starts_of(step, self._num_tokens, self._shape.rows, self._shape.length)

    def close(self) -> None:
        self._call.cancel()
        self._channel.close()
