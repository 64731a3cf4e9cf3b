"""Data that come from disk: ours with and without reading ahead beside parallel reads of the same windows.

Before every measurement the file is taken out of the page cache, and afterwards it is checked that what was
delivered came from the disk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from corpus_server.plan import Plan, Sampler, Stage
from scripts.benchmarks import beside, corpus, disk
from scripts.benchmarks.contender import Delivered, Shape, windows_of
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.measure import paired_ratios, spread
from scripts.benchmarks.ours import Ours
from scripts.benchmarks.plotting import Role, bars
from scripts.benchmarks.report import Options, Plot, Report, Table, Target
from scripts.benchmarks.servers import serving

HELP = "data from disk: reading ahead by plan beside fio, and warm requests beside cold ones"

NUM_TOKENS, NUM_WARM_TOKENS = 2 * 10**9, 10**8
SMOKE_TOKENS = 16 * 10**6
SHAPES = (Shape(rows=64, length=1025), Shape(rows=512, length=2049))
DEPTHS = (1, 2, 4, 8, 16, 32, 64)
THREADS, FIO = "preadv by threads", "fio, psync threads"
NONE, OWN, PLAN, WARM = "ours, none", "ours, each answer's own windows", "ours, by plan", "ours, resident"
MODES: dict[str, tuple[str, ...]] = {
    NONE: ("--read-ahead-bytes", "0"),
    OWN: ("--read-ahead-bytes", "1"),  # less than one step
    PLAN: (),
}
OF_MACHINE = "fio, no request of ours"
"""What the disk's work itself costs the neighbours: nobody asks the server for cold data."""
MACHINE_DEPTH = 32
OTHER, OTHER_PACED = "another server's, by plan", "another server's, by plan, 20,000 windows/s"
"""Beside a server process of its own: what the machine's cores cost the warm one, with nothing shared."""
PACED = "ours, by plan, 20,000 windows/s"
PACE = 20_000.0
"""20 million tokens a second: what a large run consumes, and a fraction of what the disk can do."""
OF_LIMIT, OF_NONE, OF_ALONE = 0.8, 3.0, 2.0


def measure(options: Options) -> Report:
    """Measure both shapes, then warm requests beside cold ones."""
    if options.smoke:
        options = replace(options, rounds=1, seconds=0.2)
    path = corpus.make(options.cache, SMOKE_TOKENS if options.smoke else NUM_TOKENS)
    warm = corpus.make(options.cache, SMOKE_TOKENS // 2 if options.smoke else NUM_WARM_TOKENS)
    data: dict[str, Any] = {
        "rounds": options.rounds,
        "num_tokens": path.stat().st_size // 2,
        "shapes": {
            str(shape): _measure_shape(path, warm, shape, options)
            for shape in (SHAPES[:1] if options.smoke else SHAPES)
        },
        "beside": _measure_beside(path, warm, options),
    }
    notes = [] if disk.has_fio() else ["fio is not installed: the limit is that of Python's threads alone."]
    return Report(
        data=data,
        tables=[
            *(_table(shape, its, data["rounds"]) for shape, its in data["shapes"].items()),
            _depth_table(data["shapes"]),
            _beside_table(data["beside"]),
        ],
        targets=_targets(data),
        plots=[Plot(name="cold", draw=partial(_draw, data["shapes"]))],
        notes=notes,
    )


def _measure_shape(path: Path, warm: Path, shape: Shape, options: Options) -> dict[str, Any]:
    # A quarter of an epoch: windows share pages with their neighbours, which come in with them.
    most = path.stat().st_size // 4 // shape.num_bytes
    offsets = _offsets(path, shape, most)
    depths = {name: _sweep(path, offsets, shape, name, options) for name in _limits()}
    deepest = {name: max(rates, key=lambda depth: rates[depth]) for name, rates in depths.items()}
    rates: dict[str, list[float]] = {}
    from_disk: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, depth in deepest.items():
            read = _read(path, offsets, shape, name, depth, options.seconds)
            rates.setdefault(name, []).append(read.windows_per_second)
        for name, arguments in MODES.items():
            disk.drop(path)
            rate, share = _stream(path, shape, most, options.seconds, arguments)
            rates.setdefault(name, []).append(rate)
            from_disk.setdefault(name, []).append(_check_cold(name, share))
        corpus.warm(warm)
        rates.setdefault(WARM, []).append(_stream(warm, shape, 10**9, options.seconds, ())[0])
    limit = max(deepest, key=lambda name: spread(rates[name])["median"])
    return {
        "window_bytes": 2 * shape.length,
        "windows_per_second": {name: spread(its) for name, its in rates.items()},
        "read_per_delivered_byte": {name: spread(its) for name, its in from_disk.items()},
        "depths": {name: {str(depth): rate for depth, rate in its.items()} for name, its in depths.items()},
        "limit": limit,
        "of_limit": {name: paired_ratios(rates[name], rates[limit]) for name in MODES},
        "of_none": {name: paired_ratios(rates[name], rates[NONE]) for name in MODES},
    }


def _limits() -> list[str]:
    return [THREADS, FIO] if disk.has_fio() else [THREADS]


def _sweep(
    path: Path, offsets: npt.NDArray[np.int64], shape: Shape, name: str, options: Options
) -> dict[int, float]:
    """Return windows per second by queue depth."""
    depths = DEPTHS[::3] if options.smoke else DEPTHS
    return {
        depth: _read(path, offsets, shape, name, depth, options.seconds / 3).windows_per_second
        for depth in depths
    }


def _read(
    path: Path, offsets: npt.NDArray[np.int64], shape: Shape, name: str, depth: int, seconds: float
) -> disk.Read:
    """Read a plan's windows in its order, cold, as one of the limits does."""
    num_bytes = 2 * shape.length
    disk.drop(path)
    before = disk.bytes_read([os.getpid()])
    read = disk.read_parallel(path, offsets, num_bytes, depth=depth, seconds=seconds)
    _check_cold(name, (disk.bytes_read([os.getpid()]) - before) / (read.num_windows * num_bytes))
    if name == THREADS:
        return read
    # fio is told what to read, not how long: as much as the threads have managed.
    disk.drop(path)
    return disk.read_with_fio(path, offsets[: read.num_windows], num_bytes, depth=depth)


def _stream(
    path: Path, shape: Shape, most: int, seconds: float, arguments: Sequence[str]
) -> tuple[float, float]:
    """Take batches from a new server; return windows per second, and bytes from disk per byte delivered."""
    with (
        serving({NAME: path}, arguments=arguments) as server,
        closing(Ours("ours", server.url, [server.pid], shape, path)) as ours,
    ):
        # Before it is timed, what is read ahead gets its full length.
        settling, _, _ = _take(ours, seconds / 3, most // 4)
        num_batches, tokens, taken_seconds = _take(ours, seconds, most - settling)
        delivered = windows_of(tokens).copy()
        rate = num_batches * shape.rows / taken_seconds
        num_batches += settling
        share = disk.bytes_read([server.pid]) / (num_batches * shape.num_bytes)
        data = np.memmap(path, dtype=np.uint16, mode="r")
        expected = [data[start : start + shape.length] for start in ours.starts(num_batches - 1).tolist()]
        if not np.array_equal(delivered, expected):
            raise RuntimeError(f"step {num_batches - 1} of {shape} holds other tokens than the corpus")
    return rate, share


def _take(ours: Ours, seconds: float, most: int) -> tuple[int, Delivered, float]:
    """Take batches, one at least; return how many, the last one, and how long they took."""
    began = time.perf_counter()
    tokens, num_batches = ours.next(), 1
    while time.perf_counter() - began < seconds and num_batches < most:
        tokens = ours.next()
        num_batches += 1
    return num_batches, tokens, time.perf_counter() - began


def _check_cold(name: str, share: float) -> float:
    if share < 1:
        raise RuntimeError(f"{name}: of each byte delivered {share:.2f} came from disk; it was not cold")
    return share


def _offsets(path: Path, shape: Shape, num_steps: int) -> npt.NDArray[np.int64]:
    """Return the first bytes of the windows of the plan that ours is asked for, step after step."""
    plan = Plan(seq_len=shape.length - 1, stages=(Stage(global_batch_size=shape.rows, mixture={NAME: 1.0}),))
    sampler = Sampler(plan, {NAME: [path.stat().st_size // 2]})
    blocks = [
        sampler.locate(first, count=min(256, num_steps - first))[:, :, 1].reshape(-1) * 2
        for first in range(0, num_steps, 256)
    ]
    return np.concatenate(blocks)


def _measure_beside(path: Path, warm: Path, options: Options) -> dict[str, Any]:
    """Measure p99 of resident requests alone and beside a cold reader, round by round."""
    p50: dict[str, list[float]] = {}
    p99: dict[str, list[float]] = {}
    modes = MODES | dict.fromkeys((PACED, OTHER, OTHER_PACED, *([OF_MACHINE] if disk.has_fio() else [])), ())
    for _ in range(options.rounds):
        for name, arguments in modes.items():
            disk.drop(path)
            corpus.warm(warm)
            with (
                serving({NAME: path, "warm": warm}, arguments=arguments) as server,
                serving({NAME: path}) if name in (OTHER, OTHER_PACED) else nullcontext(server) as asked,
            ):
                alone = beside.request_seconds(server.url, "warm", options.seconds)
                with _cold_reads(name, path, asked.url):
                    together = beside.request_seconds(server.url, "warm", options.seconds)
            for key, taken in ((f"{name}: alone", alone), (name, together)):
                low, high = np.percentile(taken, [50, 99])
                p50.setdefault(key, []).append(float(low))
                p99.setdefault(key, []).append(float(high))
    return {
        "p50_seconds": {name: spread(its) for name, its in p50.items()},
        "p99_seconds": {name: spread(its) for name, its in p99.items()},
        "p99_of_alone": {name: paired_ratios(p99[name], p99[f"{name}: alone"]) for name in modes},
    }


def _cold_reads(name: str, path: Path, url: str) -> AbstractContextManager[None]:
    if name == OF_MACHINE:
        return disk.fio_reading(path, 2 * SHAPES[0].length, depth=MACHINE_DEPTH)
    return beside.cold_reader(url, SHAPES[0], pace=PACE if name in (PACED, OTHER_PACED) else None)


def _targets(data: Mapping[str, Any]) -> list[Target]:
    targets = []
    for shape, its in data["shapes"].items():
        of_limit, of_none = its["of_limit"][PLAN]["median"], its["of_none"][PLAN]["median"]
        targets += [
            Target(
                figure=f"{shape}: {PLAN} / {its['limit']}",
                reached=of_limit,
                bound="at least",
                wanted=OF_LIMIT,
            ),
            Target(figure=f"{shape}: {PLAN} / {NONE}", reached=of_none, bound="at least", wanted=OF_NONE),
        ]
    reached = data["beside"]["p99_of_alone"][PLAN]["median"]
    figure = "p99 of warm requests beside cold ones / alone"
    return [*targets, Target(figure=figure, reached=reached, bound="at most", wanted=OF_ALONE)]


def _table(shape: str, its: Mapping[str, Any], rounds: int) -> Table:
    rows = []
    for name, rate in its["windows_per_second"].items():
        of_limit, of_none = its["of_limit"].get(name), its["of_none"].get(name)
        rows.append(
            [
                name,
                f"{rate['median']:,.0f}",
                f"{rate['lowest']:,.0f} - {rate['highest']:,.0f}",
                f"{rate['median'] * its['window_bytes'] / 1e6:,.0f}",
                f"{of_limit['median']:.2f}" if of_limit else "",
                f"{of_none['median']:.1f}" if of_none else "",
                f"{its['read_per_delivered_byte'][name]['median']:.2f}" if of_limit else "",
            ]
        )
    columns = ["", "windows/s", "spread", "MB/s", f"/ {its['limit']}", "/ none", "disk bytes / byte"]
    return Table(title=f"cold, {shape} uint16, median of {rounds} rounds", columns=columns, rows=rows)


def _depth_table(shapes: Mapping[str, Any]) -> Table:
    depths = list(next(iter(shapes.values()))["depths"][THREADS])
    rows = [
        [f"{shape}: {name}", *(f"{rates[depth]:,.0f}" for depth in depths)]
        for shape, its in shapes.items()
        for name, rates in its["depths"].items()
    ]
    return Table(title="the limit: windows/s by reads under way", columns=["", *depths], rows=rows)


def _beside_table(its: Mapping[str, Any]) -> Table:
    rows = []
    for name, ratio in its["p99_of_alone"].items():
        alone = f"{name}: alone"
        cells = [
            its[key][which]["median"] * 1e3
            for which in (alone, name)
            for key in ("p50_seconds", "p99_seconds")
        ]
        rows.append(
            [
                name,
                *(f"{cell:.2f}" for cell in cells),
                f"{ratio['median']:.2f}",
                f"{ratio['lowest']:.2f} - {ratio['highest']:.2f}",
            ]
        )
    columns = ["cold reads", "alone p50 ms", "p99 ms", "beside p50 ms", "p99 ms", "p99 ratio", "spread"]
    title = f"resident requests of {beside.REQUEST} beside a cold reader"
    return Table(title=title, columns=columns, rows=rows)


def _draw(shapes: Mapping[str, Any], figure: Figure) -> None:
    figure.set_size_inches(9, 2.6 * len(shapes) + 0.6)
    for number, (shape, its) in enumerate(shapes.items(), start=1):
        rates = its["windows_per_second"]
        scale = its["window_bytes"] / 1e6
        roles: list[Role] = ["ours" if name.startswith("ours") else "limit" for name in rates]
        axes = figure.add_subplot(len(shapes), 1, number)
        medians = [rate["median"] * scale for rate in rates.values()]
        spreads = [(rate["lowest"] * scale, rate["highest"] * scale) for rate in rates.values()]
        bars(axes, list(rates), medians, spreads, roles)
        axes.set_title(
            f"{shape} uint16: MB/s of windows, from disk but for the last", loc="left", fontsize=10
        )
