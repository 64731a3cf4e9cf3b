"""Load on a running server, every response compared with what came before anything was wrong; memory."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np
import psutil

from corpus_client import errors
from tests.loaders import open_loader

MIB = 2**20
SAMPLE_SECONDS = 1.0
NUM_ROWS = 64
NUM_STEPS = 500
"""Steps that loaders go through again and again; what they must hold is kept."""

PLAN: dict[str, Any] = {"seq_len": 1024, "seed": 7}


def right_tokens(url: str, corpus: str, token: str | None) -> np.ndarray:
    """Return what the loaders must get: `(NUM_STEPS, NUM_ROWS, seq_len + 1)`."""
    parts = []
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    query = {**PLAN, "corpus": corpus, "batch_size": NUM_ROWS}
    for step in range(0, NUM_STEPS, 20):
        target = f"{url}/v1/batches?{urlencode({**query, 'step': step, 'count': 20})}"
        with urlopen(Request(target, headers=headers), timeout=60) as response:
            shape = [int(each) for each in response.headers["Corpus-Shape"].split(",")]
            parts.append(np.frombuffer(response.read(), response.headers["Corpus-Dtype"]).reshape(shape))
    return np.concatenate(parts)


@dataclass
class Load:
    """Training loops in threads, each one rank, that ask a server until the block ends.

    Args:
        url: of the server, or of a proxy in front of it.
        pause_seconds: of a loop between two batches.
        token: that every request carries.

    Attributes:
        waits: seconds for each batch.
        errors: that reached a caller.
    """

    url: str
    num_loaders: int
    pause_seconds: float = 0.05
    corpus: str = "web"
    token: str | None = None
    waits: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_wrong: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        self._expected = right_tokens(self.url, self.corpus, self.token)
        for rank in range(self.num_loaders):
            self._start(partial(self._train, rank))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def add(self, work: Callable[[], None]) -> None:
        """Call a function again and again in one more thread, until the block ends."""

        def run() -> None:
            while not self._over.is_set():
                try:
                    work()
                except (OSError, http.client.HTTPException, AssertionError) as error:
                    self._failed(error)
                    self._over.wait(0.1)

        self._start(run)

    def found(self) -> tuple[list[str], list[str]]:
        """Return what must not have happened, and lines for the report."""
        wrong = [f"{self.num_wrong} batches had wrong tokens"] if self.num_wrong else []
        num_right = len(self.waits) - self.num_wrong
        counts = f"- right: {num_right:,}, wrong: {self.num_wrong}, errors: {len(self.errors)}"
        return [*self.errors[:5], *wrong], [f"- batches {percentiles(self.waits)}", counts, ""]

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work))
        self._threads[-1].start()

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            self.errors.append(f"{type(error).__name__}: {error}"[:300])

    def _train(self, rank: int) -> None:
        rows = NUM_ROWS // self.num_loaders
        own = slice(rank * rows, (rank + 1) * rows)
        options = {**PLAN, "corpus": self.corpus, "auth": self.token, "rank": rank, "device": "cpu"}
        options |= {"world_size": self.num_loaders, "global_batch_size": NUM_ROWS, "prefetch_bytes": 1 << 18}
        try:
            with open_loader(self.url, **options, deadline_seconds=60) as loader:
                while not self._over.is_set():
                    began = time.monotonic()
                    batch = next(loader)
                    right = np.array_equal(batch.tokens.numpy(), self._expected[batch.step][own])
                    with self._lock:
                        self.waits.append(time.monotonic() - began)
                        self.num_wrong += not right
                    if batch.step == NUM_STEPS - 1:
                        loader.seek(0)
                    self._over.wait(self.pause_seconds)
        except errors.CorpusClientError as error:
            self._failed(error)


class Sample(NamedTuple):
    """What the largest of some processes holds: bytes that it does not share with files, and its counts."""

    seconds: float
    memory: float
    descriptors: float
    threads: float


@contextmanager
def watched(pids: Callable[[], Sequence[int]]) -> Iterator[list[Sample]]:
    """Sample processes once a second until the block ends; they come and go, so `pids` is called."""
    over, samples, began = threading.Event(), [], time.monotonic()

    def run() -> None:
        while True:
            most = Sample(time.monotonic() - began, 0, 0, 0)
            for pid in pids():
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(pid)
                    status = process.memory_info()
                    here = (0, status.rss - status.shared, process.num_fds(), process.num_threads())
                    most = Sample(*map(max, most, here))
            samples.append(most)
            if over.wait(SAMPLE_SECONDS):
                return

    thread = threading.Thread(target=run, name="watch")
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def growth_table(samples: Sequence[Sample], num_rows: int = 10) -> list[str]:
    """Return what processes held over time as a Markdown table, and slopes; the first half fills caches."""
    lines = ["| minute | memory MiB | descriptors | threads |", "|--:|--:|--:|--:|"]
    for number in np.linspace(0, len(samples) - 1, num_rows).astype(int):
        each = samples[number]
        memory = f"{each.memory / MIB:.1f}"
        lines.append(f"| {each.seconds / 60:.1f} | {memory} | {each.descriptors} | {each.threads} |")
    half = np.array(samples[len(samples) // 2 :], dtype=np.float64)
    slopes = np.polyfit(half[:, 0], half[:, 1:], 1)[0] * 3600 if len(half) > 2 else np.zeros(3)
    memory, descriptors, threads = slopes / [MIB, 1, 1]
    lines.append(f"| slope an hour, second half | {memory:+.1f} | {descriptors:+.1f} | {threads:+.1f} |")
    return lines


def percentiles(seconds: Sequence[float]) -> str:
    """Return p50 and p99 in milliseconds."""
    if not seconds:
        return "no responses"
    p50, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms of {len(seconds):,}"
