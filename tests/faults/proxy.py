"""A TCP proxy between a real client and a real server that spoils responses by a schedule."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

Kind = Literal["cut", "reset", "flip", "hole", "latency", "late", "slow"]

PART_BYTES = 4096
LATENCY_SECONDS = 0.2
LATE_SECONDS = 1.0
BYTES_PER_SECOND = 2**20


@dataclass(frozen=True)
class NetworkFault:
    """What happens to a connection, once so many bytes of responses have passed.

    Args:
        kind: cut (closed) | reset | flip (one bit of a byte) | hole (nothing comes any more, the connection
            stays open) | latency (200 ms, once) | late (a second, before all that came with it) | slow (from
            here on 1 MiB/s).
    """

    kind: Kind
    after_bytes: int


class Schedule:
    """Faults drawn by a seed, until there were enough; call it for the next one.

    Attributes:
        num_drawn: faults so far.
    """

    def __init__(self, seed: int, kinds: Sequence[Kind], *, mean_bytes: int, most: int) -> None:
        self._random = random.Random(seed)
        self._kinds = kinds
        self._mean_bytes = mean_bytes
        self._most = most
        self._lock = threading.Lock()
        self.num_drawn = 0

    def __call__(self) -> NetworkFault | None:
        with self._lock:
            if self.num_drawn >= self._most:
                return None
            self.num_drawn += 1
            after = int(self._random.expovariate(1 / self._mean_bytes))
            return NetworkFault(self._random.choice(self._kinds), after)


class FaultProxy:
    """Listens on a port of loopback from entering to leaving, with one thread for all connections.

    Only connections that ask for batches are spoiled: a plan that is posted has no checksum.

    Args:
        port: of the server.
        next_fault: called when a connection is made, and on it after each fault; None: no more.
    """

    def __init__(self, port: int, next_fault: Callable[[], NetworkFault | None]) -> None:
        self._target = port
        self._next_fault = next_fault
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy")
        self._started = threading.Event()
        self.port = 0

    @property
    def url(self) -> str:
        """Base URL of the server behind it."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listening = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = listening.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        listening.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.2))  # for closing
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks: list[asyncio.Task[None]] = []
        writers = [writer]
        with contextlib.suppress(OSError, asyncio.CancelledError):  # cancelled when the proxy ends
            theirs, back = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(back)
            first = await reader.read(PART_BYTES)
            back.write(first)
            spoiled = first.startswith(b"GET /v1/batches")
            down = self._spoil(theirs, writer) if spoiled else _pass_on(theirs, writer)
            tasks = [self._loop.create_task(each) for each in (_pass_on(reader, back), down)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for each in writers:
            each.close()

    async def _spoil(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed, slow, fault = 0, False, self._next_fault()
        while part := await reader.read(PART_BYTES):
            while fault is not None and passed + len(part) > fault.after_bytes:
                at = max(0, fault.after_bytes - passed)
                before, part = part[:at], part[at:]
                passed += len(before)
                if fault.kind == "late":
                    await asyncio.sleep(LATE_SECONDS)
                writer.write(before)
                match fault.kind:
                    case "cut":
                        return
                    case "reset":
                        sock = writer.get_extra_info("socket")
                        await writer.drain()
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return
                    case "hole":
                        await asyncio.Event().wait()
                    case "flip":
                        part = bytes([part[0] ^ 0x10]) + part[1:]
                    case "latency":
                        await asyncio.sleep(LATENCY_SECONDS)
                    case "slow":
                        slow = True
                fault = self._next_fault()
                if fault is not None:
                    fault = NetworkFault(fault.kind, passed + 1 + fault.after_bytes)
            if slow:
                await asyncio.sleep(len(part) / BYTES_PER_SECOND)
            passed += len(part)
            writer.write(part)
            with contextlib.suppress(ConnectionError):
                await writer.drain()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(PART_BYTES):
            writer.write(part)
            await writer.drain()
