"""The fetcher, its replicas and retries, in simulated time, against servers that fail at random.

`scripts/soak` does the same with a million batches.
"""

from __future__ import annotations

import random
from math import inf

import pytest

from corpus_client.network.options import Network
from corpus_client.network.replicas import STALL_SECONDS
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
    reports = [run(seed, 600) for seed in range(first_seed, first_seed + 10)]
    assert sum(report.num_faults for report in reports) > 20


RESPONSE_SECONDS = 0.005


@pytest.mark.parametrize(
    ("away", "longest"),
    [("hang", STALL_SECONDS), ("hole", STALL_SECONDS), ("refuse", 0.1), ("slow", 2 * STALL_SECONDS)],
)
def test_one_of_three_replicas_that_fails_holds_the_loop_for_a_second(away: str, longest: float) -> None:
    """One that is slow from the first is given up after a second, for each of two requests."""

    def one_fails(drawn: Run) -> None:
        drawn.network, drawn.steps_per_slot, drawn.step_seconds = Network(), 1, 0.02
        drawn.world.peers.clear()
        drawn.servers = [
            Server(
                world=drawn.world,
                random=random.Random(number),
                fault_share=0.3 if away == "slow" and number == 0 else 0.0,
                faults=("late",),
                up_seconds=inf if away == "slow" or number else 3.0,
                away_seconds=3.0,
                away=away,
                seconds=RESPONSE_SECONDS,
                impostor=False,
                away_times=[(START_SECONDS + 5,) * 2],  # what is usual is known by then
            )
            for number in range(3)
        ]
        drawn.world.peers.update({f"10.0.0.{n + 1}": each for n, each in enumerate(drawn.servers)})

    report = run(1, 1500, one_fails)
    print(f"{away}: longest wait {report.longest_seconds:.3f} s")
    assert report.num_errors == 0
    assert RESPONSE_SECONDS < report.longest_seconds <= longest + 3 * RESPONSE_SECONDS


def test_a_seed_always_gives_the_same_run() -> None:
    assert run(3, 500) == run(3, 500)
