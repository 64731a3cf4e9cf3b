"""Measure data from disk: ours with and without reading ahead, beside parallel reads of the same windows.

Before every turn the file is taken out of the page cache; afterwards the axis checks that what was delivered
came from the disk. Then it measures small requests for resident data beside a reader of cold data, in full
and in bounded shuffle: reading ahead must not keep others waiting. What the machine's cores alone cost the
resident requests is shown by the same load on another server process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.benchmarks import corpus, disk
from scripts.benchmarks.axes.bounded import BOUNDED, bounded_order, read_ahead
from scripts.benchmarks.checkout import checked_out
from scripts.benchmarks.contender import Shape, check
from scripts.benchmarks.contest import BEFORE, NOW, SHAPES
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.expected import Expected
from scripts.benchmarks.measure import P50, P99, Rounds, measure_once
from scripts.benchmarks.ours import OneAtATime, Ours
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import serving
from scripts.processes import ROOT, running

HELP = "data from disk: reading ahead by plan beside parallel reads, resident requests beside cold ones"

NUM_TOKENS, NUM_WARM_TOKENS = 2 * 10**9, 10**8
QUICK_TOKENS = 16 * 10**6
DEPTHS = (1, 4, 16, 64)
LIMIT, NONE, OWN = "preadv by threads", "ours, no reading ahead", "ours, each answer's own windows"
MODES: dict[str, tuple[str, ...]] = {
    NOW: (),
    OWN: ("--read-ahead-bytes", "1"),  # less than one step
    NONE: ("--read-ahead-bytes", "0"),
}
OTHER = "cold reads of another server"
OF_LIMIT, OF_NONE, OF_ALONE, OF_BEFORE = 0.8, 3.0, 2.0, 0.97
RATE, FROM_DISK = "windows_per_second", "disk_bytes_per_byte"
COLUMNS = {
    RATE: ("windows/s", ",.0f"),
    FROM_DISK: ("disk bytes / byte", ".2f"),
}
COLD_READER = """
import json, sys
from corpus_client import ArrayLoader
with ArrayLoader(corpus="cold", rank=0, world_size=1, **json.loads(sys.argv[1])) as loader:
    for batch in loader:
        if batch.step == 0:
            print("reading", flush=True)
"""


def measure(options: Options) -> Report:
    """Measure both shapes, then resident requests beside cold ones."""
    if options.quick:
        options = replace(options, rounds=1, seconds=0.2)
    path = corpus.make(options.cache, QUICK_TOKENS if options.quick else NUM_TOKENS)
    warm = corpus.make(options.cache, QUICK_TOKENS // 2 if options.quick else NUM_WARM_TOKENS)
    report = Report(data={}, tables=[])
    with ExitStack() as stack:
        before = stack.enter_context(checked_out(options.before)) if options.before else None
        for shape in SHAPES[:1] if options.quick else SHAPES:
            rounds = _measure_shape(path, shape, options, before)
            report.data[str(shape)] = rounds.summary()
            wanted = {LIMIT: OF_LIMIT, NONE: OF_NONE} | ({BEFORE: OF_BEFORE} if before else {})
            report.tables.extend([rounds.table(), rounds.ratio_table([(NOW, name) for name in wanted])])
            for name, least in wanted.items():
                report.targets.append(rounds.target(NOW, RATE, "at least", least, to=name))
    beside = _measure_beside(path, warm, options)
    report.data["beside"] = beside.summary()
    pairs = [(name, f"{name}: alone") for name in beside.values if not name.endswith(": alone")]
    report.tables.extend([beside.table(), beside.ratio_table(pairs)])
    report.targets.append(beside.target(NOW, P99, "at most", OF_ALONE, to=f"{NOW}: alone"))
    return report


def _measure_shape(path: Path, shape: Shape, options: Options, before: Path | None) -> Rounds:
    # A quarter of an epoch: after that, neighbours have brought in most pages.
    most = path.stat().st_size // 4 // shape.num_bytes
    offsets = Expected(path, shape).starts(0, most) * 2
    rates = {
        depth: _read(path, offsets, shape, depth, options.seconds / 3)[RATE]
        for depth in (DEPTHS[::3] if options.quick else DEPTHS)
    }
    depth = max(rates, key=lambda each: rates[each])
    modes = [(name, arguments, ROOT) for name, arguments in MODES.items()]
    if before is not None:
        modes.insert(1, (BEFORE, (), before))
    rounds = Rounds(f"cold, {shape} uint16", COLUMNS)
    for _ in range(options.rounds):
        rounds.add(LIMIT, _read(path, offsets, shape, depth, options.seconds))
        for name, arguments, tree in modes:
            figures = stream_cold(path, shape, options.seconds, most, arguments=arguments, tree=tree)
            rounds.add(name, figures)
    return rounds


def _read(
    path: Path, offsets: npt.NDArray[np.int64], shape: Shape, depth: int, seconds: float
) -> dict[str, float]:
    """Read a plan's windows in its order, cold, with threads."""
    num_bytes = 2 * shape.length
    disk.drop(path)
    before = disk.bytes_read([os.getpid()])
    num_windows, taken = disk.read_parallel(path, offsets, num_bytes, depth=depth, seconds=seconds)
    share = (disk.bytes_read([os.getpid()]) - before) / (num_windows * num_bytes)
    return _figures(LIMIT, num_windows / taken, share)


def stream_cold(path: Path, shape: Shape, seconds: float, most: int, **arguments: Any) -> dict[str, float]:
    """Take batches of a cold file from a new server; return the rate, and bytes from disk per byte delivered.

    Args:
        most: batches to take; more would find their pages in memory.
        arguments: of `serving`.
    """
    disk.drop(path)
    with (
        serving({NAME: path}, **arguments) as server,
        closing(Ours("ours", server, shape, path)) as ours,
    ):
        # Reading ahead reaches its full length before it is timed.
        settling, _ = _take(ours, seconds / 3, most // 4)
        taken, taken_seconds = _take(ours, seconds, most - settling)
        share = disk.bytes_read(server.pids) / ((settling + taken) * shape.num_bytes)
        check(ours, path, shape, first=settling + taken, num_steps=1)
    return _figures("ours", taken * shape.rows / taken_seconds, share)


def _take(ours: Ours, seconds: float, most: int) -> tuple[int, float]:
    """Take batches, at least one; return how many, and the seconds that it took."""
    began, num_batches = time.perf_counter(), 0
    while num_batches == 0 or (time.perf_counter() - began < seconds and num_batches < most):
        ours.next()
        num_batches += 1
    return num_batches, time.perf_counter() - began


def _figures(name: str, rate: float, share: float) -> dict[str, float]:
    if share < 1:
        raise RuntimeError(f"{name}: of each byte delivered {share:.2f} came from disk; it was not cold")
    return {RATE: rate, FROM_DISK: share}


def _measure_beside(path: Path, warm: Path, options: Options) -> Rounds:
    """Measure resident requests alone and beside a cold reader, round by round."""
    percentiles = {P50: ("p50 ms", ".2f"), P99: ("p99 ms", ".2f")}
    rounds = Rounds(f"resident requests of {SHAPES[0]}, one at a time", percentiles)
    modes = {NOW: MODES[NOW]} if options.quick else MODES
    for _ in range(options.rounds):
        for name, arguments in {**modes, BOUNDED: read_ahead(path), OTHER: ()}.items():
            plan = {"order": bounded_order(path)} if name == BOUNDED else {}
            disk.drop(path)
            corpus.warm(warm)
            with (
                serving({NAME: warm, "cold": path}, arguments=arguments) as server,
                serving({"cold": path}) if name == OTHER else nullcontext(server) as asked,
                closing(OneAtATime(name, server, SHAPES[0], warm)) as requests,
            ):
                rounds.add(f"{name}: alone", measure_once(requests, SHAPES[0], options.seconds))
                with cold_reader(asked.url, SHAPES[0], **plan):
                    rounds.add(name, measure_once(requests, SHAPES[0], options.seconds))
    return rounds


@contextmanager
def cold_reader(url: str, shape: Shape, **plan: Any) -> Iterator[None]:
    """Let another process take batches of the corpus `cold` as fast as they come."""
    arguments = {"urls": url, "seq_len": shape.length - 1, "global_batch_size": shape.rows, **plan}
    command = [sys.executable, "-c", COLD_READER, json.dumps(arguments)]
    with running(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the reader of the cold corpus got no batch")
        yield
        if process.poll() is not None:
            raise RuntimeError("the reader of the cold corpus ended")
