"""Threads, forks and ends: one thread iterates, nothing outlives a loader, errors keep their cause."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from corpus_client import ArrayLoader, Batch, CorpusLoader, RemoteCorpus, errors, get_batch
from tests.client.conftest import PATIENT, assert_close_wakes, num_descriptors
from tests.client.reference_server import ReferenceServer
from tests.serving import wait_until

MakeLoader = Callable[..., CorpusLoader]


def test_close_while_blocked_on_the_network(make_loader: MakeLoader, server: ReferenceServer) -> None:
    loader = make_loader(**PATIENT)
    assert_close_wakes(loader, server)
    with pytest.raises(errors.LoaderClosed, match="the loader is closed"):
        next(loader)


def test_dropped_loader_leaves_neither_thread_nor_descriptor(server: ReferenceServer) -> None:
    def use() -> Batch:
        loader = CorpusLoader(server.url, corpus="web", seq_len=16, global_batch_size=12, device="cpu")
        return next(loader)

    use()
    gc.collect()
    time.sleep(0.05)
    descriptors = num_descriptors()
    for _ in range(5):
        use()
        gc.collect()
    wait_until(lambda: "corpus-fetcher" not in {thread.name for thread in threading.enumerate()})
    wait_until(lambda: num_descriptors() <= descriptors + 1)  # the server closes its ends by its own threads


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads is what is tested
def test_forked_child_is_told_and_the_parent_goes_on(make_loader: MakeLoader) -> None:
    loader = make_loader(prefetch_bytes=1 << 13)
    next(loader)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(loader)
            os.write(write_end, b"a batch")
        except errors.ForkedLoader as error:
            os.write(write_end, str(error).encode())
        loader.close()
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert b"forked process" in pipe.read()
    os.waitpid(child, 0)
    assert [next(loader).step for _ in range(50)] == list(range(1, 51))


def test_a_second_thread_is_refused_by_name_until_the_loader_is_handed_over(make_loader: MakeLoader) -> None:
    loader = make_loader()
    assert next(loader).step == 0

    def refused(name: str, use: Callable[[], object]) -> list[BaseException]:
        found: list[BaseException] = []

        def run() -> None:
            try:
                use()
            except errors.CorpusClientError as error:
                found.append(error)

        thread = threading.Thread(target=run, name=name)
        thread.start()
        thread.join()
        return found

    for use in (
        lambda: next(loader),
        lambda: loader.seek(9),
        lambda: loader.load_state_dict(loader.state_at(9)),
    ):
        (error,) = refused("prefetcher", use)
        assert isinstance(error, errors.SecondThread)
        assert "thread 'prefetcher' uses a loader over which thread 'MainThread' iterates" in str(error)
    assert next(loader).step == 1
    loader.seek(loader.step)
    assert refused("prefetcher", lambda: next(loader)) == []
    assert next(loader).step == 3  # the thread that had it is over


def test_two_threads_at_once_get_each_step_once(make_loader: MakeLoader) -> None:
    for _ in range(20):
        loader = make_loader()
        together = threading.Barrier(2)
        steps: list[int] = []
        refusals: list[BaseException] = []

        def run(
            loader: CorpusLoader, together: threading.Barrier, steps: list[int], refusals: list[Any]
        ) -> None:
            together.wait()
            try:
                steps.append(next(loader).step)
            except errors.SecondThread as error:
                refusals.append(error)
            together.wait()

        threads = [threading.Thread(target=run, args=(loader, together, steps, refusals)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert steps == [0]
        assert len(refusals) == 1
        loader.close()


def test_an_unexpected_error_is_raised_every_time_with_its_cause(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = make_loader()
    next(loader)
    loader.seek(70)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a mistake of ours")

    with monkeypatch.context() as patch:
        patch.setattr("corpus_client.network.replicas.Replicas.finish", broken)
        for _ in range(3):
            with pytest.raises(errors.FetchFailed, match="ZeroDivisionError: a mistake of ours") as caught:
                next(loader)
            cause = caught.value.__cause__
            assert isinstance(cause, ZeroDivisionError)
            assert "broken" in [entry.name for entry in traceback.extract_tb(cause.__traceback__)]
    assert next(loader).step == 70


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads is what is tested
def test_what_a_forked_child_closes_stays_open_in_the_parent(server: ReferenceServer) -> None:
    """A shutdown of the child's copy of a socket would end the parent's connection, too."""
    remote = RemoteCorpus(server.url, "web")
    loader = ArrayLoader(server.url, corpus="web", seq_len=16, global_batch_size=12, rank=0, world_size=1)
    with closing(remote), loader:
        get_batch(remote, 2, 4)
        next(loader)
        child = os.fork()
        if child == 0:
            remote.close()
            loader.close()
            os._exit(0)
        os.waitpid(child, 0)
        get_batch(remote, 2, 4)
        assert [next(loader).step for _ in range(5)] == [1, 2, 3, 4, 5]
        assert loader._ahead is not None
        for replicas in (remote._replicas, loader._ahead.requests._replicas):
            # Those that a late response on a stalled machine repeats are no broken ones.
            assert replicas.recorder.num_retries <= 2 * replicas.recorder.num_hedged
