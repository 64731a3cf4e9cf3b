"""What must not grow with the corpus: start, first batch, memory, the arithmetic of a step."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import httpx
import psutil

from corpus_server.plan import Plan, Sampler, Stage
from scripts.benchmarks import corpus
from scripts.benchmarks.contenders import spawn_ours

SIZES = (10**6, 10**9, 10**12)
ROWS, SEQ_LEN = 512, 2048


def measure_scale(cache: Path) -> list[dict[str, float]]:
    """Measure every size, on sparse files that take no space."""
    return [_measure(cache, num_tokens) for num_tokens in SIZES]


def table(rows: list[dict[str, float]]) -> tuple[str, list[str], list[list[str]]]:
    """The measurements as (title, columns, rows)."""
    columns = [
        "tokens",
        "process to ready s",
        "open ms",
        "first batch ms",
        "private MiB",
        "windows of a step us",
    ]
    return (
        f"scale: sparse uint16 files, {ROWS} x {SEQ_LEN + 1}",
        columns,
        [
            [
                f"{row['num_tokens']:.0e}",
                f"{row['ready_seconds']:.2f}",
                f"{row['open_seconds'] * 1e3:.1f}",
                f"{row['first_batch_seconds'] * 1e3:.1f}",
                f"{row['private_bytes'] / 2**20:.0f}",
                f"{row['locate_seconds'] * 1e6:.0f}",
            ]
            for row in rows
        ],
    )


def _measure(cache: Path, num_tokens: int) -> dict[str, float]:
    from corpus_server.corpus import Corpus

    path = corpus.sparse(cache, num_tokens)
    began = time.perf_counter()
    Corpus.open(path, name="scale", dtype="uint16").close()
    open_seconds = time.perf_counter() - began
    began = time.perf_counter()
    with spawn_ours(path) as (url, pids), httpx.Client() as client:
        ready_seconds = time.perf_counter() - began
        rows = min(ROWS, num_tokens // SEQ_LEN)
        query: dict[str, str | int] = {"corpus": "bench", "seq_len": SEQ_LEN, "batch_size": rows, "step": 0}
        began = time.perf_counter()
        answer = client.get(f"{url}/v1/batches", params=query)
        first_batch_seconds = time.perf_counter() - began
        answer.raise_for_status()
        private_bytes = sum(psutil.Process(pid).memory_full_info().uss for pid in pids)
    return {
        "num_tokens": num_tokens,
        "open_seconds": open_seconds,
        "ready_seconds": ready_seconds,
        "first_batch_seconds": first_batch_seconds,
        "private_bytes": private_bytes,
        "locate_seconds": _locate_seconds(num_tokens),
    }


def _locate_seconds(num_tokens: int) -> float:
    plan = Plan(seq_len=SEQ_LEN, stages=(Stage(global_batch_size=ROWS, mixture={"web": 1.0}),))
    sampler = Sampler(plan, {"web": [num_tokens]})
    seconds = []
    for step in range(10**6, 10**6 + 500):
        began = time.perf_counter()
        sampler.locate(step)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
