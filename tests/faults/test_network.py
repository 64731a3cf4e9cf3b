"""A real client and a real server with a network between them that fails: row 18 of the catalogue.

CORPUS_SOAK_SECONDS asks for 1,000 faults instead of 80; CORPUS_FAULT_SEED for others.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from corpus_client import errors
from tests.client.conftest import num_descriptors
from tests.conftest import ServedCorpus
from tests.contract.conftest import make_loader, take
from tests.faults.proxy import FaultProxy, Kind, NetworkFault, Schedule
from tests.serving import RunningServer, wait_until

SEED = int(os.environ.get("CORPUS_FAULT_SEED", "1"))
NUM_FAULTS = 1000 if os.environ.get("CORPUS_SOAK_SECONDS") else 80
KINDS: tuple[Kind, ...] = ("cut", "reset", "flip", "latency", "hole", "slow")


@pytest.fixture(scope="module")
def real(
    corpora: dict[str, ServedCorpus], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with RunningServer({"web": corpora["web"].path}, tmp_path_factory.mktemp("real")) as server:
        yield server


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_leaves_the_batches_exact(kind: Kind, real: RunningServer) -> None:
    """In the head, at the start of the body and within it."""
    faults = [NetworkFault(kind, after) for after in (20, 700, 1500)]
    with make_loader(real.url) as loader:
        expected = take(loader, 40)
    with ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy(real.port, lambda: faults.pop() if faults else None))
        got = take(stack.enter_context(make_loader(proxy.url, progress_seconds=1.0)), 40)
    assert not faults
    _check_equal(got, expected)


def test_a_network_that_swallows_everything_is_an_error_at_the_deadline(real: RunningServer) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy(real.port, lambda: NetworkFault("hole", 0)))
        loader = stack.enter_context(make_loader(proxy.url, deadline_seconds=3))
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded, match="deadline_seconds"):
            next(loader)
        waited = time.monotonic() - started
    assert 0.9 * 3 <= waited <= 30  # a busy machine may take its time to wake a thread


def test_many_faults_leave_neither_threads_nor_descriptors(real: RunningServer) -> None:
    """Two ways to the server, both bad; with a seed of their own."""
    with ExitStack() as stack:
        # Holes and latency are rare, since each takes up to a second.
        kinds: tuple[Kind, ...] = (*("cut", "reset", "flip") * 10, "latency", "hole")
        faults = [Schedule(SEED + k, kinds, mean_bytes=20_000, most=NUM_FAULTS // 2) for k in range(2)]
        proxies = [stack.enter_context(FaultProxy(real.port, each)) for each in faults]
        urls = [each.url for each in proxies]
        loader = stack.enter_context(make_loader(urls, prefetch_bytes=16_384))  # small requests
        reference = stack.enter_context(make_loader(real.url))
        _check_equal(take(loader, 50), take(reference, 50))
        gc.collect()
        threads, descriptors = threading.active_count(), num_descriptors()
        while sum(each.num_drawn for each in faults) < 0.9 * NUM_FAULTS:
            _check_equal(take(loader, 200), take(reference, 200))
        assert loader.stats().num_retries > 0.5 * NUM_FAULTS, f"seed {SEED}"
        wait_until(lambda: threading.active_count() <= threads + 4, f"threads are left, seed {SEED}")
        # Both sides of a connection through the proxy are descriptors of this process.
        wait_until(lambda: num_descriptors() <= descriptors + 16, f"descriptors are left, seed {SEED}")


def _check_equal(got: list[tuple[int, np.ndarray]], expected: list[tuple[int, np.ndarray]]) -> None:
    assert [step for step, _ in got] == [step for step, _ in expected]
    for (step, tokens), (_, right) in zip(got, expected, strict=True):
        assert np.array_equal(tokens, right), f"wrong tokens in step {step}, seed {SEED}"


def test_the_server_is_unhurt(real: RunningServer, tmp_path: Path) -> None:
    real.wait_until_idle()
    assert "Traceback" not in real.log()
