"""What is measured: each contender delivers batches of tokens into a torch tensor, one after another."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import httpx
import numpy as np
import psutil
import torch

from corpus_client import CorpusLoader
from scripts.benchmarks.peers import REQUEST

PREFETCH_BYTES = 64 << 20
"""A quarter of the loader's default: what was fetched before a round is consumed before it is timed."""


class Contender(Protocol):
    """A source of batches.

    Attributes:
        name: for the table.
        pids: processes that work for it besides this one.
    """

    name: str
    pids: list[int]

    def next(self) -> torch.Tensor:
        """The next batch, `(rows, seq_len + 1)` or the two halves of it."""


class Ours:
    """`CorpusLoader(dtype=None)`: tokens as stored, checksum verified or not."""

    def __init__(self, name: str, url: str, pids: list[int], rows: int, length: int, *, verify: bool) -> None:
        self.name = name
        self.pids = pids
        self.loader = CorpusLoader(
            url,
            corpus="bench",
            seq_len=length - 1,
            global_batch_size=rows,
            device="cpu",
            dtype=None,
            verify=verify,
            prefetch_bytes=PREFETCH_BYTES,
        )

    def next(self) -> torch.Tensor:
        return next(self.loader).tokens


class Bare:
    """A TCP socket with two requests in flight, received straight into a tensor."""

    def __init__(self, port: int, pids: list[int], rows: int, length: int) -> None:
        self.name = "bare TCP + gather, 2 in flight"
        self.pids = pids
        self._rows, self._length = rows, length
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ring = deque(torch.empty((rows, length), dtype=torch.uint16) for _ in range(3))
        self._step = 0
        for _ in range(2):
            self._ask()

    def _ask(self) -> None:
        self._socket.sendall(REQUEST.pack(self._step, self._rows, self._length))
        self._step += 1

    def next(self) -> torch.Tensor:
        batch = self._ring[0]
        self._ring.rotate(-1)
        view = batch.numpy().data.cast("B")
        received = 0
        while received < len(view):
            received += self._socket.recv_into(view[received:], 0, socket.MSG_WAITALL)
        self._ask()
        return batch


class Naive:
    """`httpx.get(...).content` of a FastAPI route."""

    def __init__(self, port: int, pids: list[int], rows: int, length: int) -> None:
        self.name = "naive FastAPI + httpx.get().content"
        self.pids = pids
        self._url = f"http://127.0.0.1:{port}/batch"
        self._rows, self._length = rows, length
        self._client = httpx.Client()
        self._step = 0

    def next(self) -> torch.Tensor:
        query = {"step": self._step, "rows": self._rows, "length": self._length}
        self._step += 1
        content = self._client.get(self._url, params=query).content
        return torch.frombuffer(bytearray(content), dtype=torch.uint16).view(self._rows, self._length)


class NanoGpt:
    """The idiom of nanoGPT's train.py, in this process: two int64 tensors from a memmap."""

    def __init__(self, path: Path, rows: int, length: int) -> None:
        self.name = "nanoGPT idiom, in process, int64"
        self.pids: list[int] = []
        self._path, self._rows, self._seq_len = path, rows, length - 1

    def next(self) -> torch.Tensor:
        # The memmap is made anew for every batch, as nanoGPT does to avoid a leak.
        data = np.memmap(self._path, dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - self._seq_len, (self._rows,)).tolist()
        x = torch.stack([torch.from_numpy(data[i : i + self._seq_len].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + self._seq_len].astype(np.int64)) for i in ix])
        return torch.stack([x[0], y[0]])


class Gather:
    """NumPy's gather in this process into a fresh array: what no server on the same host can beat."""

    def __init__(self, path: Path, rows: int, length: int) -> None:
        self.name = "gather, in process, uint16"
        self.pids: list[int] = []
        self._rows, self._length = rows, length
        data = np.memmap(path, dtype=np.uint16, mode="r")
        self._view = np.lib.stride_tricks.sliding_window_view(data, length)
        self._rng = np.random.default_rng(0)

    def next(self) -> torch.Tensor:
        return torch.from_numpy(self._view[self._rng.integers(0, len(self._view), self._rows)])


@contextmanager
def spawn_peer(kind: str, path: Path) -> Iterator[tuple[int, int]]:
    """Start a peer; yield (port, pid)."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, "-m", "scripts.benchmarks.peers", kind, str(path), str(port_file)]
        with _process(command) as process:
            _wait_for(port_file.exists, process)
            yield int(port_file.read_text()), process.pid


@contextmanager
def spawn_ours(path: Path, *, workers: int = 1) -> Iterator[tuple[str, list[int]]]:
    """Start our server over a file; yield (URL, process ids)."""
    with tempfile.TemporaryDirectory() as state, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        command = [sys.executable, "-m", "corpus_server", "serve", f"bench={path}", "--dtype", "uint16"]
        command += ["--port", str(port), "--workers", str(workers), "--state-dir", state]
        command += ["--log-level", "warning"]
        url = f"http://127.0.0.1:{port}"
        with _process(command) as process:
            _wait_for(lambda: _ready(url), process)
            children = psutil.Process(process.pid).children(recursive=True)
            yield url, [process.pid, *(child.pid for child in children)]


@contextmanager
def contenders(path: Path, rows: int, length: int) -> Iterator[list[Contender]]:
    """All of them for one shape, started and warm."""
    with ExitStack() as stack:
        bare_port, bare_pid = stack.enter_context(spawn_peer("bare", path))
        naive_port, naive_pid = stack.enter_context(spawn_peer("naive", path))
        url, pids = stack.enter_context(spawn_ours(path))
        ours = Ours("ours", url, pids, rows, length, verify=True)
        stack.callback(ours.loader.close)
        unchecked = Ours("ours, verify=False", url, pids, rows, length, verify=False)
        stack.callback(unchecked.loader.close)
        yield [
            ours,
            unchecked,
            Bare(bare_port, [bare_pid], rows, length),
            Naive(naive_port, [naive_pid], rows, length),
            NanoGpt(path, rows, length),
            Gather(path, rows, length),
        ]


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{process.args!r} did not start")
        time.sleep(0.02)
