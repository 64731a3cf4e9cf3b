"""Latency of a step against its number and the size of the corpus."""

from __future__ import annotations

import statistics
from contextlib import closing
from typing import Any

from matplotlib.figure import Figure

from scripts.benchmarks import corpus
from scripts.benchmarks.report import Options, Plot, Report, Table, Target
from scripts.benchmarks.servers import batches_path, serving, timed_gets

SIZES = (10**6, 10**9, 10**12)
STEPS = (1, 10**3, 10**6, 10**9, 10**12)
ROWS, SEQ_LEN = 16, 1024
REQUESTS = 50
MOST_OF_MEDIAN = 1.25
"""A cost that does not grow gives equal figures; so much is noise of a median of medians."""


def measure(options: Options) -> Report:
    """Whole requests of small batches over one connection, on sparse files of all sizes at once.

    Each step is asked for twice, and the second time counts: the first fetches pages of the file, which
    depends on the disk. Sizes and steps take turns in every round.
    """
    sizes, steps, requests = (SIZES[::2], STEPS[::2], 4) if options.smoke else (SIZES, STEPS, REQUESTS)
    corpora = {f"tokens-{size}": corpus.sparse(options.cache, size) for size in sizes}
    times: dict[tuple[int, int], list[float]] = {(size, step): [] for size in sizes for step in steps}
    with serving(corpora) as server, closing(server.connect()) as connection:
        for number in range(options.rounds):
            for (size, step), medians in times.items():
                first = step + number * requests
                paths = [
                    batches_path(corpus=f"tokens-{size}", seq_len=SEQ_LEN, batch_size=ROWS, step=first + k)
                    for k in range(requests)
                ]
                timed_gets(connection, paths)
                medians.append(statistics.median(timed_gets(connection, paths)))
    found = [
        {
            "num_tokens": size,
            "step": step,
            "median_ms": statistics.median(medians) * 1e3,
            "lowest_ms": min(medians) * 1e3,
            "highest_ms": max(medians) * 1e3,
        }
        for (size, step), medians in times.items()
    ]
    return _report(found, options)


def _report(found: list[dict[str, Any]], options: Options) -> Report:
    middle = statistics.median(each["median_ms"] for each in found)
    sizes = sorted({each["num_tokens"] for each in found})
    steps = sorted({each["step"] for each in found})
    cells = {
        (each["num_tokens"], each["step"]): (
            f"{each['median_ms']:.2f} ({each['lowest_ms']:.2f} - {each['highest_ms']:.2f})"
        )
        for each in found
    }
    title = f"request of {ROWS} x {SEQ_LEN + 1} at step n, ms, median of {options.rounds} rounds"
    return Report(
        data={"steps": found},
        tables=[
            Table(
                title=title,
                columns=["step", *(f"{size:.0e} tokens" for size in sizes)],
                rows=[[f"{step:.0e}", *(cells[size, step] for size in sizes)] for step in steps],
            )
        ],
        targets=[
            Target(
                figure="slowest request at any step and corpus size, of the median one",
                reached=max(each["median_ms"] for each in found) / middle,
                bound="at most",
                wanted=MOST_OF_MEDIAN,
            )
        ],
        plots=[Plot(name="growth-steps", draw=lambda figure: _draw(figure, found))],
    )


def _draw(figure: Figure, found: list[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    for size in sorted({each["num_tokens"] for each in found}):
        ours = [each for each in found if each["num_tokens"] == size]
        axes.plot(
            [each["step"] for each in ours],
            [each["median_ms"] for each in ours],
            marker="o",
            label=f"$10^{{{len(str(size)) - 1}}}$",
        )
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel(f"request of {ROWS} x {SEQ_LEN + 1}, ms")
    axes.legend(title="tokens of the corpus")
