"""Every second of a wait has one cause: what the fetcher was doing in it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from corpus_client import CorpusLoader
from corpus_client.observe.attribution import FetchSeconds, LoaderStats, Phase, WaitSeconds
from corpus_client.observe.recorder import Recorder
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.slots import Slot, SlotSizes
from corpus_client.staging.stager import Stager
from tests.client.reference_server import Fault, ReferenceServer
from tests.client.staging.counting import BATCH_BYTES, CPU, STEPS, CountingSource, batches_of, new_slots

MakeLoader = Callable[..., CorpusLoader]
CAUSES = [field.name for field in dataclasses.fields(WaitSeconds)]


@pytest.mark.parametrize(
    ("fetched", "waited", "cause"),
    [
        (FetchSeconds(), WaitSeconds(), ""),
        (FetchSeconds(send=1, receive=2), WaitSeconds(network=3), "network"),
        (FetchSeconds(response=5), WaitSeconds(network=5), "network"),
        (FetchSeconds(response=5, server=4), WaitSeconds(network=1, server=4), "server"),
        # The server had begun before the wait did.
        (FetchSeconds(response=1, server=4, host=0.5), WaitSeconds(server=1, host=0.5), "server"),
        (FetchSeconds(host=2, receive=1), WaitSeconds(host=2, network=1), "host"),
        (FetchSeconds(idle=2), WaitSeconds(transfer=2), "transfer"),
        (FetchSeconds(retry=2, send=1), WaitSeconds(retry=2, network=1), "retry"),
        (FetchSeconds(response=5, server=1, staging=3), WaitSeconds(network=1, server=1, bucket=3), "bucket"),
        (FetchSeconds(response=1, staging=3, bucket=2), WaitSeconds(bucket=3), "bucket"),
    ],
)
def test_causes_of_a_wait(fetched: FetchSeconds, waited: WaitSeconds, cause: str) -> None:
    assert WaitSeconds.during(fetched) == waited
    assert waited.cause == cause


def test_since_is_the_difference_of_counters_beside_the_present_state() -> None:
    early = LoaderStats(num_batches=2, num_tokens=10, seconds=1.0, wait=WaitSeconds(server=1), ready_slots=7)
    late = LoaderStats(
        num_batches=5,
        num_tokens=40,
        seconds=4.0,
        wait_seconds=1.5,
        wait=WaitSeconds(server=1, host=1.5),
        fetch=FetchSeconds(send=2),
        ready_slots=3,
        num_slots=4,
    )
    since = late.since(early)
    assert (since.num_batches, since.tokens_per_second, since.wait_share, since.fill) == (3, 10.0, 0.5, 0.75)
    assert since.wait == WaitSeconds(host=1.5)
    assert since.fetch == FetchSeconds(send=2)
    assert (since.ready_slots, since.num_slots) == (3, 4)
    flat = since.as_dict()
    assert (flat["data/tokens_per_second"], flat["data/wait/host"], flat["data/fetch/send"]) == (10.0, 1.5, 2)
    assert all(isinstance(value, int | float) for value in flat.values())
    assert set(since.as_dict(prefix="")) == {name.removeprefix("data/") for name in flat}


class Watched(Recorder):
    """Tells when the training loop waits."""

    def __init__(self) -> None:
        super().__init__()
        self.loop_waits = threading.Event()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        with super().waiting():
            self.loop_waits.set()
            yield
            self.loop_waits.clear()


class SlowSource(CountingSource):
    """Spends its time in one phase, by a clock that stands still otherwise."""

    def __init__(self, recorder: Watched, phase: Phase, server_seconds: float) -> None:
        super().__init__()
        self._recorder = recorder
        self._phase = phase
        self._server_seconds = server_seconds
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def finish(self, ticket: range, view: memoryview) -> None:
        self._recorder.enter(self._phase)
        self._recorder.loop_waits.wait()
        self.now += 0.05
        self._recorder.enter("host", server_seconds=self._server_seconds)
        super().finish(ticket, view)


@pytest.fixture
def slots() -> tuple[Slot, ...]:
    size = SlotSizes(num_slots=3, steps_per_slot=4, batch_bytes=BATCH_BYTES)
    return new_slots(size)


@pytest.mark.parametrize(
    ("phase", "server_seconds", "cause"),
    [
        ("send", 0.0, "network"),
        ("response", 0.0, "network"),
        ("response", 0.04, "server"),
        ("receive", 0.0, "network"),
        ("host", 0.0, "host"),
        ("retry", 0.0, "retry"),
    ],
)
def test_training_loop_waits_for_what_the_fetcher_does(
    slots: tuple[Slot, ...],
    phase: Phase,
    server_seconds: float,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Watched()
    filler, device = SlowSource(recorder, phase, server_seconds), Stager(CPU)
    monkeypatch.setattr("corpus_client.observe.recorder.time", filler)
    pipeline = Pipeline(filler, slots, device, replace(STEPS, end_step=17), recorder)
    assert len(list(batches_of(pipeline))) == 12
    pipeline.close()
    stats = recorder.stats(copies_on_host=device.copies_on_host)
    assert stats.wait.cause == cause
    assert stats.wait_seconds >= 0.05
    assert sum(getattr(stats.wait, name) for name in CAUSES) == pytest.approx(stats.wait_seconds)


def test_loader_tells_where_its_time_went(make_loader: MakeLoader) -> None:
    loader = make_loader(num_steps=40, prefetch_bytes=1 << 15)
    assert replace(loader.stats(), fetch=FetchSeconds()) == LoaderStats()
    for _ in range(10):
        next(loader)
    stats = loader.stats()
    assert stats.num_slots >= 2
    assert 0 <= stats.ready_slots <= stats.num_slots
    assert 0 < stats.slot_bytes <= 1 << 15
    assert stats.pinned_bytes == 0
    assert stats.tokens_per_second == stats.num_tokens / stats.seconds
    assert 0 < stats.wait_seconds <= stats.seconds
    assert sum(getattr(stats.wait, name) for name in CAUSES) == pytest.approx(stats.wait_seconds)
    assert stats.fetch.response > 0
    assert stats.fetch.receive > 0
    list(loader)
    later = loader.stats()
    assert later.num_batches == 40
    assert later.since(stats).num_batches == 30
    loader.close()
    assert loader.stats().received_bytes == 40 * 12 * 17 * 2


def test_waiting_for_a_busy_server_is_a_retry(make_loader: MakeLoader, server: ReferenceServer) -> None:
    faults = iter([Fault("busy", 1)])
    server.next_fault = lambda: next(faults, None)
    loader = make_loader()
    next(loader)
    assert loader.stats().wait.retry > 0.9
    assert loader.stats().num_retries >= 1
