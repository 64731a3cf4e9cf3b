"""How long a training step waits for its batch, by each way of feeding it.

python -m scripts.gpu_lib.overlap http://data:8000 --corpus fineweb --step-ms 5 --batch 8MB
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import RenderableType
from rich.table import Table

from corpus_client import errors
from corpus_client.staging.ring import find_device
from corpus_client.tools import report
from corpus_client.tools.machine import describe, measurable_bytes, one_line
from corpus_client.tools.timing import Clock, Spread, parse_size, seconds_name, size_name
from scripts.gpu_lib.feeds import LOCKED, WAYS, Feed
from scripts.gpu_lib.work import TrainStep

POOL_TOKENS = 1 << 24  # random tokens that (a) to (d) sample from
BUFFERS = 16  # times a batch is what the greediest way takes: widened, ahead, and its slots
WARM_UP_STEPS = 8
RUN_AHEAD = 2  # steps that the loop queues before it waits, as a run that looks at its loss now and then

NO_SERVER = (
    "(e) CorpusLoader: no server was named. Start one with 'corpus-server serve NAME=PATH' and give "
    "its URL, http://127.0.0.1:8000, and --corpus NAME"
)
ON_THE_CPU = (
    "(b) and (c): on the CPU nothing is page-locked and nothing is transferred, so they are (a). "
    "A copy is the widening to int64; step, workers and loader share the cores, the step takes half"
)


def overlap(
    url: Annotated[str | None, typer.Argument(help="http://host:port of a server, for (e)")] = None,
    corpus: Annotated[str | None, typer.Option(help="its corpus")] = None,
    step_ms: Annotated[float, typer.Option(help="length of a training step", min=0.01, max=60_000)] = 5.0,
    batch: Annotated[str, typer.Option(help="tokens of a step as stored, in bytes")] = "8MB",
    seq_len: Annotated[int, typer.Option(help="inputs per row", min=1, max=65536)] = 1024,
    steps: Annotated[int, typer.Option(help="of each way in each round", min=2)] = 60,
    rounds: Annotated[int, typer.Option(help="over all ways", min=1)] = 3,
    workers: Annotated[int, typer.Option(help="processes of torch's DataLoader", min=1, max=256)] = 2,
    header: report.Header = None,
    token_file: report.TokenFile = None,
    device: report.Device = None,
    as_json: report.AsJson = False,
) -> None:
    """Feed training steps of a chosen length in every way; print how long each one waits for data."""

    def measured() -> report.Report:
        if (url is None) != (corpus is None):
            raise errors.InvalidArgument(f"a URL and --corpus go together, got {url!r} and {corpus!r}")
        place, network = find_device(device), report.read_network("bench", header, token_file)
        rows = max(1, parse_size(batch) // (2 * (seq_len + 1)))
        open_loader = partial(
            report.open_loader,
            url or "",
            device=place,
            corpus=corpus,
            seq_len=seq_len,
            global_batch_size=rows,
            network=network,
        )
        feed = Feed(
            np.random.default_rng(0).integers(0, 50_257, POOL_TOKENS, np.uint16),
            rows=rows,
            window=seq_len + 1,
            device=place,
            workers=workers,
            open_loader=open_loader if url else None,
        )
        return report_of(measure(feed, step_ms / 1e3, steps, rounds))

    report.run(measured, as_json=as_json)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Steps fed in one way: seconds of a step, over all rounds.

    stall: how much longer a step takes than with a batch that is there: mean against mean, for each round.
    """

    name: str
    title: str
    seconds: Spread
    stall: Spread

    @classmethod
    def of(cls, name: str, rounds: Sequence[Mapping[str, list[float]]]) -> Outcome:
        """Compare a way's steps with those of a batch that is there, seconds by round and way."""
        stalls = [statistics.fmean(each[name]) / statistics.fmean(each["constant"]) - 1 for each in rounds]
        steps = [seconds for each in rounds for seconds in each[name]]
        return cls(name=name, title=WAYS[name].title, seconds=Spread.of(steps), stall=Spread.of(stalls))


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """All that was measured.

    asked_seconds: the step's length that was asked for; num_products: matrix products that it has.
    outcomes: a way each, `constant` last; missing: what was left out and why, a sentence each.
    """

    machine: dict[str, Any]
    batch_bytes: int
    rows: int
    seq_len: int
    asked_seconds: float
    num_products: int
    outcomes: list[Outcome]
    missing: list[str]


def measure(feed: Feed, step_seconds: float, num_steps: int, rounds: int) -> Overlap:
    """Measure every way that this machine and these arguments allow."""
    batch_bytes, most = feed[0].nbytes, measurable_bytes(feed.device) // BUFFERS
    if batch_bytes > most:
        raise errors.InvalidArgument(
            f"batch must be at most {size_name(most)}, got {size_name(batch_bytes)}: up to {BUFFERS} times a "
            "batch is taken, and no more than a quarter of the free memory"
        )
    names, missing = list(WAYS), []
    if feed.device.type == "cpu":
        names = [name for name in names if name not in LOCKED]
        missing.append(ON_THE_CPU)
        # For the rest of this process; a step on every core would spin while loader and workers wait for one.
        torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    if feed.open_loader is None:
        names.remove("corpus-loader")
        missing.append(NO_SERVER)
    clock = Clock(feed.device)
    step = TrainStep(clock, feed.send(feed[0], non_blocking=False), step_seconds)
    # Round by round, so that a drift of the machine touches all ways.
    every = [{name: steps_of(name, feed, step, clock, num_steps) for name in names} for _ in range(rounds)]
    return Overlap(
        machine=describe(feed.device),
        batch_bytes=batch_bytes,
        rows=feed.rows,
        seq_len=feed.window - 1,
        asked_seconds=step_seconds,
        num_products=step.num_products,
        outcomes=[Outcome.of(name, every) for name in names],
        missing=missing,
    )


def steps_of(name: str, feed: Feed, step: TrainStep, clock: Clock, num_steps: int) -> list[float]:
    """Return seconds from the end of each step to the end of the next, after a warm-up.

    On a GPU by events, so that nothing waits but what would wait anyway.
    """
    ends: list[float] = []
    events: list[Any] = []
    with closing(WAYS[name].run(feed)) as batches:
        for number in range(WARM_UP_STEPS + num_steps):
            step(next(batches))
            ends.append(time.perf_counter())
            if (event := clock.event()) is not None:
                events.append(event)
                if number >= RUN_AHEAD:
                    events[number - RUN_AHEAD].synchronize()
        clock.synchronize()
    if events:
        ends = [events[0].elapsed_time(event) / 1e3 for event in events]
    return [after - before for before, after in pairwise(ends[WARM_UP_STEPS - 1 :])]


def report_of(found: Overlap) -> report.Report:
    """Return what a step is, and a row for each way."""
    asked, size = seconds_name(found.asked_seconds), size_name(found.batch_bytes)
    table = Table("", "step, median", "p90", "stall", "10 to 90 % of the rounds", title="a training step")
    for each in found.outcomes:
        median, p90 = seconds_name(each.seconds.median), seconds_name(each.seconds.p90)
        stalls = f"{each.stall.p10:+.1%} to {each.stall.p90:+.1%}"
        table.add_row(each.title, median, p90, f"{each.stall.median:+.1%}", stalls)

    step = (
        f"{found.rows:,} x {found.seq_len + 1:,} tokens, {size} a step; {asked} asked for, "
        f"{seconds_name(found.outcomes[-1].seconds.median)} is what a step takes with "
        f"{found.num_products} matrix products"
    )
    left_out = [f"[yellow]left out:[/yellow] {sentence}" for sentence in found.missing]
    stall = "stall: by how much the mean step is longer than that of (f)"
    shown: list[RenderableType] = [one_line(found.machine), step, table, stall, *left_out]
    return report.Report(data=asdict(found), shown=shown)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(overlap)

if __name__ == "__main__":
    app()
