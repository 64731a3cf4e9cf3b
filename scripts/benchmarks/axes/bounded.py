"""Measure a corpus of four times the page cache: a bounded shuffle beside a full one and the disk itself.

The memory of the server is limited to a quarter of the corpus, page cache included. The limit is a
sequential read of the same file in the same round, with as little memory: a reader of unlimited memory gets
pages that were just freed, and where the machine is virtual, others must come back from its host first. The
same order of a corpus in memory shows what the cores allow. A local disk may be faster than these: so all
is measured again with the disk held to the rate of a usual network volume. What a bounded shuffle costs
requests for resident data is part of the axis `cold`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from scripts.benchmarks import corpus, disk
from scripts.benchmarks.contender import Shape, check
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.expected import Order
from scripts.benchmarks.limited import limited
from scripts.benchmarks.measure import Rounds
from scripts.benchmarks.ours import Ours
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import serving

HELP = "a corpus of four times the page cache: bounded shuffle, full shuffle, the disk's sequential rate"

NUM_TOKENS, QUICK_TOKENS = 2 * 10**9, 16 * 10**6
SHAPE = Shape(rows=64, length=1025)
PIECE_BYTES, DEPTH = 4 << 20, 2
LEAST_MEMORY = 256 << 20  # of a server: in a quick run a quarter of the corpus would not hold its own memory
SEQUENTIAL, BOUNDED, FULL = "sequential reads", "bounded shuffle", "full shuffle"
RESIDENT = "bounded shuffle in memory"
VOLUME_RATE = 500_000_000  # bytes/s
OF_DISK, OF_FULL = 0.7, 4.0
RATE, FROM_DISK = "bytes_per_second", "disk_bytes_per_byte"
Limits = Callable[[Sequence[int]], AbstractContextManager[bool]]
COLUMNS = {RATE: ("useful bytes/s", ",.0f"), FROM_DISK: ("disk bytes / byte", ".2f")}


def measure(options: Options) -> Report:
    """Measure rates in turn."""
    if options.quick:
        options = replace(options, rounds=1, seconds=0.2)
    path = corpus.make(options.cache, QUICK_TOKENS if options.quick else NUM_TOKENS)
    quarter = f"{SHAPE} uint16, memory for a quarter of the corpus"
    rates = {
        None: Rounds(quarter, COLUMNS),
        VOLUME_RATE: Rounds(f"{quarter}, disk of {VOLUME_RATE // 10**6} MB/s", COLUMNS),
    }
    is_limited = True
    for _ in range(options.rounds):
        for rate, rounds in rates.items():
            limits = partial(limited, num_bytes=_memory(path), path=path, disk_rate=rate)
            rounds.add(SEQUENTIAL, _read(path, limits, options.seconds))
            for name, order in ((BOUNDED, bounded_order(path)), (FULL, "shuffle")):
                disk.drop(path)
                figures, was_limited = _stream(name, path, order, limits, options.seconds)
                rounds.add(name, figures)
                is_limited &= was_limited
        corpus.warm(path)
        figures, _ = _stream(RESIDENT, path, bounded_order(path), _unlimited, options.seconds)
        rates[None].add(RESIDENT, figures)
    report = Report(
        data={
            "rates": [rounds.summary() for rounds in rates.values()],
            "limited": is_limited,
        },
        tables=[
            rates[None].table(),
            rates[None].ratio_table([(BOUNDED, SEQUENTIAL), (BOUNDED, FULL), (BOUNDED, RESIDENT)]),
            rates[VOLUME_RATE].table(),
            rates[VOLUME_RATE].ratio_table([(BOUNDED, SEQUENTIAL), (BOUNDED, FULL)]),
        ],
    )
    for rounds in rates.values():
        report.targets.append(rounds.target(BOUNDED, RATE, "at least", OF_DISK, to=SEQUENTIAL))
        report.targets.append(rounds.target(BOUNDED, RATE, "at least", OF_FULL, to=FULL))
    return report


def bounded_order(path: Path) -> Order:
    """Return an order of which three groups are a tenth of the corpus, in blocks of 16 to a group."""
    num_windows = path.stat().st_size // 2 // (SHAPE.length - 1)
    return {"shuffle": {"block_windows": max(1, num_windows // 480), "group_blocks": 16}}


def read_ahead(path: Path) -> tuple[str, str]:
    """Return options of a server that reads an eighth of the corpus ahead."""
    return "--read-ahead-bytes", str(path.stat().st_size // 8)


def _memory(path: Path) -> int:
    return max(path.stat().st_size // 4, LEAST_MEMORY)


@contextmanager
def _unlimited(pids: Sequence[int]) -> Iterator[bool]:
    yield False


def _read(path: Path, limits: Limits, seconds: float) -> dict[str, float]:
    disk.drop(path)
    offsets = np.arange(0, path.stat().st_size - PIECE_BYTES, PIECE_BYTES)
    read = partial(disk.read_parallel, path, num_bytes=PIECE_BYTES, depth=DEPTH)
    with limits([os.getpid()]):
        settled, _ = read(offsets[: len(offsets) // 2], seconds=seconds / 2)
        before = disk.bytes_read([os.getpid()])
        num_pieces, taken = read(offsets[settled:], seconds=seconds)
    share = (disk.bytes_read([os.getpid()]) - before) / (num_pieces * PIECE_BYTES)
    return {RATE: num_pieces * PIECE_BYTES / taken, FROM_DISK: share}


def _stream(
    name: str, path: Path, order: Order, limits: Limits, seconds: float
) -> tuple[dict[str, float], bool]:
    """Take batches from a new, limited server; return figures, and whether it was limited."""
    with (
        serving({NAME: path}, arguments=read_ahead(path)) as server,
        limits(server.pids) as was_limited,
        closing(Ours(name, server, SHAPE, path, order=order)) as ours,
    ):
        steps = 0
        # The first two groups are not read ahead of anything.
        for settling in (True, False):
            first, began, before = steps, time.perf_counter(), disk.bytes_read(server.pids)
            while steps == first or time.perf_counter() - began < (seconds / 2 if settling else seconds):
                ours.next()
                steps += 1
        num_bytes = (steps - first) * SHAPE.num_bytes
        rate = num_bytes / (time.perf_counter() - began)
        share = (disk.bytes_read(server.pids) - before) / num_bytes
        check(ours, path, SHAPE, first=steps, num_steps=1)
    return {RATE: rate, FROM_DISK: share}, was_limited
