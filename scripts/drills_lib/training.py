"""A training loop for drills, whose every batch is compared with the file, and tmpfs."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from corpus_client import CorpusLoader, Staging
from scripts.drills_lib.drill import Found, Skipped
from tests.corpora import some_tokens, write_raw

SEQ_LEN, NUM_ROWS = 64, 8
QUERY: dict[str, Any] = {
    "corpus": "web",
    "seq_len": SEQ_LEN,
    "batch_size": NUM_ROWS,
    "order": "sequential",
}
PAUSE_SECONDS = 0.002


class Web:
    """A file of tokens, and what the steps of a plan in its order must hold: `right` is the oracle."""

    def __init__(self, folder: Path, num_tokens: int = 20_000_000) -> None:
        self.tokens = some_tokens(num_tokens)
        self.path = write_raw(folder / "web.bin", self.tokens)

    def right(self, step: int, stride: int = SEQ_LEN) -> np.ndarray:
        """Return the tokens of a step, `(NUM_ROWS, SEQ_LEN + 1)`."""
        num_windows = (self.tokens.size - SEQ_LEN - 1) // stride + 1
        starts = np.arange(step * NUM_ROWS, (step + 1) * NUM_ROWS) % num_windows * stride
        return np.asarray(self.tokens[starts[:, None] + np.arange(SEQ_LEN + 1)])


@dataclass
class Loop:
    """What a training loop saw."""

    waits: list[float] = field(default_factory=list)
    num_wrong: int = 0
    num_retries: int = 0
    num_hedged: int = 0

    def tell(self, found: Found, *, longest: float) -> None:
        """Note the figures of the loop; longest: seconds that it may have waited for a batch."""
        found.figure("batches", len(self.waits), least=1)
        found.figure("wrong", self.num_wrong, most=0)
        found.figure("longest wait, s", max(self.waits), most=longest)
        found.figure("sent again, %", 100 * (self.num_hedged + self.num_retries) / len(self.waits))


def train(
    web: Web, urls: str | Sequence[str], work: Callable[[], object], *, warm_up: int = 100, **options: Any
) -> Loop:
    """Train until a function that is called in another thread returns; raise what it raises.

    warm_up: batches before that, from which the client knows what is usual.
    """
    loop, failures = Loop(), list[BaseException]()
    over = threading.Event()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)
        finally:
            over.set()

    plan: dict[str, Any] = {
        "corpus": "web",
        "seq_len": SEQ_LEN,
        "global_batch_size": NUM_ROWS,
        "order": "sequential",
    }
    options = {"device": "cpu", "dtype": None, "staging": Staging(prefetch_bytes=1 << 13), **options}
    thread = threading.Thread(target=run, daemon=True)  # a drill that is ended does not wait for it
    with CorpusLoader(urls, **plan, **options) as loader:
        for _ in range(warm_up):  # until it is known what is usual
            next(loader)
        thread.start()
        while not over.is_set():
            began = time.monotonic()
            batch = next(loader)
            loop.waits.append(time.monotonic() - began)
            loop.num_wrong += not np.array_equal(batch.tokens.numpy(), web.right(batch.step))
            over.wait(PAUSE_SECONDS)
        stats = loader.stats()
    thread.join()
    if failures:
        raise failures[0]
    loop.num_retries, loop.num_hedged = stats.num_retries, stats.num_hedged
    return loop


def seconds_of(work: Callable[[], object]) -> float:
    """Return how long a function takes."""
    began = time.monotonic()
    work()
    return time.monotonic() - began


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system in memory of this size; unmounted when the block ends."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        raise Skipped(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def fill(folder: Path) -> Path:
    """Write a file until the disk is full; return it."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return path
