"""What a step costs by each way of feeding a GPU, worked out from durations that are stated.

A machine is drawn as lanes; each does one thing at a time, in order. A task begins when its lane is free
and what it waits for is done:

    training loop   the Python thread: it queues work for the GPU and goes on, unless a call holds it
    worker k        a process of torch's DataLoader
    pinning         DataLoader's thread that copies into page-locked memory
    fetcher         the loader's thread that receives into page-locked slots
    bus             the copy engine
    GPU             the training step

Nothing here is measured, and nothing depends on a machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from corpus_client import errors

Kind = Literal["fetch", "copy", "transfer", "compute", "wait"]

LOOP, WORKER, PINNING, FETCHER, BUS, GPU = "training loop", "worker", "pinning", "fetcher", "bus", "GPU"

RUN_AHEAD = 2
"""Steps that the training loop queues before it waits for the GPU, and batches that our loader puts on
their way before they are asked for; the measured runs do the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One thing done on a lane for a step, in seconds from the beginning."""

    lane: str
    kind: Kind
    step: int
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """Stated seconds of a step's parts.

    Args:
        fetch: until a batch's tokens lie in host memory.
        copy: from pageable into page-locked memory.
        transfer: over the bus, from page-locked memory.
        compute: the training step on the GPU.
        workers: processes of torch's DataLoader.
        prefetch: batches each of them makes ahead.
        slots: page-locked slots of our loader.
        item: the loop reads the loss after each step, `loss.item()`, and so waits for the GPU.
    """

    fetch: float = 0.004
    copy: float = 0.002
    transfer: float = 0.001
    compute: float = 0.005
    workers: int = 2
    prefetch: int = 2
    slots: int = 8
    item: bool = False

    def __post_init__(self) -> None:
        for name in ("fetch", "copy", "transfer"):
            if not 0 <= getattr(self, name) < 1e6:
                raise errors.InvalidArgument(f"{name} must be in [0, 1e6) seconds, got {getattr(self, name)}")
        if not 0 < self.compute < 1e6:
            raise errors.InvalidArgument(f"compute must be in (0, 1e6) seconds, got {self.compute}")
        for name, least in (("workers", 1), ("prefetch", 1), ("slots", 2)):
            if not least <= getattr(self, name) <= 1024:
                raise errors.InvalidArgument(f"{name} must be in [{least}, 1024], got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way of feeding the GPU.

    Args:
        letter: `a` to `f`, for tables and plots.
        name: in JSON and file names.
        title: for people.
        rule: how long a step takes once the run is under way, in words.
        period: the same in seconds.
        run: does the steps on a machine.
    """

    letter: str
    name: str
    title: str
    rule: str
    period: Callable[[Durations], float]
    run: Callable[[_Machine, Durations, int], None]


def schedule(way: Way, durations: Durations, num_steps: int) -> list[Span]:
    """Every task of the first `num_steps` steps, in the order in which they were put on their lanes."""
    machine = _Machine()
    way.run(machine, durations, num_steps)
    return machine.spans


def step_seconds(spans: list[Span]) -> list[float]:
    """From the end of each step's compute to the end of the next one's."""
    ends = [span.stop for span in spans if span.kind == "compute"]
    return [after - before for before, after in pairwise(ends)]


def stall(period: float, durations: Durations) -> float:
    """How much longer a step takes than its compute: 0.25 is a quarter."""
    return period / durations.compute - 1


@dataclass
class _Machine:
    """Lanes, and the moment at which each is free again."""

    spans: list[Span] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)

    def do(self, lane: str, kind: Kind, step: int, seconds: float, *after: float) -> float:
        """Put a task on a lane behind what it waits for; return when it is done."""
        start = max(self.free.get(lane, 0.0), *after, 0.0)
        self.free[lane] = start + seconds
        self.spans.append(Span(lane=lane, kind=kind, step=step, start=start, stop=start + seconds))
        return start + seconds

    def hold(self, lane: str, step: int, until: float) -> float:
        """Let a lane stand still until a moment; return when it goes on."""
        free = self.free.get(lane, 0.0)
        return self.do(lane, "wait", step, until - free) if until > free else free


class _Done(list[float]):
    """When each step's task was done; before the first step, at the beginning."""

    def at(self, step: int) -> float:
        return self[step] if step >= 0 else 0.0


def _loop(machine: _Machine, each: Durations, num_steps: int, *, pinned: bool, blocking: bool) -> None:
    """The training loop does everything itself; a transfer has its turn behind the step before it."""
    transfers, steps = _Done(), _Done()
    for step in range(num_steps):
        fetched = machine.do(LOOP, "fetch", step, each.fetch)
        if pinned:
            machine.hold(LOOP, step, transfers.at(step - 2))  # two buffers take turns
        else:
            # The driver waits for the stream, then copies into page-locked memory of its own.
            machine.hold(LOOP, step, steps.at(step - 1))
        copied = machine.do(LOOP, "copy", step, each.copy, fetched)
        transfers.append(machine.do(BUS, "transfer", step, each.transfer, copied, steps.at(step - 1)))
        if blocking:
            machine.hold(LOOP, step, transfers[step])
        steps.append(machine.do(GPU, "compute", step, each.compute, transfers[step]))
        if each.item:
            machine.hold(LOOP, step, steps[step])


def _pageable(machine: _Machine, each: Durations, num_steps: int) -> None:
    _loop(machine, each, num_steps, pinned=False, blocking=True)


def _pinned(machine: _Machine, each: Durations, num_steps: int) -> None:
    _loop(machine, each, num_steps, pinned=True, blocking=True)


def _pinned_async(machine: _Machine, each: Durations, num_steps: int) -> None:
    _loop(machine, each, num_steps, pinned=True, blocking=False)


def _dataloader(machine: _Machine, each: Durations, num_steps: int) -> None:
    """Workers fetch, a thread copies, both ahead; a transfer has its turn behind the step before it."""
    taken, steps = _Done(), _Done()
    for step in range(num_steps):
        asked = taken.at(step - each.workers * each.prefetch)  # taking a batch asks for another one
        fetched = machine.do(f"{WORKER} {step % each.workers}", "fetch", step, each.fetch, asked)
        copied = machine.do(PINNING, "copy", step, each.copy, fetched)
        machine.hold(LOOP, step, steps.at(step - (1 if each.item else 1 + RUN_AHEAD)))
        taken.append(machine.hold(LOOP, step, copied))
        transferred = machine.do(BUS, "transfer", step, each.transfer, taken[step], steps.at(step - 1))
        steps.append(machine.do(GPU, "compute", step, each.compute, transferred))


def _corpus_loader(machine: _Machine, each: Durations, num_steps: int) -> None:
    """A thread receives into page-locked slots; transfers have a stream of their own."""
    transfers, steps = _Done(), _Done()
    for step in range(num_steps):
        received = machine.do(FETCHER, "fetch", step, each.fetch, transfers.at(step - each.slots))
        ahead = steps.at(step - 1 - RUN_AHEAD)
        transfers.append(machine.do(BUS, "transfer", step, each.transfer, received, ahead))
        machine.hold(LOOP, step, steps.at(step - (1 if each.item else 1 + RUN_AHEAD)))
        steps.append(machine.do(GPU, "compute", step, each.compute, transfers[step]))


def _constant(machine: _Machine, each: Durations, num_steps: int) -> None:
    for step in range(num_steps):
        machine.do(GPU, "compute", step, each.compute)


def _in_turn(each: Durations) -> float:
    return each.fetch + each.copy + each.transfer + each.compute


WAYS = (
    Way(
        letter="a",
        name="pageable",
        title="pageable memory, blocking copy",
        rule="max(fetch, compute) + copy + transfer",
        period=lambda d: _in_turn(d) if d.item else max(d.fetch, d.compute) + d.copy + d.transfer,
        run=_pageable,
    ),
    Way(
        letter="b",
        name="pinned",
        title="page-locked memory, blocking copy",
        rule="max(fetch + copy, compute) + transfer",
        period=lambda d: _in_turn(d) if d.item else max(d.fetch + d.copy, d.compute) + d.transfer,
        run=_pinned,
    ),
    Way(
        letter="c",
        name="pinned-async",
        title="page-locked memory, non_blocking=True, nothing ahead",
        rule="max(fetch + copy, transfer + compute)",
        period=lambda d: _in_turn(d) if d.item else max(d.fetch + d.copy, d.transfer + d.compute),
        run=_pinned_async,
    ),
    Way(
        letter="d",
        name="dataloader",
        title="torch DataLoader, workers and pin_memory",
        rule="max(fetch / workers, copy, transfer + compute)",
        period=lambda d: max(
            d.fetch / d.workers,
            (d.fetch + d.copy) / (d.workers * d.prefetch),
            d.copy,
            d.transfer + d.compute,
        ),
        run=_dataloader,
    ),
    Way(
        letter="e",
        name="corpus-loader",
        title="CorpusLoader: page-locked slots, a copy stream of its own",
        rule="max(fetch, transfer, compute)",
        period=lambda d: max(d.fetch, d.transfer, d.compute),
        run=_corpus_loader,
    ),
    Way(
        letter="f",
        name="constant",
        title="one batch that is there already",
        rule="compute",
        period=lambda d: d.compute,
        run=_constant,
    ),
)
"""With `item`, (a) to (c) do everything in turn; the others stay as they are."""
