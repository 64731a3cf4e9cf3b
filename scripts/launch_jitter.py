"""Measure what a loop of small launches loses beside a loader that fetches in a thread of the same process.

    python -m scripts.launch_jitter [--rounds 5] [--seconds 2]

The loop does nothing but small torch calls, some 10^5 a second, as a training loop does that launches
kernels, and takes a batch of 64 x 1,025 tokens whenever one is due at the rate. Torch lets go of the GIL in
each call, so the loader's thread may take it then, and the next launch is late. Each launch is timed by
itself; *lost* is how much longer the mean launch takes than in the same loop without a loader, which copies
a batch of its own at the same moments, so that the caches are as cold. Turns follow one another within a
round, and ratios are taken within it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from corpus_client import CorpusLoader
from scripts.benchmarks.servers import serving

ROWS, SEQ_LEN = 64, 1024
NUM_TOKENS = 1 << 26
RATES = (10, 100, 500)  # million tokens a second
REAL = 10
"""Million tokens a second that no rank trains at."""
MAX_LOST = 0.01  # at that rate; more would be a reason to receive in another process


@dataclass(frozen=True, slots=True)
class Launches:
    """How long the launches of a turn took: microseconds, and batches that came."""

    mean: float
    p50: float
    p99: float
    p999: float
    per_second: float
    rate: float  # million tokens a second that were taken

    @classmethod
    def of(cls, nanoseconds: Sequence[int], num_batches: int, seconds: float) -> Launches:
        """Return the figures of a turn."""
        took = np.array(nanoseconds) / 1000
        p50, p99, p999 = np.percentile(took, [50, 99, 99.9]).tolist()
        rate = num_batches * ROWS * SEQ_LEN / seconds / 1e6
        return cls(float(took.mean()), p50, p99, p999, len(took) / seconds, rate)


def launch_for(seconds: float, rate: float, take: Callable[[], object]) -> Launches:
    """Launch for some seconds, and take a batch whenever one is due; each launch is timed, and no batch."""
    clock, small, took = time.perf_counter_ns, torch.ones(256), list[int]()
    period = int(ROWS * SEQ_LEN / (rate * 1e6) * 1e9)
    began = due = clock()
    stop, num_batches = began + int(seconds * 1e9), 0
    while (now := clock()) < stop:
        if now >= due:
            take()
            due, num_batches = max(due + period, now - 10 * period), num_batches + 1
        for _ in range(8):  # the clock and the comparisons of this loop are no launches
            before = clock()
            small.mul_(1.0).add_(0.5).sub_(0.5)
            took.append(clock() - before)
    return Launches.of(took, num_batches, (clock() - began) / 1e9)


def own_batch() -> Callable[[], object]:
    """Return what copies a batch as a loader's `next` does, from memory of 64 MiB."""
    stored = np.zeros((512, 2, ROWS, SEQ_LEN), np.uint16)
    batches = (stored[number % len(stored)] for number in iter(int, 1))
    into = np.empty((2, ROWS, SEQ_LEN), np.int64)

    def take() -> None:
        np.copyto(into, next(batches))

    return take


@contextmanager
def loaders(folder: Path) -> Iterator[dict[str, CorpusLoader]]:
    """Yield loaders of a server at a URL, and of a path."""
    path = folder / "bench.bin"
    np.random.default_rng(0).integers(0, 50_257, NUM_TOKENS, dtype=np.uint16).tofile(path)
    with ExitStack() as stack:
        url = stack.enter_context(serving({"bench": path})).url
        plan = {"corpus": "bench", "seq_len": SEQ_LEN, "global_batch_size": ROWS, "device": "cpu"}
        yield {
            name: stack.enter_context(CorpusLoader(at, **plan))  # type: ignore[arg-type]
            for name, at in (("by URL", url), ("by path", {"bench": path}))
        }


def measure(rounds: int, seconds: float) -> dict[tuple[str, int], list[tuple[Launches, Launches]]]:
    """Return what each loader cost at each rate: launches beside it, and without it in the same round."""
    torch.set_num_threads(1)
    found: dict[tuple[str, int], list[tuple[Launches, Launches]]] = {}
    with tempfile.TemporaryDirectory() as folder, loaders(Path(folder)) as opened:
        own = own_batch()
        for rate in RATES:
            for loader in opened.values():
                launch_for(seconds / 4, rate, loader.__next__)  # slots are filled, pages are mapped
        for number in range(rounds):
            for rate in RATES if number % 2 == 0 else reversed(RATES):
                without = launch_for(seconds, rate, own)
                for name, loader in opened.items():
                    # A loader whose slots are full does nothing: it waits while the other one is measured.
                    beside = launch_for(seconds, rate, loader.__next__)
                    found.setdefault((name, rate), []).append((beside, without))
    return found


def lines(found: dict[tuple[str, int], list[tuple[Launches, Launches]]]) -> Iterator[str]:
    """Yield the table, and what follows from it."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    yield "| M tokens/s | loader | taken | launches/s | p50 us | p99 us | p99.9 us | mean us | lost |"
    yield "|--:|---|--:|--:|--:|--:|--:|--:|--:|"
    for rate in RATES:
        at_rate = {name: pairs for (name, each), pairs in found.items() if each == rate}
        shown = {"none": [without for pairs in at_rate.values() for _, without in pairs]}
        shown |= {name: [beside for beside, _ in pairs] for name, pairs in at_rate.items()}
        for name, turns in shown.items():
            figures = [
                f"{median([getattr(turn, figure) for turn in turns]):{form}}"
                for figure, form in (
                    ("rate", ",.0f"),
                    ("per_second", ",.0f"),
                    ("p50", ".1f"),
                    ("p99", ".1f"),
                    ("p999", ".0f"),
                    ("mean", ".2f"),
                )
            ]
            yield f"| {rate} | {name} | {' | '.join(figures)} | {lost_cell(found.get((name, rate)))} |"
    yield ""
    for name in dict.fromkeys(name for name, _ in found):
        share = median([lost(*pair) for pair in found[name, REAL]])
        said = "more than" if share > MAX_LOST else "at most"
        yield f"{name}, {REAL} M tokens/s: {share:.1%} lost, {said} the {MAX_LOST:.0%} that may be."


def lost(beside: Launches, without: Launches) -> float:
    """Return the share by which the mean launch is longer."""
    return beside.mean / without.mean - 1


def lost_cell(pairs: Sequence[tuple[Launches, Launches]] | None) -> str:
    """Return the median and the spread of what is lost."""
    if pairs is None:
        return ""
    shares = sorted(lost(*pair) for pair in pairs)
    return f"{statistics.median(shares):.1%} ({shares[0]:.1%} to {shares[-1]:.1%})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    chosen = parser.parse_args(arguments)
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    versions = f"Python {platform.python_version()}, {'with' if gil else 'without'} the GIL"
    print(f"{versions}, torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    for line in lines(measure(chosen.rounds, chosen.seconds)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
