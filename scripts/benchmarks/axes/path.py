"""Measure the loader by path, by Unix socket and by URL beside gathers of the same process from a memmap.

All deliver what a training loop takes by default: inputs and targets of a batch, contiguous, widened to
int64, on the CPU. The gathers draw where their windows begin from a generator, so they pay for no shuffle;
the strongest one of each round is the limit. A loader works with two threads and a gather with one: where a
second core is free, tokens per second favour the loader, and the CPU of a token does not.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from scripts.benchmarks.contest import Maker, contest, resident_corpus, shapes_of
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.measure import DELIVERY, SPEED, Rounds
from scripts.benchmarks.ours import Ours
from scripts.benchmarks.peers.local import NanoGpt, WidenedGather, WidenedInto
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import serving

HELP = "a loader by path, by Unix socket and by URL beside a gather of the same process from a memmap"

PATH, UDS, URL = "by path", "by Unix socket", "by URL"
NANOGPT, GATHER, INTO = "nanoGPT idiom", "gather, new tensors", "gather into the same tensors"
LIMIT = "strongest gather"
OF_LIMIT = 0.95


def measure(options: Options) -> Report:
    """Measure all contenders at both shapes."""
    path = resident_corpus(options)
    report = Report(data={}, tables=[])
    with ExitStack() as stack:
        enter = stack.enter_context
        folder = Path(enter(tempfile.TemporaryDirectory()))
        url = enter(serving({NAME: path}))
        uds = enter(serving({NAME: path}, uds=folder / "socket"))
        for shape in shapes_of(options):
            ours = partial(Ours, shape=shape, path=path, dtype=torch.int64)
            makers: list[Maker] = [
                partial(ours, PATH, None),
                partial(ours, UDS, uds),
                partial(ours, URL, url),
                partial(NanoGpt, NANOGPT, path, shape),
                partial(WidenedGather, GATHER, path, shape),
                partial(WidenedInto, INTO, path, shape),
            ]
            rounds = contest(Rounds(f"{shape}, int64", DELIVERY), shape, path, options, makers)
            winners = rounds.add_strongest(LIMIT, [NANOGPT, GATHER, INTO])
            report.notes.append(
                f"{shape}: the strongest gather, with the rounds that it won: "
                + ", ".join(f"{name} ({count})" for name, count in winners.items())
                + "."
            )
            pairs = [(of, to) for to in (LIMIT, NANOGPT) for of in (PATH, UDS, URL)]
            report.tables.extend([rounds.table(), rounds.ratio_table(pairs)])
            report.targets.append(rounds.target(PATH, SPEED, "at least", OF_LIMIT, to=LIMIT))
            report.data[str(shape)] = rounds.summary()
    return report
