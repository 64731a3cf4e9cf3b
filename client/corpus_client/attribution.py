"""Where the time goes: what the fetcher is doing, and what it was doing while the training loop waited.

The fetcher thread is always in one phase; its stopwatch adds up how long each took. A training loop that
waits reads the stopwatch before and after: the difference is, phase by phase, what it waited for. Nothing
is sampled or guessed, but for the share of the server in the time to an answer's first byte, which is the
server's own word (`Server-Timing`), at most that time.

    fetcher's phase    what it does                            the wait's cause
    send               connects, sends a request               network
    answer             waits for an answer's first byte        server (as it says), else network
    receive            receives the body                       network
    host               checksum, gather from a local copy      host
    retry              waits before asking again               retry
    idle               has no free slot                        transfer: every slot is being copied
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from corpus_client.trace import Tracer

Phase = Literal["send", "answer", "receive", "host", "retry", "idle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchSeconds:
    """How long the fetcher was in each phase; `server` is the part of `answer` that the server claims."""

    send: float = 0.0
    answer: float = 0.0
    server: float = 0.0
    receive: float = 0.0
    host: float = 0.0
    retry: float = 0.0
    idle: float = 0.0

    def __sub__(self, earlier: FetchSeconds) -> FetchSeconds:
        return FetchSeconds(**_differences(self, earlier))


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitSeconds:
    """How long the training loop waited for what.

    Args:
        network: connecting, latency, receiving.
        server: as it says in `Server-Timing`.
        host: this process's CPU: checksum, gather, the copy of a batch on the CPU.
        transfer: slots or the device's driver: queueing copies, and waiting for one to free a slot.
        retry: waiting to ask again after a failure.
    """

    network: float = 0.0
    server: float = 0.0
    host: float = 0.0
    transfer: float = 0.0
    retry: float = 0.0

    @classmethod
    def during(cls, fetched: FetchSeconds) -> WaitSeconds:
        """What a wait was for, in which the fetcher did this."""
        server = min(fetched.server, fetched.answer)
        return cls(
            network=fetched.send + fetched.answer - server + fetched.receive,
            server=server,
            host=fetched.host,
            transfer=fetched.idle,
            retry=fetched.retry,
        )

    @property
    def cause(self) -> str:
        """The largest of them; "" if there was no wait."""
        name = max((each.name for each in fields(self)), key=lambda name: float(getattr(self, name)))
        return name if getattr(self, name) > 0 else ""

    def __add__(self, other: WaitSeconds) -> WaitSeconds:
        return WaitSeconds(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )

    def __sub__(self, earlier: WaitSeconds) -> WaitSeconds:
        return WaitSeconds(**_differences(self, earlier))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """What a loader has done since it was made; `since` makes it what was done since an earlier look.

    Args:
        tokens: inputs yielded: batches x rows x seq_len.
        seconds: from when the first batch was asked for to when the last one was yielded.
        wait_seconds: of these, the time in which the training loop stood still for data.
        wait: the same time by cause.
        fetch: what the fetcher thread did, which mostly runs beside the training loop.
        transfer_seconds: what the copies to the device took there; measured with `trace_steps` only.
        stall_seconds: how long the device's consuming stream stood still for a copy; measured with
            `trace_steps` only, and beside `wait_seconds`, since the CPU runs ahead of the device.
        received_bytes: of right answers.
        retries: requests that were repeated.
        ready_slots, num_slots: slots that are filled and wait, at this moment, and all of them.
        ring_bytes: memory of all slots.
        pinned_bytes: of these, page-locked.
    """

    batches: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    wait: WaitSeconds = field(default_factory=WaitSeconds)
    fetch: FetchSeconds = field(default_factory=FetchSeconds)
    transfer_seconds: float = 0.0
    stall_seconds: float = 0.0
    received_bytes: int = 0
    retries: int = 0
    ready_slots: int = 0
    num_slots: int = 0
    ring_bytes: int = 0
    pinned_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Inputs yielded per second; 0 before the first batch."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time in which the training loop stood still for data."""
        return min(1.0, self.wait_seconds / self.seconds) if self.seconds else 0.0

    @property
    def fill(self) -> float:
        """Share of the slots that are ready: near 1 where the loader keeps up, near 0 where it does not."""
        return self.ready_slots / self.num_slots if self.num_slots else 0.0

    def since(self, earlier: LoaderStats) -> LoaderStats:
        """The counters less those of an earlier look; slots and bytes of the ring are those of now."""
        return replace(
            self,
            **{name: getattr(self, name) - getattr(earlier, name) for name in _COUNTERS},
        )


_COUNTERS = (
    *("batches", "tokens", "seconds", "wait_seconds", "wait", "fetch"),
    *("transfer_seconds", "stall_seconds", "received_bytes", "retries"),
)


class Stopwatch:
    """Which phase the fetcher is in, and how long it was in each; `reading` comes from any thread."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer if tracer is not None and tracer.active else None
        self._lock = threading.Lock()
        self._phase: Phase = "idle"
        self._since = time.perf_counter()
        self._seconds: dict[str, float] = {each.name: 0.0 for each in fields(FetchSeconds)}

    def enter(self, phase: Phase, *, server_seconds: float = 0.0) -> None:
        """End the present phase. server_seconds: of it, what the server says it took."""
        now = time.perf_counter()
        with self._lock:
            ended, since = self._phase, self._since
            self._seconds[ended] += now - since
            self._seconds["server"] += min(server_seconds, now - since)
            self._phase, self._since = phase, now
        if self._tracer is not None:
            self._tracer.phase(ended, since, now, phase)

    def reading(self) -> FetchSeconds:
        """Seconds in each phase, the present one included."""
        now = time.perf_counter()
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._phase] += now - self._since
        return FetchSeconds(**seconds)


class Meter:
    """What a loader measures about itself; the training loop's side belongs to its thread."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.tracer = tracer if tracer is not None else Tracer()
        self.fetcher = Stopwatch(self.tracer)
        self.wait_seconds = 0.0
        self._for_slots = WaitSeconds()
        self._upload_seconds = 0.0
        self._first_asked: float | None = None
        self._asked = self._yielded = 0.0

    def prepared(self, started: float) -> None:
        """The training loop asked when it `started`, and had to wait until fetching could begin."""
        now = time.perf_counter()
        self.wait_seconds += now - started
        if self._first_asked is None:
            self._first_asked = started
        self._yielded = now

    def ask(self) -> None:
        """The training loop asks for a batch."""
        self._asked = time.perf_counter()
        if self._first_asked is None:
            self._first_asked = self._yielded = self._asked
        self.tracer.ask(self._yielded, self._asked)

    def get(self, step: int | None) -> None:
        """It has it, or (None) the error or the end that came instead."""
        self._yielded = time.perf_counter()
        self.wait_seconds += self._yielded - self._asked
        self.tracer.get(self._asked, self._yielded, step)

    def waited(self, before: FetchSeconds) -> None:
        """No slot was ready since the fetcher's stopwatch read `before`."""
        self._for_slots += WaitSeconds.during(self.fetcher.reading() - before)

    def uploaded(self, seconds: float) -> None:
        """So long did the training loop's thread take to put batches on their way."""
        self._upload_seconds += seconds

    def stats(self, *, copies_on_host: bool) -> LoaderStats:
        """The times; copies_on_host: whether putting a batch on its way is a copy by this CPU."""
        wait = self._for_slots
        if not copies_on_host:
            wait += WaitSeconds(transfer=self._upload_seconds)
        others = wait.network + wait.server + wait.transfer + wait.retry
        # What remains is this thread's own work: copies, and handing over.
        wait = replace(wait, host=max(0.0, self.wait_seconds - others))
        return LoaderStats(
            seconds=0.0 if self._first_asked is None else self._yielded - self._first_asked,
            wait_seconds=self.wait_seconds,
            wait=wait,
            fetch=self.fetcher.reading(),
        )


def _differences(later: object, earlier: object) -> dict[str, float]:
    names = [each.name for each in fields(later)]  # type: ignore[arg-type]
    return {name: getattr(later, name) - getattr(earlier, name) for name in names}
