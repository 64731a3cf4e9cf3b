"""Page-locked slots and staging buffers: nothing is reused too early, nothing grows, nothing is left."""

from __future__ import annotations

import gc
import mmap
import os
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from corpus_client import CorpusLoader, LoaderStats
from corpus_client.staging.ring import GROUP_BYTES, NUM_BUFFERS, transfer_stream
from tests.client.cuda.conftest import Accelerator
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step

MakeLoader = Callable[..., CorpusLoader]

NUM_STEPS = int(os.environ.get("CORPUS_DEVICE_STEPS", "150"))
"""Of each exact run; the long form has 10,000."""

CHUNK = 50
"""Batches that are kept on the device, and compared together: within a chunk nothing waits for the device."""

DELAY = 2e-4
"""Seconds; the simulated device delays each operation by up to this, and a GPU is kept busy for it."""


def num_wrong(
    loader: CorpusLoader,
    corpus: ReferenceCorpus,
    accelerator: Accelerator,
    num_steps: int,
    *,
    late_copy: float = DELAY,
    late_read: float = DELAY,
) -> int:
    """Take batches and return how many are not the plan's.

    Each is copied on the device and dropped; the copies are compared when `CHUNK` of them were queued.
    late_copy, late_read: seconds at most for which a stream is busy before a batch is copied, and read.
    """
    draw, wrong = random.Random(0), 0
    runtime = accelerator.runtime
    copying = transfer_stream(runtime, torch.device(accelerator.name, runtime.current_device()))
    for first in range(0, num_steps, CHUNK):
        kept = []
        for _ in range(min(CHUNK, num_steps - first)):
            with runtime.stream(copying):
                accelerator.sleep(draw.random() * late_copy)
            batch = next(loader)
            accelerator.sleep(draw.random() * late_read)
            kept.append((batch.step, batch.inputs.clone(), batch.targets.clone()))
        for step, inputs, targets in kept:
            expected = tokens_of_step(corpus, loader.plan, step)
            found = np.concatenate([inputs.cpu().numpy(), targets[:, -1:].cpu().numpy()], axis=1)
            wrong += not np.array_equal(found, expected)
    return wrong


@pytest.mark.parametrize("options", [{"dtype": torch.int64}, {"dtype": None}, {"trace_steps": 20}], ids=str)
@pytest.mark.parametrize("prefetch_bytes", [1 << 13, 3 << 12, 1 << 16])
def test_every_batch_is_exact_and_memory_is_constant(
    make_loader: MakeLoader,
    corpus: ReferenceCorpus,
    accelerator: Accelerator,
    prefetch_bytes: int,
    options: dict[str, Any],
) -> None:
    """Random delays before each copy and each read, few and many slots; traced batches are copied singly."""
    loader = make_loader(
        device=accelerator.name, order="shuffle", prefetch_bytes=prefetch_bytes, in_flight=1, **options
    )
    assert num_wrong(loader, corpus, accelerator, 2 * CHUNK) == 0
    settled = accelerator.runtime.memory_allocated(), accelerator.runtime.memory_reserved()
    assert num_wrong(loader, corpus, accelerator, NUM_STEPS) == 0
    assert (accelerator.runtime.memory_allocated(), accelerator.runtime.memory_reserved()) == settled


def slots_freed_early(patch: pytest.MonkeyPatch, accelerator: Accelerator) -> None:
    """Each event says at once that it has passed, so a slot is refilled before it was copied from."""
    real = accelerator.runtime.Event
    kind = type(real())
    names = () if accelerator.name == "cuda" else (accelerator.name,)
    early = type("Early", (kind,), {"query": lambda _: True})
    patch.setattr(accelerator.runtime, "Event", lambda **options: early(*names, **options))


def buffers_refilled_early(patch: pytest.MonkeyPatch, accelerator: Accelerator) -> None:
    """The transfer stream waits for nothing, so a staging buffer is refilled while it is read."""
    without_waits(patch, accelerator, lambda stream: stream.stream_id != 0)


def copies_not_awaited(patch: pytest.MonkeyPatch, accelerator: Accelerator) -> None:
    """The loop's stream waits for nothing, so a batch is read before its copy has come."""
    without_waits(patch, accelerator, lambda stream: stream.stream_id == 0)


def without_waits(patch: pytest.MonkeyPatch, accelerator: Accelerator, which: Callable[[Any], bool]) -> None:
    wait = accelerator.runtime.Stream.wait_event

    def changed(stream: Any, event: Any) -> None:
        if not which(stream):
            wait(stream, event)

    patch.setattr(accelerator.runtime.Stream, "wait_event", changed)


@pytest.mark.parametrize(
    ("broken", "delays"),
    [
        (slots_freed_early, {"late_copy": 0.02}),
        (buffers_refilled_early, {"late_read": 0.01}),
        (copies_not_awaited, {"late_copy": 0.002}),
    ],
)
def test_the_same_check_notices_a_broken_order(
    make_loader: MakeLoader,
    corpus: ReferenceCorpus,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[..., None],
    delays: dict[str, float],
) -> None:
    broken(monkeypatch, accelerator)
    loader = make_loader(device=accelerator.name, order="shuffle", prefetch_bytes=1 << 13, in_flight=1)
    wrong = num_wrong(loader, corpus, accelerator, 150, **delays)
    print(broken.__name__, wrong)
    assert wrong > 0


def test_slots_count_as_ready_until_their_batches_are_taken(
    make_loader: MakeLoader, accelerator: Accelerator
) -> None:
    """The device is late: every slot is uploaded and none is free again, but batches are there."""
    loader = make_loader(device=accelerator.name, prefetch_bytes=1 << 14, in_flight=1)
    num_bytes = 2 * next(loader).tokens.numel()  # as stored
    with accelerator.held():
        while loader.stats().ready_slots or settled(loader).ready_slots:
            next(loader)
    stats = loader.stats()
    assert stats.num_slots >= 4
    assert stats.num_batches * num_bytes == stats.received_bytes


def settled(loader: CorpusLoader) -> LoaderStats:
    """Return the loader's figures once it has fetched what there is room for."""
    stats, num_same = loader.stats(), 0
    while num_same < 20:  # looks, not seconds: a machine that stalls stops the fetcher, too
        time.sleep(0.01)
        before, stats = stats, loader.stats()
        num_same = num_same + 1 if stats.received_bytes == before.received_bytes else 0
    return stats


def test_a_dropped_batch_is_not_reused_before_its_last_reader(
    make_loader: MakeLoader, corpus: ReferenceCorpus, accelerator: Accelerator
) -> None:
    """The loop runs far ahead of the device: each batch is read late, and dropped at once."""
    loader = make_loader(device=accelerator.name, order="shuffle", prefetch_bytes=1 << 14)
    assert num_wrong(loader, corpus, accelerator, 100, late_read=2e-3) == 0


def test_batches_read_on_two_streams_are_exact(
    make_loader: MakeLoader, corpus: ReferenceCorpus, accelerator: Accelerator
) -> None:
    runtime = accelerator.runtime
    streams = [runtime.current_stream(), runtime.Stream()]
    loader = make_loader(device=accelerator.name, num_steps=60)
    kept = []
    for number in range(60):
        with runtime.stream(streams[number % 2]):
            accelerator.sleep(1e-3 * (number % 2))
            batch = next(loader)
            kept.append((batch.step, batch.inputs.clone()))
    runtime.synchronize()
    for step, inputs in kept:
        assert inputs.cpu().tolist() == tokens_of_step(corpus, loader.plan, step)[:, :-1].tolist()


def test_several_loaders_in_a_process_do_not_disturb_each_other(
    make_loader: MakeLoader,
    corpus: ReferenceCorpus,
    accelerator: Accelerator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their copies share one stream: torch has a pool of 32."""
    made: list[Any] = []
    real = accelerator.runtime.Stream
    monkeypatch.setattr(accelerator.runtime, "Stream", lambda *a, **k: made.append(real(*a, **k)) or made[-1])
    loaders = [
        make_loader(device=accelerator.name, seed=seed, order="shuffle", prefetch_bytes=1 << 14)
        for seed in range(5)
    ]
    taken = [(loader, next(loader)) for _ in range(20) for loader in loaders]
    # Not the objects: `torch.cuda.current_stream()` makes one at each call.
    assert len({stream.stream_id for stream in made} - {accelerator.runtime.current_stream().stream_id}) <= 1
    for loader, batch in taken:
        expected = tokens_of_step(corpus, loader.plan, batch.step)
        assert np.array_equal(batch.tokens.cpu().numpy(), expected)


def test_staging_buffers_are_all_that_the_loader_keeps_on_the_device(
    make_loader: MakeLoader, accelerator: Accelerator
) -> None:
    runtime = accelerator.runtime
    runtime.synchronize()
    before = runtime.memory_allocated()
    loader = make_loader(device=accelerator.name)
    for _ in range(100):
        next(loader)
    assert loader.stats().device_bytes == NUM_BUFFERS * GROUP_BYTES
    assert runtime.memory_allocated() - before == loader.stats().device_bytes
    loader.close()
    assert runtime.memory_allocated() == before


class Registered:
    """Notes which memory is page-locked by the runtime: bytes by address."""

    def __init__(self, patch: pytest.MonkeyPatch, accelerator: Accelerator) -> None:
        self.now: dict[int, int] = {}
        self._real = accelerator.runtime.cudart()
        face = SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._unlock)
        patch.setattr(accelerator.runtime, "cudart", lambda: face)

    def _lock(self, address: int, num_bytes: int, flags: int) -> Any:
        self.now[address] = num_bytes
        return self._real.cudaHostRegister(address, num_bytes, flags)

    def _unlock(self, address: int) -> Any:
        del self.now[address]
        return self._real.cudaHostUnregister(address)


def test_slots_are_page_locked_to_the_byte_until_the_last_of_them_is_dropped(
    make_loader: MakeLoader, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered = Registered(monkeypatch, accelerator)
    loader = make_loader(device=accelerator.name, prefetch_bytes=300_000)
    next(loader)
    stats = loader.stats()
    assert 0 < stats.pinned_bytes == stats.slot_bytes <= 300_000
    ((address, num_bytes),) = registered.now.items()
    assert num_bytes == stats.slot_bytes
    assert address % mmap.PAGESIZE == 0
    loader.close()
    gc.collect()
    assert registered.now == {}


def test_memory_that_cannot_be_registered_is_pinned_by_torch(
    make_loader: MakeLoader,
    corpus: ReferenceCorpus,
    accelerator: Accelerator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = SimpleNamespace(cudaHostRegister=lambda *_: 1)
    monkeypatch.setattr(accelerator.runtime, "cudart", lambda: refused)
    loader = make_loader(device=accelerator.name, order="shuffle", prefetch_bytes=1 << 15)
    assert num_wrong(loader, corpus, accelerator, 100) == 0
    assert loader.stats().pinned_bytes == loader.stats().slot_bytes
    assert "cudaHostRegister of 32,768 bytes failed with error 1" in caplog.text
    assert torch.ones(3, device=accelerator.name).sum().item() == 3


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_loaders_dropped_with_copies_under_way_leave_nothing(
    make_loader: MakeLoader, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    registered = Registered(monkeypatch, accelerator)
    runtime, reserved = accelerator.runtime, 0
    for number in range(8):
        loader = make_loader(device=accelerator.name, prefetch_bytes=1 << 16)
        make_loader.made.clear()  # type: ignore[attr-defined]
        for _ in range(num_steps):
            next(loader)
        del loader
        gc.collect()
        if number == 3:
            reserved = runtime.memory_reserved()
    runtime.synchronize()
    assert runtime.memory_reserved() <= reserved
    assert registered.now == {}


def test_batches_go_to_the_device_that_is_meant(
    make_loader: MakeLoader, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, last = accelerator.name, accelerator.runtime.device_count() - 1
    wanted = torch.device(name, last)
    assert next(make_loader(device=f"{name}:{last}")).tokens.device == wanted
    monkeypatch.setenv("LOCAL_RANK", str(last))
    assert next(make_loader(device=name)).tokens.device == wanted
    monkeypatch.delenv("LOCAL_RANK")
    with accelerator.runtime.device(last):
        assert next(make_loader(device=name)).tokens.device == wanted
