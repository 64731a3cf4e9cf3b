"""Demand against delivery: who is to blame, and from when on."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from corpus_client.doctor.speed import FIXES, bandwidth, bottleneck
from corpus_client.observe.attribution import LoaderStats, WaitSeconds
from corpus_client.tools.bench import BenchResult
from corpus_client.tools.timing import Spread

SERVER = WaitSeconds(network=1.0, server=2.0, host=0.5)
RANK_TOKENS = 64_000
"""Of a step; in one of a millisecond a rank needs 64 M tokens/s."""


def delivering(tokens_per_second: float, wait: WaitSeconds = SERVER) -> LoaderStats:
    return LoaderStats(num_batches=10, num_tokens=round(10 * tokens_per_second), seconds=10.0, wait=wait)


@pytest.mark.parametrize(
    ("delivered", "status", "says"),
    [
        (640e6, "ok", "data is not: a rank needs 64 M tokens/s, 640 M tokens/s arrive (10 times that)"),
        (81e6, "ok", "(1.27 times that)"),
        (79e6, "warn", "data hardly keeps up"),
        (64e6, "warn", "(1 times that)"),
        (63e6, "fail", "data is: a rank needs 64 M tokens/s, 63 M tokens/s arrive (0.984 times that)"),
        (32e6, "fail", "so a step of 1 ms takes 2 ms"),
    ],
)
def test_delivery_against_demand(delivered: float, status: str, says: str) -> None:
    check = bottleneck(delivering(delivered), RANK_TOKENS, 0.001)
    assert check.status == status
    assert says in check.found
    assert check.advice == ("" if status == "ok" else FIXES["server"])
    assert check.measured["delivered_over_needed"] == pytest.approx(delivered / 64e6)
    assert check.measured["shortest_step_seconds"] == pytest.approx(64_000 / delivered)


@pytest.mark.parametrize("cause", [field.name for field in fields(WaitSeconds)])
def test_the_cause_is_what_the_loop_waited_for_longest(cause: str) -> None:
    check = bottleneck(delivering(1e6, replace(SERVER, **{cause: 9.0})), RANK_TOKENS, 0.001)
    assert check.measured["cause"] == cause
    assert check.advice == FIXES[cause]


def test_a_loop_that_never_waits_is_held_by_its_own_copies() -> None:
    check = bottleneck(delivering(1e6, WaitSeconds()), RANK_TOKENS, 0.001)
    assert check.measured["cause"] == "host"


def test_without_a_step_time_the_shortest_step_is_told() -> None:
    check = bottleneck(delivering(640e6, replace(SERVER, network=9.0)), RANK_TOKENS, None)
    assert (check.status, check.measured["shortest_step_seconds"]) == ("ok", pytest.approx(1e-4))
    assert "data keeps up with steps of 100 us or longer (64,000 tokens a rank)" in check.found
    assert "below that, network sets the pace" in check.found
    assert "--step-seconds" in check.advice


@pytest.mark.parametrize(("retries", "status"), [(0, "ok"), (2, "warn")])
def test_what_a_loader_brought(retries: int, status: str) -> None:
    wait = WaitSeconds(network=0.2, server=0.6, host=0.2)
    found = BenchResult(
        stats=replace(delivering(16e6, wait), num_retries=retries),
        wait=Spread.of([0.1]),
        bytes_per_second=32e6,
        cpu_seconds=1.0,
        steps_per_request=1,
    )
    check = bandwidth(found)
    assert check.status == status
    assert check.found.startswith("16 M tokens/s, 32 MB/s")
    assert check.found.endswith("the loop waited for network 20%, server 60%, host 20%")
    assert ("2 requests repeated" in check.found) == bool(retries) == bool(check.advice)
