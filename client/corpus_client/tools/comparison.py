"""Training steps fed in every way in turn, and what each way costs beside a batch that is there."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from corpus_client.tools.feeds import Feed, opened
from corpus_client.tools.loads import TrainStep
from corpus_client.tools.recording import Recorder
from corpus_client.tools.timeline import GPU, LOOP, RUN_AHEAD, WAYS, Span
from corpus_client.tools.timing import Meter, open_meter

WARM_UP_STEPS = 8
DRAWN_STEPS = 6

TITLES = {
    **{way.name: f"({way.letter}) {way.title}" for way in WAYS},
    "full-slots": "(e') CorpusLoader's device half, slots full from the start",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Steps fed in one way.

    Args:
        name: of the way.
        median_seconds, p95_seconds, mean_seconds: of a step, over all rounds.
        stall: how much longer a step takes than with a batch that is there: mean against mean, round by
            round; the median of the rounds.
        stall_low, stall_high: of the rounds.
        num_steps: measured.
        spans: a time line of some further steps, seconds.
    """

    name: str
    median_seconds: float
    p95_seconds: float
    mean_seconds: float
    stall: float
    stall_low: float
    stall_high: float
    num_steps: int
    spans: list[Span]

    @property
    def title(self) -> str:
        """For people."""
        return TITLES[self.name]

    def as_json(self) -> dict[str, Any]:
        """One object."""
        return {**dataclasses.asdict(self), "title": self.title}


def compare(
    names: Sequence[str],
    make_feed: Callable[[Recorder], Feed],
    step: TrainStep,
    meter: Meter,
    *,
    num_steps: int,
    rounds: int,
) -> list[Outcome]:
    """Feed `num_steps` steps in each way, `rounds` times in turn; a drift of the machine touches all alike.

    names: of `feeds.FEEDS`, with `constant`.
    """
    seconds: dict[str, list[list[float]]] = {name: [] for name in names}
    silent = Recorder(meter.device, active=False)
    for _ in range(rounds):
        for name in names:
            seconds[name].append(steps_of(name, make_feed(silent), step, meter, WARM_UP_STEPS + num_steps))
    still = [statistics.fmean(each) for each in seconds["constant"]]
    return [_outcome(name, seconds[name], still, drawn(name, make_feed, step, meter)) for name in names]


def steps_of(name: str, feed: Feed, step: TrainStep, meter: Meter, num_steps: int) -> list[float]:
    """Seconds from the end of each step to the end of the next, without the warm-up.

    On a GPU by events, so that nothing waits but what would wait anyway; the loop is at most `RUN_AHEAD`
    steps ahead, as it is in a run that looks at its loss now and then.
    """
    clock = _Clock(meter)
    with opened(name, feed) as batches:
        for number in range(num_steps):
            _one_step(feed.record, number, next(batches), step, meter.device)
            clock.tick()
        seconds = clock.seconds()
    return seconds[WARM_UP_STEPS - 1 :] if len(seconds) >= WARM_UP_STEPS else seconds


def drawn(name: str, make_feed: Callable[[Recorder], Feed], step: TrainStep, meter: Meter) -> list[Span]:
    """What happens in the last `DRAWN_STEPS` of some steps, from 0 seconds on.

    What belongs to a step before them, or to none, has step -1.
    """
    recorder = Recorder(meter.device, active=True)
    steps_of(name, make_feed(recorder), step, meter, WARM_UP_STEPS + DRAWN_STEPS)
    spans = recorder.spans()
    zero = min(span.start for span in spans if span.step >= WARM_UP_STEPS)
    return [
        dataclasses.replace(
            span,
            step=max(-1, span.step - WARM_UP_STEPS),
            start=max(0.0, span.start - zero),
            stop=span.stop - zero,
        )
        for span in spans
        if span.stop > zero
    ]


def _one_step(
    record: Recorder, number: int, batch: torch.Tensor, step: TrainStep, device: torch.device
) -> None:
    with record.device(GPU if device.type == "cuda" else LOOP, "compute", number):
        step(batch)


class _Clock:
    """The ends of steps."""

    def __init__(self, meter: Meter) -> None:
        self._cuda = meter.device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._ahead: deque[torch.cuda.Event] = deque()

    def tick(self) -> None:
        """A step was queued, on the CPU done."""
        if not self._cuda:
            self._times.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)
        self._ahead.append(event)
        if len(self._ahead) > RUN_AHEAD:
            self._ahead.popleft().synchronize()

    def seconds(self) -> list[float]:
        """Between each two ends; waits for the last."""
        if not self._cuda:
            return [after - before for before, after in pairwise(self._times)]
        self._events[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._events)]


def _outcome(name: str, rounds: list[list[float]], still: list[float], spans: list[Span]) -> Outcome:
    every = [seconds for each in rounds for seconds in each]
    median, p95 = np.percentile(every, [50, 95])
    stalls = [statistics.fmean(each) / beside - 1 for each, beside in zip(rounds, still, strict=True)]
    return Outcome(
        name=name,
        median_seconds=float(median),
        p95_seconds=float(p95),
        mean_seconds=statistics.fmean(every),
        stall=statistics.median(stalls),
        stall_low=min(stalls),
        stall_high=max(stalls),
        num_steps=len(every),
        spans=spans,
    )


@contextmanager
def spare_cores(device: torch.device) -> Iterator[None]:
    """On the CPU the step computes with half of the cores: the loader and the workers need some too."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(max(1, before // 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_step(feed: Feed, seconds: float) -> tuple[TrainStep, Meter]:
    """The step and the clock for this feed's batches."""
    meter = open_meter(feed.device)
    sample = feed.tokens.batch(0).to(feed.device).to(torch.int64)
    return TrainStep(meter, sample, seconds), meter
