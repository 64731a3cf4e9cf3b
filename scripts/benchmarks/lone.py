"""Ask a server for small things, one after another, by a plain socket: the server decides the figures."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import numpy as np

from scripts.benchmarks.measure import CPU, P50, P99, cpu_seconds
from scripts.processes import HOST


class Lone:
    """Ask for one thing after another on one connection; `path` has `{step}` where a step belongs."""

    def __init__(self, port: int, pids: Sequence[int], path: str) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pids, self._path = pids, path
        self._buffer = memoryview(bytearray(1 << 16))
        self._step = 0

    def ask(self) -> bytes:
        """Return the next response, head and body."""
        path = self._path.replace("{step}", str(self._step))
        self._step += 1
        self._socket.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nUser-Agent: bench\r\n\r\n".encode())
        length, received = 0, b""
        while not length or len(received) < length:
            count = self._socket.recv_into(self._buffer)
            received += self._buffer[:count]
            head, end, _ = received.partition(b"\r\n\r\n")
            if end and not length:
                found = head.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
                length = len(head) + len(end) + int(found)
            if not count or not received.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"{path} must be answered with 200, got {received[:500]!r}")
        return received

    def turn(self, seconds: float) -> dict[str, float]:
        """Ask for so long; return the figures."""
        cpu, took = self._cpu(), list[float]()
        last = began = time.perf_counter()
        while last - began < seconds:
            self.ask()
            now = time.perf_counter()
            took.append(now - last)
            last = now
        p50, p99 = np.percentile(took, [50, 99]).tolist()
        return {P50: p50 * 1e3, P99: p99 * 1e3, CPU: (self._cpu() - cpu) / len(took) * 1e6}

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _cpu(self) -> float:
        return cpu_seconds(self._pids) - cpu_seconds([])
