"""Measure data from disk. `--only` takes one of two parts.

- `windows`: ours with and without reading ahead, beside parallel reads of the same windows. Before every turn
  the file is taken out of the page cache; the axis checks that what was delivered came from the disk.
- `bounded`: a corpus of four times the page cache, in bounded and in full shuffle. The memory of the server
  is limited to a quarter of the corpus, page cache included. The limit is a sequential read of the same file
  in the same round, with as little memory: a reader of unlimited memory gets pages that were just freed, and
  where the machine is virtual, others must come back from its host first. The same order of a corpus in
  memory shows what the cores allow. All is measured again with the disk held to the rate of a usual network
  volume.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.benchmarks import corpus, disk
from scripts.benchmarks.contender import Shape, check
from scripts.benchmarks.contest import BEFORE, NOW, SHAPES
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.expected import Expected, Order
from scripts.benchmarks.measure import Rounds
from scripts.benchmarks.ours import Ours
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import checked_out, serving
from scripts.processes import ROOT

HELP = "data from disk: reading ahead by plan, a bounded shuffle"

NUM_TOKENS, QUICK_TOKENS = 2 * 10**9, 16 * 10**6
DEPTHS = (1, 4, 16, 64)
LIMIT, NONE, OWN = "preadv by threads", "ours, no reading ahead", "ours, each response's own windows"
MODES: dict[str, tuple[str, ...]] = {
    NOW: (),
    OWN: ("--read-ahead-bytes", "1"),  # less than one step
    NONE: ("--read-ahead-bytes", "0"),
}
OF_LIMIT, OF_NONE, OF_BEFORE = 0.8, 3.0, 0.97

PIECE_BYTES, DEPTH = 4 << 20, 2  # of sequential reads
LEAST_MEMORY = 256 << 20  # of a server: in a quick run a quarter of the corpus would not hold its own memory
SEQUENTIAL, BOUNDED, FULL = "sequential reads", "bounded shuffle", "full shuffle"
RESIDENT = "bounded shuffle in memory"
VOLUME_RATE = 500_000_000  # bytes/s
OF_DISK, OF_FULL = 0.7, 4.0

Limits = Callable[[Sequence[int]], AbstractContextManager[bool]]
RATE, FROM_DISK = "bytes_per_second", "disk_bytes_per_byte"
COLUMNS = {RATE: ("useful bytes/s", ",.0f"), FROM_DISK: ("disk bytes / byte", ".2f")}


def measure(options: Options) -> Report:
    """Measure the parts that are asked for."""
    path = corpus.make(options.cache, QUICK_TOKENS if options.quick else NUM_TOKENS)
    report = Report(data={}, tables=[])
    for name in options.chosen(list(PARTS)):
        PARTS[name](report, path, options)
    return report


def measure_windows(report: Report, path: Path, options: Options) -> None:
    """Measure windows at random places, at both shapes."""
    with ExitStack() as stack:
        modes: list[tuple[str, dict[str, Any]]] = [
            (name, {"arguments": arguments}) for name, arguments in MODES.items()
        ]
        if options.before is not None:
            modes.insert(1, (BEFORE, {"tree": stack.enter_context(checked_out(options.before))}))
        for shape in SHAPES[:1] if options.quick else SHAPES:
            offsets = Expected(path, shape).starts(0, _most(path, shape)) * 2
            read = partial(_read, path, offsets, 2 * shape.length)
            rates = {
                depth: read(depth=depth, seconds=options.seconds / 3)[RATE]
                for depth in (DEPTHS[::3] if options.quick else DEPTHS)
            }
            depth = max(rates, key=lambda each: rates[each])
            rounds = Rounds(f"cold, {shape} uint16", COLUMNS)
            for _ in range(options.rounds):
                rounds.add(LIMIT, read(depth=depth, seconds=options.seconds))
                for name, serve in modes:
                    figures, _ = _stream(name, path, shape, options.seconds, **serve)
                    if figures[FROM_DISK] < 1:
                        raise RuntimeError(f"{name}: not all that was delivered came from disk: {figures}")
                    rounds.add(name, figures)
            report.data[str(shape)] = rounds.summary()
            wanted = {LIMIT: OF_LIMIT, NONE: OF_NONE} | ({BEFORE: OF_BEFORE} if options.before else {})
            report.tables.extend([rounds.table(), rounds.ratio_table([(NOW, name) for name in wanted])])
            for name, least in wanted.items():
                report.targets.append(rounds.target(NOW, RATE, "at least", least, to=name))


def measure_bounded(report: Report, path: Path, options: Options) -> None:
    """Measure orders with memory for a quarter of the corpus."""
    shape, is_limited = SHAPES[0], True
    quarter = f"{shape} uint16, memory for a quarter of the corpus"
    rates = {
        None: Rounds(quarter, COLUMNS),
        VOLUME_RATE: Rounds(f"{quarter}, disk of {VOLUME_RATE // 10**6} MB/s", COLUMNS),
    }
    orders: dict[str, Order] = {BOUNDED: bounded_order(path), FULL: "shuffle"}
    memory = max(path.stat().st_size // 4, LEAST_MEMORY)
    ahead = ("--read-ahead-bytes", str(path.stat().st_size // 8))
    offsets = np.arange(0, path.stat().st_size - PIECE_BYTES, PIECE_BYTES)
    for _ in range(options.rounds):
        for rate, rounds in rates.items():
            limits = partial(disk.limited, num_bytes=memory, path=path, disk_rate=rate)
            read = _read(path, offsets, PIECE_BYTES, depth=DEPTH, seconds=options.seconds, limits=limits)
            rounds.add(SEQUENTIAL, read)
            stream = partial(_stream, path=path, shape=shape, seconds=options.seconds, arguments=ahead)
            for name, order in orders.items():
                figures, was_limited = stream(name, order=order, limits=limits)
                rounds.add(name, figures)
                is_limited &= was_limited
        rates[None].add(RESIDENT, stream(RESIDENT, order=orders[BOUNDED], cold=False)[0])
    report.data["bounded"] = {"rates": [each.summary() for each in rates.values()], "limited": is_limited}
    for rate, rounds in rates.items():
        pairs = [(BOUNDED, SEQUENTIAL), (BOUNDED, FULL), (BOUNDED, RESIDENT)]
        report.tables.extend([rounds.table(), rounds.ratio_table(pairs[: 2 if rate else 3])])
        report.targets.append(rounds.target(BOUNDED, RATE, "at least", OF_DISK, to=SEQUENTIAL))
        report.targets.append(rounds.target(BOUNDED, RATE, "at least", OF_FULL, to=FULL))


PARTS = {"windows": measure_windows, "bounded": measure_bounded}


def bounded_order(path: Path) -> Order:
    """Return an order of which three groups are a tenth of the corpus, in blocks of 16 to a group."""
    num_windows = path.stat().st_size // 2 // (SHAPES[0].length - 1)
    return {"shuffle": {"block_windows": max(1, num_windows // 480), "group_blocks": 16}}


@contextmanager
def _unlimited(pids: Sequence[int]) -> Iterator[bool]:
    yield False


def _most(path: Path, shape: Shape) -> int:
    """Return the batches of a quarter of an epoch: after that, neighbours have brought in most pages."""
    return path.stat().st_size // 4 // shape.num_bytes


def _read(
    path: Path,
    offsets: npt.NDArray[np.int64],
    num_bytes: int,
    *,
    depth: int,
    seconds: float,
    limits: Limits = _unlimited,
) -> dict[str, float]:
    """Read pieces of a file with threads, cold; what the first third of the time reads is not counted."""
    disk.drop(path)
    read = partial(disk.read_parallel, path, num_bytes=num_bytes, depth=depth)
    with limits([os.getpid()]):
        settled, _ = read(offsets[: len(offsets) // 4], seconds=seconds / 3)
        before = disk.bytes_read([os.getpid()])
        num_pieces, taken = read(offsets[settled:], seconds=seconds)
    share = (disk.bytes_read([os.getpid()]) - before) / (num_pieces * num_bytes)
    return {RATE: num_pieces * num_bytes / taken, FROM_DISK: share}


def _stream(
    name: str,
    path: Path,
    shape: Shape,
    seconds: float,
    *,
    order: Order = "shuffle",
    limits: Limits = _unlimited,
    cold: bool = True,
    arguments: Sequence[str] = (),
    tree: Path = ROOT,
) -> tuple[dict[str, float], bool]:
    """Take batches from a new server; return rate and disk bytes per byte, and whether it was limited.

    Args:
        cold: the file is taken out of the page cache before, and at most a quarter of it is delivered.
        arguments, tree: of `serving`.
    """
    (disk.drop if cold else corpus.warm)(path)
    most = _most(path, shape)
    with (
        serving({NAME: path}, arguments=arguments, tree=tree) as server,
        limits(server.pids) as was_limited,
        closing(Ours(name, server, shape, path, order=order)) as ours,
    ):
        # Reading ahead reaches its full length before it is timed.
        settling, _ = _take(ours, seconds / 3, most // 4)
        taken, taken_seconds = _take(ours, seconds, most - settling)
        share = disk.bytes_read(server.pids) / ((settling + taken) * shape.num_bytes)
        check(ours, path, shape, first=settling + taken, num_steps=1)
    return {RATE: taken * shape.num_bytes / taken_seconds, FROM_DISK: share}, was_limited


def _take(ours: Ours, seconds: float, most: int) -> tuple[int, float]:
    """Take batches, at least one; return how many, and the seconds that it took."""
    began, num_batches = time.perf_counter(), 0
    while num_batches == 0 or (time.perf_counter() - began < seconds and num_batches < most):
        ours.next()
        num_batches += 1
    return num_batches, time.perf_counter() - began
