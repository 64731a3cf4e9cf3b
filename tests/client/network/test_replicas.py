"""Faults are ridden out within the deadline; wrong replicas are refused by name."""

from __future__ import annotations

import gc
import logging
import random
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import httpx
import numpy as np
import pytest

from corpus_client import CorpusLoader, errors, make_plan
from corpus_client.network import control, options, replica, replicas
from corpus_client.network.replicas import Replicas
from tests.client.conftest import make_corpus, num_descriptors
from tests.client.network.scripted import ScriptedServer
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import Fault, Problem, ReferenceServer
from tests.serving import wait_until

MakeLoader = Callable[..., CorpusLoader]
PLAN = make_plan(corpus="web", seq_len=16, global_batch_size=12, order="sequential")


def faults_then_right(*faults: Fault | None) -> Callable[[], Fault | None]:
    left = list(faults)
    return lambda: left.pop(0) if left else None


def assert_exact(loader: CorpusLoader, corpus: ReferenceCorpus, num_steps: int) -> None:
    for expected_step in range(loader.step, loader.step + num_steps):
        batch = next(loader)
        assert batch.step == expected_step
        assert np.array_equal(batch.tokens.numpy(), tokens_of_step(corpus, loader.plan, batch.step))


def made_in_time(make_loader: MakeLoader, **changes: Any) -> CorpusLoader:
    """Make a loader that waits so shortly that a busy machine may miss it."""
    made: list[CorpusLoader] = []

    def comes() -> bool:
        with suppress(errors.DeadlineExceeded):
            made.append(make_loader(**changes))
        return bool(made)

    wait_until(comes)
    return made[0]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("cut", 0),
        Fault("cut", 333),
        Fault("reset", 100),
        Fault("checksum"),
        Fault("shape"),
        Fault("length"),
        Fault("flip", 77),
        Fault("error"),
        Fault("slow", 0.05),
        Fault("unknown-plan"),
        Fault("header-plan"),
        Fault("other-step"),
    ],
    ids=lambda fault: f"{fault.kind}-{fault.at}",
)
def test_each_fault_leaves_the_batches_exact(
    fault: Fault, server: ReferenceServer, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    server.next_fault = faults_then_right(None, fault)
    loader = make_loader()
    assert_exact(loader, corpus, 12)
    # The request behind it on the connection may have to be repeated, too; so may two of which one was late.
    stats = loader.stats()
    least, most = (0, 0) if fault.kind == "slow" else (1, 2)
    assert least <= stats.num_retries <= most + 2 * stats.num_hedged


def test_flipped_bit_passes_without_verification(
    server: ReferenceServer, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    """`verify=False` means what it says; this also shows that the fault is real."""
    server.next_fault = faults_then_right(Fault("flip", 3))
    batch = next(make_loader(verify=False))
    expected = tokens_of_step(corpus, make_loader().plan, 0)
    assert (batch.tokens.numpy() != expected).sum() == 1


@pytest.mark.parametrize("seed", [1, 2])
def test_many_faults_grow_neither_threads_nor_descriptors(
    seed: int, server: ReferenceServer, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    draw = random.Random(seed)
    kinds = [
        "cut",
        "reset",
        "checksum",
        "shape",
        "length",
        "flip",
        "header-plan",
        "unknown-plan",
        "other-step",
    ]
    num_faults = 0

    def fault() -> Fault | None:
        nonlocal num_faults
        if num_faults >= 40 or draw.random() < 0.75:
            return None
        num_faults += 1
        return Fault(draw.choice(kinds), draw.randrange(400))

    loader = make_loader(prefetch_bytes=1 << 14)
    assert_exact(loader, corpus, 3)
    threads, descriptors = threading.active_count(), num_descriptors()
    server.next_fault = fault
    assert_exact(loader, corpus, 2400)
    assert num_faults == 40
    assert loader.stats().num_retries >= 36
    # The server's side of broken connections is closed by its own threads.
    wait_until(lambda: threading.active_count() <= threads + 2)
    wait_until(lambda: num_descriptors() <= descriptors + 4)


def test_busy_server_is_given_the_time_it_asks_for(
    server: ReferenceServer, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    server.next_fault = faults_then_right(Fault("busy", 1))
    loader = make_loader(in_flight=1)
    started = time.monotonic()
    assert_exact(loader, corpus, 1)
    assert time.monotonic() - started >= 1.0
    assert loader.stats().num_retries == 1


def test_the_deadline_bounds_the_time_that_a_busy_server_asks_for(
    server: ReferenceServer, make_loader: MakeLoader
) -> None:
    """`Retry-After: 30` with a deadline of 5 s: whoever waits learns it after that, not after 30 s."""
    server.next_fault = lambda: Fault("busy", 30)
    loader = made_in_time(make_loader, deadline_seconds=5)

    def said() -> bool:
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded) as caught:
            next(loader)
        assert time.monotonic() - started < 29
        # On a machine that stood still the last attempt may have had no response.
        return "too much" in str(caught.value) and "is the server running" not in str(caught.value)

    wait_until(said)


def test_a_new_loader_waits_shortly_for_a_server_that_was_never_there(
    server: ReferenceServer, make_loader: MakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that was reached gets the whole deadline."""
    with pytest.raises(
        errors.DeadlineExceeded, match=r"within 0\.3 s.* is the server running\? reach_seconds="
    ):
        make_loader("http://127.0.0.1:9", reach_seconds=0.3)
    with pytest.raises(errors.DeadlineExceeded, match=r"within 5 s.* is the server running") as caught:
        make_loader("http://localhost:9")
    assert "asked again in" in caplog.text
    assert "waiting up to 5 s in all" in caplog.text
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert len(names) < 6, "the frames of the package are left out"
    assert isinstance(caught.value.__cause__, errors.ConnectionFailed)
    server.next_fault = faults_then_right(Fault("busy", 1))
    next(made_in_time(make_loader, reach_seconds=0.9))  # which are over before the busy server answers


def test_only_the_requests_of_others_are_logged_by_httpx(
    server: ReferenceServer, make_loader: MakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    """As a training script sees it that logs at INFO."""
    with caplog.at_level(logging.INFO):
        next(make_loader())
        assert [record for record in caplog.records if record.name == "httpx"] == []
        httpx.get(f"{server.url}/v1/corpora")
        assert [record.name for record in caplog.records].count("httpx") == 1


def test_a_server_that_is_back_sooner_than_it_said_is_asked_again(
    server: ReferenceServer, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    """One 503 with `Retry-After: 10**9` fails no request."""
    faults = iter([Fault("busy", 1e9)])
    server.next_fault = lambda: next(faults, None)
    loader = make_loader(deadline_seconds=8, in_flight=1)
    assert_exact(loader, corpus, 1)
    assert loader.stats().num_retries >= 1


def test_a_server_that_hangs_up_at_once_is_asked_ever_more_rarely(
    server: ReferenceServer, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    """Only a connection that has served before may be repeated without a back-off."""
    loader = make_loader(prefetch_bytes=1 << 13, in_flight=1)
    assert_exact(loader, corpus, 1)
    faults = [Fault("hang-up")] * 6
    started = time.monotonic()
    server.next_fault = lambda: faults.pop() if faults else None
    while faults:
        assert_exact(loader, corpus, 1)
    # Back-offs that double, each shortened by half at most; the first request is repeated at once.
    assert time.monotonic() - started >= replica.BACKOFF_FIRST_SECONDS / 2 * (1 + 2 + 4 + 8)


def test_busy_replica_is_passed_over(corpus: ReferenceCorpus, make_loader: MakeLoader) -> None:
    with ReferenceServer([corpus], lambda: Fault("busy", 30)) as busy, ReferenceServer([corpus]) as free:
        started = time.monotonic()
        # 20 steps may be over before the busy one is asked.
        assert_exact(make_loader([busy.url, free.url], prefetch_bytes=1 << 13), corpus, 400)
        assert time.monotonic() - started < 29
        assert busy.num_arrays >= 1


def test_requests_are_spread_over_the_replicas(corpus: ReferenceCorpus, make_loader: MakeLoader) -> None:
    with ReferenceServer([corpus]) as one, ReferenceServer([corpus]) as two:
        assert_exact(make_loader([one.url, two.url], prefetch_bytes=1 << 13), corpus, 400)
        # How many depends on how fast each one is; none is left unmeasured.
        assert min(one.num_arrays, two.num_arrays) >= 1


def test_the_callers_error_is_raised_at_once(server: ReferenceServer, make_loader: MakeLoader) -> None:
    server.next_fault = lambda: Fault("bad-request")
    loader = make_loader()
    with pytest.raises(errors.ServerError, match=r"too large \(ask for less\)") as caught:
        next(loader)
    assert caught.value.kind == "response-too-large"
    assert loader.stats().wait.retry == 0


def test_deadline_names_the_servers_and_the_last_failure(
    server: ReferenceServer, make_loader: MakeLoader
) -> None:
    server.next_fault = lambda: Fault("checksum")
    loader = made_in_time(make_loader, deadline_seconds=4)
    caught: list[errors.DeadlineExceeded] = []

    def came() -> bool:
        started = time.monotonic()
        with pytest.raises(errors.DeadlineExceeded) as error:
            next(loader)
        assert time.monotonic() - started > 3.9
        caught.append(error.value)
        # On a machine that stood still the last attempt may have had no response.
        return isinstance(error.value.__cause__, errors.ResponseCorrupt)

    wait_until(came)
    said = str(caught[-1])
    assert re.search(rf"{server.url} within 4 s; last: .*the array's checksum must be", said)
    assert "is the server running" not in said, "it answers"


def test_after_a_deadline_the_same_step_can_be_asked_again(
    server: ReferenceServer, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    loader = made_in_time(make_loader, deadline_seconds=0.5)

    def comes() -> bool:
        with suppress(errors.DeadlineExceeded):  # on a busy machine
            assert_exact(loader, corpus, 1)
            return True
        return False

    wait_until(comes)
    server.next_fault = lambda: Fault("error")
    with pytest.raises(errors.DeadlineExceeded):
        assert_exact(loader, corpus, 10_000)
    server.next_fault = lambda: None
    for _ in range(5):
        wait_until(comes)


def test_restarted_server_is_waited_for(
    server: ReferenceServer, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    """It comes back on its port without any memory of the plan."""
    loader = make_loader(prefetch_bytes=1 << 13)
    assert_exact(loader, corpus, 10)
    server.stop()
    server.plans.clear()
    restart = threading.Timer(0.6, server.start)
    restart.start()
    assert_exact(loader, corpus, 60)
    restart.join()
    assert loader.stats().num_retries > 0


@pytest.fixture
def swapping() -> Iterator[ReferenceServer]:
    with ReferenceServer([make_corpus()]) as server:
        yield server


def test_server_that_comes_back_with_another_corpus_is_refused(
    swapping: ReferenceServer, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    loader = make_loader(swapping.url, prefetch_bytes=1 << 13)
    assert_exact(loader, corpus, 3)
    swapping.stop()
    swapping.corpora = [make_corpus(seed=9)]
    swapping.plans.clear()
    swapping.start()
    with pytest.raises(errors.ReplicaRefused, match=swapping.url):
        assert_exact(loader, corpus, 1000)


def test_server_that_kept_the_plan_and_has_another_corpus_is_skipped(
    server: ReferenceServer, swapping: ReferenceServer, corpus: ReferenceCorpus, make_loader: MakeLoader
) -> None:
    """Also while the right one is away."""
    loader = make_loader([swapping.url, server.url], prefetch_bytes=1 << 13)
    assert_exact(loader, corpus, 3)
    swapping.next_fault = lambda: Fault("other-corpus")
    server.stop()
    restart = threading.Timer(0.6, server.start)
    restart.start()
    assert_exact(loader, corpus, 60)
    restart.join()
    server.next_fault = swapping.next_fault
    with pytest.raises(errors.ReplicaUnusable, match=rf"{server.url} refuses .*other content"):
        assert_exact(loader, corpus, 1000)


def test_two_requests_are_on_the_wire_before_the_first_is_answered(
    server: ReferenceServer, make_loader: MakeLoader
) -> None:
    server.next_fault = faults_then_right(Fault("answer-late"))
    loader = make_loader(in_flight=2, num_steps=3)
    assert [batch.step for batch in loader] == [0, 1, 2]
    assert server.counts == [1, 2]
    assert loader.stats().wait.retry == 0


def test_connections_closed_while_idle_cost_nothing(
    server: ReferenceServer,
    corpus: ReferenceCorpus,
    make_loader: MakeLoader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop is slower than the server's keep-alive: every request meets a closed connection."""
    monkeypatch.setattr(replica, "BACKOFF_FIRST_SECONDS", 120.0)
    monkeypatch.setattr(replica, "BACKOFF_LAST_SECONDS", 120.0)
    server.max_idle_seconds = 0.02
    loader = make_loader(prefetch_bytes=1 << 13)
    for _ in range(12):
        assert_exact(loader, corpus, 5)
        time.sleep(0.03)
    assert loader.stats().num_retries > 0
    assert loader.stats().wait_seconds < 60  # less than one back-off


def test_a_question_has_its_own_deadline(black_hole: str) -> None:
    with (
        Replicas([black_hole]) as replicas,
        pytest.raises(errors.DeadlineExceeded, match=rf"from {black_hole} within 0\.2 s"),
    ):
        replicas.ask(control.get("/v1/corpora"), deadline_seconds=0.2)


def test_an_attempt_that_the_deadline_ended_does_not_hide_what_failed_before_it(
    server: ReferenceServer,
) -> None:
    """Its time was too short to say anything of the server; whoever waited must learn what did fail."""

    def busy_once(plan: dict[str, Any], step: int) -> bytes:
        server.receipt_seconds = 60  # the next question's, or until the server stops
        raise Problem(503, "overloaded", "too much at once")

    server.receipt_salt = busy_once
    plan = server.describe_plan(PLAN)
    while server.num_receipts != 2:  # again where a busy machine left no time for a second question
        server.num_receipts = server.receipt_seconds = 0
        with Replicas([server.url]) as replicas, pytest.raises(errors.DeadlineExceeded) as caught:
            replicas.ask(control.receipt(plan["id"], 0), deadline_seconds=2)
    assert re.search(r"last: .*too much at once", str(caught.value))
    assert "is the server running" not in str(caught.value)
    assert isinstance(caught.value.__cause__, errors.ServerError)


def test_a_question_that_was_given_up_closes_its_connection_itself() -> None:
    before, release = num_descriptors(), threading.Event()
    with closing(ScriptedServer([release, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"])) as server:
        while not server.requests:  # again where a busy machine did not send it in time
            with Replicas([server.url]) as replicas, pytest.raises(errors.DeadlineExceeded):
                replicas.ask(control.get("/"), deadline_seconds=0.3)
        assert "corpus-network" in {thread.name for thread in threading.enumerate()}
        release.set()
        wait_until(lambda: "corpus-network" not in {thread.name for thread in threading.enumerate()})
    gc.collect()
    assert num_descriptors() <= before


def test_a_question_is_asked_elsewhere_while_a_server_is_silent(
    corpus: ReferenceCorpus, black_hole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "CONNECT_SECONDS", 60.0)
    with ReferenceServer([corpus]) as server, Replicas([black_hole, server.url]) as replicas:
        started = time.monotonic()
        assert replicas.ask(control.get("/v1/corpora"))
        assert time.monotonic() - started < 40


def test_a_server_that_forgot_the_plan_is_told_it_and_asked_again(server: ReferenceServer) -> None:
    with Replicas([server.url]) as replicas:
        plan = replicas.bind(PLAN)
        server.plans.clear()
        assert replicas.ask(control.receipt(plan.plan_id, 3))
        assert list(server.plans) == [plan.plan_id]


def test_binding_tells_of_every_server_that_refuses(
    corpus: ReferenceCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here however late it refuses: a loop is not held by one that does so after a second."""
    monkeypatch.setattr(replicas, "FIRST_SECONDS", 60.0)
    monkeypatch.setattr(replicas, "BIND_SECONDS", 60.0)
    with (
        ReferenceServer([corpus]) as right,
        ReferenceServer([make_corpus(seed=9)]) as wrong,
        ReferenceServer([corpus], plan_salt="v2") as other,
        Replicas([right.url, wrong.url, other.url]) as opened,
        pytest.raises(errors.ReplicaUnusable, match=rf"{wrong.url} refuses .*; {other.url} makes plan"),
    ):
        opened.bind(PLAN)
