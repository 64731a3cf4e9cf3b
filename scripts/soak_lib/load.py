"""Load on a running server, every answer compared with what came before anything was wrong."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import numpy as np

from corpus_client import errors
from tests.loaders import open_loader

NUM_ROWS = 64
NUM_STEPS = 500
"""Steps that loaders go through again and again; what they must hold is kept."""

PLAN: dict[str, Any] = {"corpus": "web", "seq_len": 1024, "seed": 7}
OPTIONS: dict[str, Any] = {
    **PLAN,
    "global_batch_size": NUM_ROWS,
    "device": "cpu",
    "deadline_seconds": 60,
    "prefetch_bytes": 1 << 18,
}


def right_tokens(url: str, corpus: str = "web", token: str | None = None) -> np.ndarray:
    """Return what the loaders must get: `(NUM_STEPS, NUM_ROWS, seq_len + 1)`."""
    parts = []
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    query = {**PLAN, "corpus": corpus, "batch_size": NUM_ROWS}
    for step in range(0, NUM_STEPS, 20):
        target = f"{url}/v1/batches?{urlencode({**query, 'step': step, 'count': 20})}"
        with urlopen(Request(target, headers=headers), timeout=60) as answer:
            shape = [int(each) for each in answer.headers["Corpus-Shape"].split(",")]
            parts.append(np.frombuffer(answer.read(), answer.headers["Corpus-Dtype"]).reshape(shape))
    return np.concatenate(parts)


@dataclass
class Findings:
    """What load saw; every method may be called from any thread."""

    waits: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    num_wrong: int = 0
    num_right: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, seconds: float, *, right: bool) -> None:
        """Count an answer."""
        with self.lock:
            self.waits.append(seconds)
            self.num_right += right
            self.num_wrong += not right

    def failed(self, error: BaseException) -> None:
        """Keep an error that reached the caller."""
        with self.lock:
            self.errors.append(f"{type(error).__name__}: {error}"[:300])


class Load:
    """Threads that ask a server until the block ends.

    Args:
        url: of the server, or of a proxy in front of it.
        expected: `(NUM_STEPS, rows, seq_len + 1)`, the right tokens of `PLAN`.
        num_loaders: training loops, each one rank.
        pause_seconds: of a loop between two batches.
        corpus: instead of that of `PLAN`.
        token: that every request carries.
    """

    def __init__(
        self,
        url: str,
        expected: np.ndarray,
        *,
        num_loaders: int,
        pause_seconds: float = 0.05,
        corpus: str = "web",
        token: str | None = None,
    ) -> None:
        self._url = url
        self._options = {**OPTIONS, "corpus": corpus, "auth": token}
        self._expected = expected
        self._pause_seconds = pause_seconds
        self._over = threading.Event()
        self._num_loaders = num_loaders
        self._threads = [threading.Thread(target=self._train, args=(rank,)) for rank in range(num_loaders)]
        self.findings = Findings()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
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
                    self.findings.failed(error)
                    self._over.wait(0.1)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def _train(self, rank: int) -> None:
        rows = self._expected.shape[1] // self._num_loaders
        own = slice(rank * rows, (rank + 1) * rows)
        try:
            with open_loader(self._url, **self._options, rank=rank, world_size=self._num_loaders) as loader:
                while not self._over.is_set():
                    began = time.monotonic()
                    batch = next(loader)
                    right = np.array_equal(batch.tokens.numpy(), self._expected[batch.step][own])
                    self.findings.saw(time.monotonic() - began, right=right)
                    if batch.step == NUM_STEPS - 1:
                        loader.seek(0)
                    self._over.wait(self._pause_seconds)
        except errors.CorpusClientError as error:
            self.findings.failed(error)
