"""Measure what `next` of a loader costs beside a batch that is there anyway.

    python -m scripts.next_cost [--rounds 300] [--rests 0 20] [--device cpu simulated]

The batch of the loader has come, and waits. The other one lies in memory of the program, or of the device:
it is widened into int64 inputs and targets as the loader does that, or on the CPU stays as it is stored. Both
have 64 MiB, so that the caches hold as little of either. They take turns, each after a rest of so many
milliseconds: a processor that has slept is slow at first. *more* is the difference within a turn. On a device
calls only queue work; the simulated one of the tests takes longer for each call than CUDA.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from corpus_client import CorpusLoader, Staging
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.servers import serving
from tests.simulated_device import backend

SHAPES = (Shape(rows=8, length=129), Shape(rows=64, length=1025), Shape(rows=512, length=2049))
NUM_TOKENS = 1 << 26
BYTES = 64 << 20
MOST_SECONDS = 50e-6


def batches_there(shape: Shape, device: str, dtype: torch.dtype | None) -> Callable[[], object]:
    """Return what makes inputs and targets of the next of many batches in memory, as a loader does."""
    count = max(2, BYTES // shape.num_bytes)
    size = (2, shape.rows, shape.length - 1)
    batches = cycle(torch.zeros(count, *size, dtype=torch.uint16, device=device).unbind())
    if dtype is None:
        return lambda: next(batches).unbind()
    if device == "cpu":
        arrays = (each.numpy() for each in batches)
        free = cycle([np.empty(size, np.int64) for _ in range(4)])  # as the loader, which uses memory again

        def widen() -> object:
            made = next(free)
            np.copyto(made, next(arrays))
            return [torch.from_numpy(each) for each in made]

        return widen

    def queue() -> object:
        made = torch.empty(size, dtype=dtype, device=device)
        made.copy_(next(batches), non_blocking=True)
        return made.unbind()

    return queue


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    held = call()
    took = time.perf_counter() - began
    del held
    return took


def measure(
    loader: CorpusLoader, there: Callable[[], object], rest: float, rounds: int
) -> list[tuple[float, float]]:
    """Return seconds of `next` and of the other batch, in turns."""
    calls = {0: lambda: next(loader), 1: there}
    found = []
    next(loader)  # begins to fetch
    for number in range(-20, rounds):
        took = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            time.sleep(rest)
            while loader.stats().ready_slots < 1:
                time.sleep(0.001)
            took[which] = timed(calls[which])
        if number >= 0:
            found.append((took[0], took[1]))
    return found


def rows(url: str, device: str, rests: Sequence[float], rounds: int) -> Iterator[str]:
    """Yield a line of the table for each shape, type and rest."""
    for shape in SHAPES:
        for dtype in (None, torch.int64) if device == "cpu" else (torch.int64,):
            with closing(
                CorpusLoader(
                    url,
                    seq_len=shape.length - 1,
                    global_batch_size=shape.rows,
                    device=device,
                    dtype=dtype,
                    staging=Staging(prefetch_bytes=BYTES),
                )
            ) as loader:
                there = batches_there(shape, device, dtype)
                for rest in rests:
                    found = measure(loader, there, rest / 1e3, rounds)
                    more = [a - b for a, b in found]
                    low, middle, high = np.percentile(more, [10, 50, 90]) * 1e6
                    ours, other = (statistics.median(each) * 1e6 for each in zip(*found, strict=True))
                    yield (
                        f"| {device} | {shape} | {'as stored' if dtype is None else 'int64'} | {rest:g} | "
                        f"{ours:.1f} | {other:.1f} | {middle:.1f} ({low:.1f} - {high:.1f}) |"
                    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300, help="of each line; default %(default)s")
    parser.add_argument("--rests", type=float, nargs="+", default=[0, 20], help="milliseconds")
    parser.add_argument("--device", nargs="+", default=["cpu", backend.NAME], help="cpu, cuda, simulated")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| device | batch | tokens | rest ms | next us | batch that is there us | more us (10 % - 90 %) |")
    print("|---|---|---|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "web.bin"
        np.random.default_rng(0).integers(0, 50_257, NUM_TOKENS, dtype=np.uint16).tofile(path)
        with serving({"web": path}) as server:
            for device in given.device:
                with backend.present() if device == backend.NAME else nullcontext():
                    for line in rows(server.url, device, given.rests, given.rounds):
                        print(line, flush=True)


if __name__ == "__main__":
    main()
