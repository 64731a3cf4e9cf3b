"""How much the private memory of a process grows by a loader; measured in a process of its own.

`python -m scripts.benchmarks.loader_memory` reads a `LoaderCase` as JSON and writes what it saw.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from corpus_client import CorpusLoader
from scripts.benchmarks.private import anonymous_bytes, private_bytes
from scripts.processes import ROOT

_QUIET_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderCase:
    """A loader and how long it is used.

    Args:
        url, corpus, rows, seq_len: what it asks for.
        path: the corpus's file, for `source="indices"`; its maps are page cache and do not count.
        prefetch_bytes: the budget that it declares.
        seconds: of iterating, after it has fetched ahead all that it may.
        dtype: `stored` or `int64`.
        own_mappings: whether malloc gives every batch that torch makes a mapping of its own.
    """

    url: str
    corpus: str
    rows: int
    seq_len: int
    path: str
    prefetch_bytes: int
    seconds: float
    dtype: Literal["stored", "int64"] = "stored"
    source: Literal["batches", "indices"] = "batches"
    own_mappings: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderMemory:
    """What was seen.

    Args:
        before_bytes: private memory with torch and the client imported, and one batch made by torch.
        batch_bytes: of what torch holds for the consumer: two batches, while the next one replaces the
            last. With `stored`, batches are views of the budget and this is 0.
        growth_bytes: the largest private memory while it iterated, less these two.
        num_batches: that came.
    """

    before_bytes: int
    batch_bytes: int
    growth_bytes: int
    num_batches: int


def measure_loader(case: LoaderCase) -> LoaderMemory:
    """Run the case in a new process."""
    # From this size on, and not one that malloc raises when a larger piece is freed.
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)} if case.own_mappings else {}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.benchmarks.loader_memory"],
        cwd=ROOT,
        env={**os.environ, **malloc},
        input=json.dumps(dataclasses.asdict(case)).encode(),
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise SystemExit("the process with a loader failed; it says why above")
    return LoaderMemory(**json.loads(done.stdout))


def _run(case: LoaderCase) -> LoaderMemory:
    shape = (case.rows, case.seq_len + 1)
    widened = case.dtype == "int64"
    for _ in range(3):  # so that malloc has learned the size
        torch.zeros(shape, dtype=torch.int64)
    leaving_out = [Path(case.path)]
    before = private_bytes(os.getpid(), leaving_out=leaving_out)
    of_files = before - anonymous_bytes(os.getpid())
    most = 0
    with CorpusLoader(
        case.url,
        corpus=case.corpus,
        seq_len=case.seq_len,
        global_batch_size=case.rows,
        device="cpu",
        dtype=torch.int64 if widened else None,
        source=case.source,
        local_root=Path(case.path).parent if case.source == "indices" else None,
        prefetch_bytes=case.prefetch_bytes,
    ) as loader:
        batch = next(loader)
        _await_full(loader)
        num_batches, began = 1, time.perf_counter()
        while time.perf_counter() - began < case.seconds:
            batch = next(loader)
            if batch.tokens.shape != shape:
                raise SystemExit(f"a batch of {tuple(batch.tokens.shape)} came instead of {shape}")
            num_batches += 1
            most = max(most, anonymous_bytes(os.getpid()))
        most = max(most + of_files, private_bytes(os.getpid(), leaving_out=leaving_out))
    batch_bytes = 2 * 8 * shape[0] * shape[1] if widened else 0
    return LoaderMemory(
        before_bytes=before,
        batch_bytes=batch_bytes,
        growth_bytes=most - before - batch_bytes,
        num_batches=num_batches,
    )


def _await_full(loader: CorpusLoader) -> None:
    """Wait until nothing more is fetched ahead."""
    received, since = -1, time.perf_counter()
    while time.perf_counter() - since < _QUIET_SECONDS:
        if (now := loader.stats().received_bytes) != received:
            received, since = now, time.perf_counter()
        time.sleep(0.01)


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(_run(LoaderCase(**json.load(sys.stdin))))))
