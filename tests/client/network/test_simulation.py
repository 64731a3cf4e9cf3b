"""The fetcher, its replicas and retries, in simulated time, against servers that fail at random.

`scripts/soak` does the same with a million batches.
"""

from __future__ import annotations

import random
from math import inf
from typing import Any

import pytest

from corpus_client.network.options import Network
from corpus_client.network.replica import LATE_SECONDS
from corpus_client.network.replicas import HEDGE_SHARE, MAX_HEDGES, STALL_SECONDS
from tests.client.network.simulation import START_SECONDS
from tests.client.network.unreliable import Run, Server, run

FOUND = {
    "a deadline that passed between two looks at the clock was followed by a whole back-off": 67,
    "a connection was closed while a request was sent on it: its address had left the name service": 5,
}


@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND.keys())
def test_what_was_found_once_stays_mended(seed: int) -> None:
    run(seed, 1000)


@pytest.mark.parametrize("first_seed", range(1000, 1020, 10))
def test_every_step_comes_once_in_order_or_an_error_in_time(first_seed: int) -> None:
    """Refused, reset, cut, late, hung, corrupt, busy, forgotten plans, impostors: each run has its own."""
    reports = [run(seed, 300) for seed in range(first_seed, first_seed + 10)]
    assert sum(report.num_faults for report in reports) > 20


RESPONSE_SECONDS = 0.005


def use_servers(drawn: Run, *given: dict[str, Any]) -> None:
    """Let a run have these servers instead of those drawn, which never fail but for what is given."""
    drawn.network, drawn.steps_per_slot, drawn.step_seconds = Network(), 1, 0.02
    usual = {"fault_share": 0.0, "faults": (), "up_seconds": inf, "away_seconds": 3.0, "away": "hang"}
    drawn.servers = [
        Server(
            world=drawn.world,
            random=random.Random(number),
            seconds=RESPONSE_SECONDS,
            impostor=False,
            away_times=[(START_SECONDS + 5,) * 2],  # what is usual is known by then
            **{**usual, **each},
        )
        for number, each in enumerate(given)
    ]
    drawn.world.peers.clear()
    drawn.world.peers.update({f"10.0.0.{n + 1}": each for n, each in enumerate(drawn.servers)})


@pytest.mark.parametrize(
    ("away", "longest"),
    [("hang", LATE_SECONDS), ("hole", LATE_SECONDS), ("refuse", 0.1), ("slow", 2 * STALL_SECONDS)],
)
def test_one_of_three_replicas_that_fails_holds_the_loop_for_a_second(away: str, longest: float) -> None:
    """One that is slow from the first is given up after a second, for each of two requests."""

    def one_fails(drawn: Run) -> None:
        first = {"fault_share": 0.3} if away == "slow" else {"up_seconds": 3.0, "away": away}
        use_servers(drawn, *({"faults": ("late",), **(first if number == 0 else {})} for number in range(3)))

    report = run(1, 1500, one_fails)
    print(f"{away}: longest wait {report.longest_seconds:.3f} s")
    assert report.num_errors == 0
    assert RESPONSE_SECONDS < report.longest_seconds <= longest + 3 * RESPONSE_SECONDS


NUM_BATCHES = 5000


def test_a_worker_that_answers_no_more_holds_the_loop_for_half_a_second() -> None:
    """One request in 500 meets it, and all on that connection; a new connection meets another worker.

    The failure was: 30 s.
    """
    report = run(
        1, NUM_BATCHES, lambda drawn: use_servers(drawn, {"fault_share": 0.002, "faults": ("hang",)})
    )
    print(f"{report.num_faults} times: {report.longest_seconds:.3f} s, {report.num_requests} requests")
    assert report.num_faults > 3
    assert LATE_SECONDS < report.longest_seconds < LATE_SECONDS + 0.05
    assert report.num_hedged == report.num_faults
    assert report.num_requests <= (1 + HEDGE_SHARE) * NUM_BATCHES


def test_slow_responses_cost_few_more_requests() -> None:
    """One in twenty begins after a second: few hedged requests help, and the others are waited for."""
    slow = {"fault_share": 0.05, "faults": ("slow",)}
    report = run(1, NUM_BATCHES, lambda drawn: use_servers(drawn, slow))
    more = report.num_requests / NUM_BATCHES - 1
    print(f"longest {report.longest_seconds:.3f} s, {100 * more:.2f} % more requests")
    assert report.num_faults > 0.04 * NUM_BATCHES
    assert report.num_hedged > 0
    assert more <= HEDGE_SHARE + MAX_HEDGES / NUM_BATCHES
    assert report.longest_seconds < 1.6


def test_a_server_that_was_always_slow_is_not_asked_twice() -> None:
    """A second for each first byte: no response is late, and nobody doubles the load of a busy server."""
    report = run(1, 200, lambda drawn: use_servers(drawn, {"fault_share": 1.0, "faults": ("slow",)}))
    assert report.num_faults > 150
    assert report.num_hedged == 0


def test_no_attempt_takes_more_than_a_quarter_of_the_deadline() -> None:
    """Of the first requests, before it is known what is usual, one is never answered."""

    def one_hangs(drawn: Run) -> None:
        use_servers(drawn, {"fault_share": 0.3, "faults": ("hang",)})
        drawn.network = Network(deadline_seconds=20)

    report = run(1, 8, one_hangs)
    assert (report.num_faults, report.num_hedged) == (1, 0)
    assert 5 < report.longest_seconds < 5.2


def test_a_seed_always_gives_the_same_run() -> None:
    assert run(3, 500) == run(3, 500)
