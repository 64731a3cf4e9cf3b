"""How long small requests for resident data take while somebody else's data come from disk."""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from urllib.parse import urlsplit

from corpus_client import CorpusLoader
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.corpus import NAME

START_SECONDS = 60.0
PREFETCH_BYTES = 4 << 20
REQUEST = Shape(rows=64, length=1025)


@contextmanager
def cold_reader(url: str, shape: Shape, *, pace: float | None = None) -> Iterator[None]:
    """Let a process of its own take batches of the server's large corpus.

    Args:
        pace: windows per second, as training would; None: as fast as they come.
    """
    context = multiprocessing.get_context("spawn")
    reading = context.Event()
    process = context.Process(target=_take_all, args=(url, shape, pace, reading), daemon=True)
    process.start()
    try:
        if not reading.wait(START_SECONDS):
            raise RuntimeError("the reader of the cold corpus got no batch")
        yield
        if process.exitcode is not None:
            raise RuntimeError("the reader of the cold corpus ended")
    finally:
        process.terminate()
        process.join()


def request_seconds(url: str, corpus: str, seconds: float) -> list[float]:
    """Ask for steps of a corpus, one request at a time on one connection; return how long each took."""
    parts = urlsplit(url)
    taken: list[float] = []
    body = bytearray(REQUEST.num_bytes)
    with contextlib.closing(http.client.HTTPConnection(str(parts.hostname), parts.port)) as connection:
        query = f"corpus={corpus}&seq_len={REQUEST.length - 1}&batch_size={REQUEST.rows}"
        began = time.perf_counter()
        while (last := time.perf_counter()) - began < seconds or len(taken) < 3:
            connection.request("GET", f"/v1/batches?{query}&step={len(taken)}")
            answer = connection.getresponse()
            received = answer.readinto(body)
            if (answer.status, received) != (200, len(body)) or answer.read():
                raise RuntimeError(f"expected {len(body)} bytes, got {answer.status} and {received}")
            taken.append(time.perf_counter() - last)
    return taken[2:]  # the first ones bind the plan


def _take_all(url: str, shape: Shape, pace: float | None, reading: Event) -> None:
    with CorpusLoader(
        url,
        corpus=NAME,
        seq_len=shape.length - 1,
        global_batch_size=shape.rows,
        device="cpu",
        dtype=None,
        prefetch_bytes=PREFETCH_BYTES,  # little: once it is full, the pace is the server's too
    ) as loader:
        began = time.perf_counter()
        for number, _ in enumerate(loader, start=1):
            reading.set()
            if pace is not None:
                due = began + number * shape.rows / pace
                time.sleep(max(0.0, due - time.perf_counter()))
