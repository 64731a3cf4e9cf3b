"""Other threads close a loader and ask for its figures; its own thread alone calls the device."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from corpus_client import CorpusLoader, errors
from tests.client.cuda.conftest import Accelerator
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step

MakeLoader = Callable[..., CorpusLoader]

NUM_CLOSES = int(os.environ.get("CORPUS_CLOSES", "100"))
"""Loaders that are closed; the long form has 10,000."""


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Python changes threads a thousand times as often, so that what can interleave does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def ask_until(done: threading.Event, loaders: list[CorpusLoader], failures: list[BaseException]) -> None:
    while not done.is_set():
        for loader in loaders[-1:]:
            try:
                loader.stats()
            except BaseException as error:  # noqa: BLE001 - whatever it is, the test fails by it
                failures.append(error)


def train_until_closed(loader: CorpusLoader) -> tuple[int, np.ndarray]:
    """Return the last batch that came: step and tokens; step -1 if none did."""
    step, last = -1, None
    try:
        for batch in loader:
            step, last = batch.step, batch.tokens
    except errors.LoaderClosed:
        return step, np.empty(0) if last is None else last.cpu().numpy()
    raise AssertionError("a loader without an end ended")


def test_close_and_stats_of_other_threads(
    make_loader: MakeLoader, corpus: ReferenceCorpus, accelerator: Accelerator, quick_switches: None
) -> None:
    """Anywhere within a call of the loop: it ends by `LoaderClosed` alone, and nothing stays behind."""
    loaders: list[CorpusLoader] = []
    failures: list[BaseException] = []
    done = threading.Event()
    asking = threading.Thread(target=ask_until, args=(done, loaders, failures))
    asking.start()
    draw, allocated, num_begun = random.Random(0), accelerator.runtime.memory_allocated(), 0
    options = {"device": accelerator.name, "order": "shuffle", "prefetch_bytes": 1 << 13, "trace_steps": 20}
    try:
        for _ in range(NUM_CLOSES):
            loader = make_loader(**options)
            make_loader.made.clear()  # type: ignore[attr-defined]
            loaders[:] = [loader]
            closing = threading.Timer(draw.random() * 0.02, loader.close)
            closing.start()
            step, tokens = train_until_closed(loader)
            closing.join()
            assert loader.stats().pinned_bytes == loader.stats().device_bytes == 0
            assert accelerator.runtime.memory_allocated() == allocated
            assert step < 0 or np.array_equal(tokens, tokens_of_step(corpus, loader.plan, step))
            num_begun += step >= 0
        assert num_begun > 0
    finally:
        done.set()
        asking.join()
    assert failures == []


def test_what_the_loops_thread_left_is_released_when_it_has_ended(
    make_loader: MakeLoader, accelerator: Accelerator
) -> None:
    """While it runs, `close` only stops the loader; the device is its own."""
    accelerator.allow_threads()
    loader = make_loader(device=accelerator.name)
    took, go = threading.Event(), threading.Event()

    def train() -> None:
        next(loader)
        took.set()
        go.wait(60)

    trainer = threading.Thread(target=train)
    trainer.start()
    took.wait(60)
    loader.close()
    assert loader.stats().pinned_bytes > 0
    with pytest.raises(errors.LoaderClosed):
        next(loader)
    go.set()
    trainer.join()
    loader.close()
    assert loader.stats().pinned_bytes == loader.stats().device_bytes == 0
