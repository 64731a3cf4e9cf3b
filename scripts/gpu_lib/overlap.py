"""How long a training step waits for its batch, by each way of feeding it.

    python -m scripts.gpu_lib.overlap http://data:8000 --corpus fineweb --step-ms 5 --batch 8MB

A way is a generator: inputs and targets as int64 on the device, step after step. All take the same windows of
the same tokens, as they are stored, and widen them on the device, so that what differs is the way. A step
reads every token and multiplies matrices for the rest of its time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import count, pairwise
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from corpus_client import errors
from corpus_client.loader import CorpusLoader
from corpus_client.staging.ring import find_device
from corpus_client.tools import report
from corpus_client.tools.copies import Kind, host_memory
from corpus_client.tools.machine import describe, measurable_bytes, one_line
from corpus_client.tools.timing import Clock, Spread, parse_size, seconds_name, size_name
from scripts.gpu_lib.full_slots import Pair, full_slots

POOL_TOKENS = 1 << 24  # random tokens that all ways but the loader sample from
BUFFERS = 16  # times a batch is what the greediest way takes: widened, ahead, and its slots
WARM_UP_STEPS = 8
RUN_AHEAD = 2  # steps that the loop queues before it waits, as a run that looks at its loss now and then
WIDTHS = {"cuda": (4096, 2048, 1024, 512), "cpu": (256, 128, 64)}
FINENESS = 8  # products of which a step is made at least, where the narrowest ones are short enough

NO_SERVER = (
    "(e) CorpusLoader: no server was named. Start one with 'corpus-server serve NAME=PATH' and give "
    "its URL, http://127.0.0.1:8000, and --corpus NAME"
)
ON_THE_CPU = (
    "(b) and (c): on the CPU nothing is page-locked and nothing is transferred, so they are (a). "
    "A copy is the widening to int64; step, workers and loader share the cores, the step takes half"
)

Batches = Generator[Pair, None, None]


class Feed(Dataset[torch.Tensor]):
    """What a way needs. Item n is the batch of step n: random windows, in fresh pageable memory.

    Args:
        tokens: `(num_tokens,) uint16`, which windows are taken from, by all ways but the loader.
        rows, window: of a batch, `(rows, window) uint16`; window is seq_len + 1.
        open_loader: makes a loader of a running server; None: there is no server.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.uint16],
        *,
        rows: int,
        window: int,
        device: torch.device,
        workers: int = 2,
        open_loader: Callable[[], CorpusLoader] | None = None,
    ) -> None:
        self.tokens = tokens
        self.rows, self.window = rows, window
        self.device, self.workers, self.open_loader = device, workers, open_loader

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, step: int) -> torch.Tensor:
        windows = np.lib.stride_tricks.sliding_window_view(self.tokens, self.window)
        starts = np.random.default_rng(step).integers(0, len(windows), self.rows)
        return torch.from_numpy(windows[starts])

    def send(self, stored: torch.Tensor, *, non_blocking: bool) -> Pair:
        """Return a batch on its way to the device, or there, and widened on it."""
        tokens = stored.to(self.device, non_blocking=non_blocking).to(torch.int64)
        return tokens[:, :-1], tokens[:, 1:]


def pageable(feed: Feed) -> Batches:
    """Call `batch.to(device)`."""
    for step in count():
        yield feed.send(feed[step], non_blocking=False)


def through_locked(feed: Feed, *, kind: Kind, non_blocking: bool) -> Batches:
    """Copy into page-locked memory that was allocated once, then call `batch.to(device)`.

    Two buffers take turns; one is written to again when the transfer out of it is done.
    """
    like = feed[0]
    buffers = [host_memory(kind, like.nbytes, feed.device).view(like.dtype).view(like.shape) for _ in "ab"]
    clock, events = Clock(feed.device), [None, None]
    for step in count():
        stored, buffer, event = feed[step], buffers[step % 2], events[step % 2]
        if event is not None:
            event.synchronize()
        np.copyto(buffer.numpy(), stored.numpy())
        batch = feed.send(buffer, non_blocking=non_blocking)
        events[step % 2] = clock.event()
        yield batch


def dataloader(feed: Feed) -> Batches:
    """Use torch's DataLoader: processes make whole batches, a thread copies them into page-locked memory."""
    loader: DataLoader[torch.Tensor] = DataLoader(
        feed, batch_size=None, num_workers=feed.workers, pin_memory=feed.device.type != "cpu"
    )
    for stored in loader:
        yield feed.send(stored, non_blocking=True)


def corpus_loader(feed: Feed) -> Batches:
    """Use CorpusLoader with a running server."""
    assert feed.open_loader is not None
    with feed.open_loader() as loader:
        for batch in loader:
            yield batch.inputs, batch.targets


def from_full_slots(feed: Feed) -> Batches:
    """Use the loader's device half over slots that hold their tokens already."""
    with full_slots(feed.device, feed[0], torch.int64) as take:
        while True:
            yield take()


def constant(feed: Feed) -> Batches:
    """Use one batch that is there before the first step."""
    batch = feed.send(feed[0], non_blocking=False)
    while True:
        yield batch


_pinned = partial(through_locked, kind="torch-pinned")
_registered = partial(through_locked, kind="registered")

WAYS: dict[str, tuple[str, Callable[[Feed], Batches]]] = {
    "pageable": ("(a) pageable memory, blocking copy", pageable),
    "pinned": ("(b) torch-pinned memory, blocking copy", partial(_pinned, non_blocking=False)),
    "pinned-async": (
        "(c) torch-pinned memory, non_blocking=True, nothing ahead", partial(_pinned, non_blocking=True)
    ),
    "registered-async": (
        "(c') the same from registered memory, the loader's own", partial(_registered, non_blocking=True)
    ),
    "dataloader": ("(d) torch DataLoader, workers and pin_memory", dataloader),
    "corpus-loader": ("(e) CorpusLoader from a server", corpus_loader),
    "full-slots": ("(e') CorpusLoader's device half, slots already full", from_full_slots),
    "constant": ("(f) one batch that is there already", constant),
}  # fmt: skip
"""In the order of the tables, with the letters of docs/gpu.md; the last is compared with."""

LOCKED = ("pinned", "pinned-async", "registered-async")
"""On the CPU, where nothing is page-locked, these are the first way."""


class TrainStep:
    """Read every token of a batch, then multiply matrices for the rest of a chosen time; wait for nothing.

    sample: inputs and targets as the step will see them, `(rows, seq_len) int64`, on the device.
    seconds: the length wanted; a step cannot be shorter than reading takes.
    """

    def __init__(self, clock: Clock, sample: Pair, seconds: float) -> None:
        device = clock.device
        dtype = torch.float16 if device.type == "cuda" else torch.float32
        self.token_sum = torch.zeros((), dtype=torch.int64, device=device)
        self.num_products = self.width = 0
        left = seconds - clock.time(lambda: self(sample), repeats=9)[0].median
        for self.width in WIDTHS.get(device.type, WIDTHS["cpu"]) if left > 0 else ():
            self._matrices = [torch.randn(self.width, self.width, device=device).to(dtype) for _ in range(3)]
            each = clock.time(self._multiply, repeats=5, in_a_row=FINENESS)[0].median
            self.num_products = max(1, round(left / each))
            if self.num_products >= FINENESS:
                break
        self.token_sum.zero_()

    def _multiply(self) -> None:
        left, right, out = self._matrices
        torch.mm(left, right, out=out)  # one kernel; queueing it waits for nothing

    def __call__(self, batch: Pair) -> None:
        """Queue a step."""
        for tokens in batch:
            self.token_sum += tokens.sum()
        for _ in range(self.num_products):
            self._multiply()


class StepEnds:
    """The end of each step: on a GPU by events, so that nothing waits but what would wait anyway.

    ahead: steps that the loop queues before `note` waits.
    """

    def __init__(self, clock: Clock, ahead: int = RUN_AHEAD) -> None:
        self._clock, self._ahead = clock, ahead
        self._times: list[float] = []
        self._events: list[Any] = []

    def __len__(self) -> int:
        return len(self._times)

    def note(self) -> None:
        """Note that a step was queued; wait for the one that was queued `ahead` steps before."""
        self._times.append(time.perf_counter())
        if (event := self._clock.event()) is not None:
            self._events.append(event)
            if len(self._events) > self._ahead:
                self._events[-1 - self._ahead].synchronize()

    def seconds(self) -> list[float]:
        """Return seconds from the end of each step to the end of the next."""
        self._clock.synchronize()
        ends = self._times
        if self._events:
            ends = [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
        return [after - before for before, after in pairwise(ends)]


def steps_of(name: str, feed: Feed, step: TrainStep, clock: Clock, num_steps: int) -> list[float]:
    """Return seconds from the end of each step to the end of the next, after a warm-up."""
    ends = StepEnds(clock)
    with closing(WAYS[name][1](feed)) as batches:
        for _ in range(WARM_UP_STEPS + num_steps):
            step(next(batches))
            ends.note()
        return ends.seconds()[WARM_UP_STEPS - 1 :]


def measure(feed: Feed, step_seconds: float, num_steps: int, rounds: int) -> dict[str, Any]:
    """Measure every way that this machine and these arguments allow.

    Returns: machine; batch_bytes, rows, seq_len; asked_seconds, the step's length that was asked for, and its
    num_products; outcomes, a way each: name, title, seconds of a step, stall (how much longer a step takes
    than with a batch that is there, mean against mean, for each round); missing, what was left out and why.
    """
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
    means = [{name: statistics.fmean(its[name]) for name in names} for its in every]
    outcomes = [
        {
            "name": name,
            "title": WAYS[name][0],
            "seconds": asdict(Spread.of([seconds for its in every for seconds in its[name]])),
            "stall": asdict(Spread.of([mean[name] / mean["constant"] - 1 for mean in means])),
        }
        for name in names
    ]
    shape = {"batch_bytes": batch_bytes, "rows": feed.rows, "seq_len": feed.window - 1}
    asked = {"asked_seconds": step_seconds, "num_products": step.num_products}
    return {"machine": describe(feed.device), **shape, **asked, "outcomes": outcomes, "missing": missing}


def report_of(found: dict[str, Any]) -> report.Report:
    """Return what a step is, and a row for each way."""
    table = Table("", "step, median", "p90", "stall", "10 to 90 % of the rounds", title="a training step")
    for each in found["outcomes"]:
        median, p90 = (seconds_name(each["seconds"][name]) for name in ("median", "p90"))
        stall = each["stall"]
        spread = f"{stall['p10']:+.1%} to {stall['p90']:+.1%}"
        table.add_row(each["title"], median, p90, f"{stall['median']:+.1%}", spread)
    step = (
        f"{found['rows']:,} x {found['seq_len'] + 1:,} tokens, {size_name(found['batch_bytes'])} a step; "
        f"{seconds_name(found['asked_seconds'])} asked for, "
        f"{seconds_name(found['outcomes'][-1]['seconds']['median'])} is what a step takes with "
        f"{found['num_products']} matrix products"
    )
    left_out = [f"[yellow]left out:[/yellow] {sentence}" for sentence in found["missing"]]
    stall_is = "stall: by how much the mean step is longer than that of (f)"
    return report.Report(data=found, shown=[one_line(found["machine"]), step, table, stall_is, *left_out])


def overlap(
    url: Annotated[str | None, typer.Argument(help="http://host:port of a server, for (e)")] = None,
    corpus: Annotated[str | None, typer.Option(help="its corpus")] = None,
    step_ms: Annotated[float, typer.Option(help="length of a training step", min=0.01, max=60_000)] = 5.0,
    batch: Annotated[str, typer.Option(help="tokens of a step as stored, in bytes")] = "8MB",
    seq_len: Annotated[int, typer.Option(help="inputs per row", min=1, max=65536)] = 1024,
    steps: Annotated[int, typer.Option(help="of each way in each round", min=2)] = 60,
    rounds: Annotated[int, typer.Option(help="over all ways", min=1)] = 3,
    workers: Annotated[int, typer.Option(help="processes of torch's DataLoader", min=1, max=256)] = 2,
    device: report.Device = None,
    as_json: report.AsJson = False,
) -> None:
    """Feed training steps of a chosen length in every way; print how long each one waits for data."""

    def measured() -> report.Report:
        if (url is None) != (corpus is None):
            raise errors.InvalidArgument(f"a URL and --corpus go together, got {url!r} and {corpus!r}")
        place = find_device(device)
        rows = max(1, parse_size(batch) // (2 * (seq_len + 1)))
        plan: dict[str, Any] = {"corpus": corpus, "seq_len": seq_len, "global_batch_size": rows}
        network = report.read_network("bench", None, None)
        feed = Feed(
            np.random.default_rng(0).integers(0, 50_257, POOL_TOKENS, np.uint16),
            rows=rows,
            window=seq_len + 1,
            device=place,
            workers=workers,
            open_loader=partial(report.open_loader, url, device=place, network=network, **plan)
            if url
            else None,
        )
        return report_of(measure(feed, step_ms / 1e3, steps, rounds))

    report.run(measured, as_json=as_json)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(overlap)

if __name__ == "__main__":
    app()
