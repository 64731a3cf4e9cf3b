"""Where the time goes: what the fetcher is doing, and what it was doing while the training loop waited.

The fetcher thread is always in one phase; the recorder adds up how long each took. A training loop that
waits reads it before and after: the difference is, phase by phase, what it waited for. Nothing is sampled
or guessed, but for the share of the server in the time to a response's first byte, which is the server's own
word (`Server-Timing`), at most that time; so is the share of the bucket.

    fetcher's phase    what it does                            the wait's cause
    send               connects, sends a request               network
    response           waits for a response's first byte        server, bucket (as it says), else network
    receive            receives the body                       network
    host               checksum, gather from a local copy      host
    retry              waits before asking again               retry
    bucket             the same, for an object store to deliver bucket
    idle               has no free slot                        transfer: every slot is being copied
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self

Phase = Literal["send", "response", "receive", "host", "retry", "bucket", "idle"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Seconds:
    """Durations by name, which are added and subtracted name by name."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: seconds + getattr(other, name) for name, seconds in asdict(self).items()})

    def __sub__(self, other: Self) -> Self:
        return type(self)(**{name: seconds - getattr(other, name) for name, seconds in asdict(self).items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchSeconds(_Seconds):
    """How long the fetcher was in each phase.

    Of `response`, the server claims `server`, and `staging` for waiting until its object store delivered.
    """

    send: float = 0.0
    response: float = 0.0
    server: float = 0.0
    staging: float = 0.0
    receive: float = 0.0
    host: float = 0.0
    retry: float = 0.0
    bucket: float = 0.0
    idle: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitSeconds(_Seconds):
    """How long the training loop waited for what."""

    network: float = 0.0  # connecting, latency, receiving
    server: float = 0.0  # as it says in `Server-Timing`
    host: float = 0.0  # this process's CPU: checksum, gather, the copy of a batch on the CPU
    transfer: float = 0.0  # slots or the device's driver: queueing copies, waiting for one to free a slot
    retry: float = 0.0  # waiting to ask again after a failure
    bucket: float = 0.0  # for the server's object store: tokens that are not on its machine yet

    @classmethod
    def during(cls, fetched: FetchSeconds) -> WaitSeconds:
        """Return what a wait was for, given what the fetcher did in it."""
        staging = min(fetched.staging, fetched.response)
        server = min(fetched.server, fetched.response - staging)
        return cls(
            network=fetched.send + fetched.response - server - staging + fetched.receive,
            server=server,
            host=fetched.host,
            transfer=fetched.idle,
            retry=fetched.retry,
            bucket=fetched.bucket + staging,
        )

    @property
    def cause(self) -> str:
        """The largest of them; "" if there was no wait."""
        cause, seconds = max(asdict(self).items(), key=lambda each: float(each[1]))
        return cause if seconds > 0 else ""


def _flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}/", value)
        else:
            yield f"{prefix}{name}", value


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceLoss:
    """The loss of one source's rows on this rank, of those that are finite.

    mean: of the last 1,024 recorded rows; count: rows recorded since the loader was made.
    """

    mean: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStats:
    """What a loader has done since it was made; `since` makes it what was done since an earlier look."""

    num_batches: int = 0
    num_tokens: int = 0  # inputs yielded: batches x rows x seq_len
    seconds: float = 0.0  # from when the first batch was asked for to when the last one was yielded
    wait_seconds: float = 0.0  # of these, the time in which the training loop stood still for data
    wait: WaitSeconds = field(default_factory=WaitSeconds)  # the same time by cause
    fetch: FetchSeconds = field(default_factory=FetchSeconds)  # of its thread, mostly beside the loop
    transfer_seconds: float = 0.0  # of the copies on the device; measured with `trace_steps` only
    # How long the device's consuming stream stood still for a copy; measured with `trace_steps` only, and
    # beside `wait_seconds`, since the CPU runs ahead of the device.
    stall_seconds: float = 0.0
    received_bytes: int = 0  # of right responses
    num_retries: int = 0  # requests that were repeated
    num_hedged: int = 0  # requests that were sent a second time while the response was late
    num_recorded_rows: int = 0  # whose losses `CorpusLoader.record` took
    num_written_rows: int = 0  # of these, in files of `record_dir`
    num_lost_rows: int = 0  # of these, in no file and never to be: the disk or the device was behind
    ready_slots: int = 0  # that hold batches which were not taken yet, at this moment
    num_slots: int = 0
    slot_bytes: int = 0  # of all slots
    pinned_bytes: int = 0  # of these, page-locked
    device_bytes: int = 0  # of the staging buffers on the device
    losses: Mapping[str, SourceLoss] = field(default_factory=dict)  # by name of the source, if recorded

    @property
    def tokens_per_second(self) -> float:
        """Inputs yielded per second; 0 before the first batch."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time in which the training loop stood still for data."""
        return min(1.0, self.wait_seconds / self.seconds) if self.seconds else 0.0

    @property
    def fill(self) -> float:
        """Share of the slots that are ready: near 1 where the loader keeps up, near 0 where it does not."""
        return self.ready_slots / self.num_slots if self.num_slots else 0.0

    def as_dict(self, prefix: str = "data/") -> dict[str, float]:
        """Return all numbers under flat names, as W&B, TensorBoard and MLflow take them.

        `data/tokens_per_second`, `data/wait/network`, ...
        """
        rates = {name: getattr(self, name) for name in ("tokens_per_second", "wait_share", "fill")}
        return dict(_flat(prefix, rates | asdict(self)))

    def since(self, earlier: LoaderStats) -> LoaderStats:
        """Return the counters less those of an earlier look; slots and bytes of the ring are those of now."""
        names = [each.name for each in fields(self)]
        counters = names[: names.index("ready_slots")]  # the others say how things are now
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in counters})
