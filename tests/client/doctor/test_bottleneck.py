"""Demand against delivery: who is to blame, and from when on."""

from __future__ import annotations

from typing import Any

import pytest

from corpus_client import errors
from corpus_client.doctor.bottleneck import FIXES, Demand, cause, diagnose, servers_for_all
from corpus_client.doctor.speed import Stages, percentages

TOKENS = 4_000_000
"""Of a request; a stage of 4 ms then alone delivers 1,000 M tokens/s."""


def spent(
    *, server: float = 0.001, network: float = 0.001, host_copy: float = 0.001, transfer: float = 0.0
) -> Stages:
    return Stages(server=server, network=network, host_copy=host_copy, transfer=transfer, num_tokens=TOKENS)


def demand(**changes: Any) -> Demand:
    """64 M tokens/s for each of 4 ranks."""
    return Demand(**{"tokens_per_step": 256_000, "step_seconds": 0.001, "world_size": 4, **changes})


@pytest.mark.parametrize(
    ("delivered", "status", "says"),
    [
        (640e6, "ok", "data is not: a rank needs 64 M tokens/s, 640 M tokens/s arrive (10 times that)"),
        (81e6, "ok", "(1.27 times that)"),
        (79e6, "warn", "data hardly keeps up"),
        (64e6, "warn", "(1.00 times that)"),
        (63e6, "fail", "data is: a rank needs 64 M tokens/s, 63 M tokens/s arrive (0.98 times that)"),
        (32e6, "fail", "so a step of 1 ms takes 2 ms"),
    ],
)
def test_delivery_against_demand(delivered: float, status: str, says: str) -> None:
    slow = spent(server=TOKENS / delivered)
    check = diagnose(delivered, slow, demand())
    assert check.status == status
    assert says in check.found
    assert check.advice == ("" if status == "ok" else FIXES["server"])
    assert check.measured["delivered_over_needed"] == pytest.approx(delivered / 64e6)
    assert check.measured["shortest_step_seconds"] == pytest.approx(64_000 / delivered)


@pytest.mark.parametrize(
    ("changes", "delivered", "expected"),
    [
        ({"server": 0.004}, 900e6, "server"),
        ({"network": 0.004}, 900e6, "network"),
        ({"host_copy": 0.004}, 900e6, "host copy"),
        ({"transfer": 0.004}, 900e6, "transfer"),
        ({"network": 0.004, "transfer": 0.005}, 700e6, "transfer"),
        # One after the other they would bring 667 M tokens/s: overlapped, they should not bring less.
        ({"server": 0.004}, 510e6, "server"),
        ({"server": 0.004}, 490e6, "cores"),
        ({}, 200e6, "cores"),
    ],
)
def test_the_cause_is_the_longest_stage(changes: dict[str, float], delivered: float, expected: str) -> None:
    assert cause(delivered, spent(**changes)) == expected
    assert expected in FIXES


def test_without_a_step_time_the_shortest_step_is_told() -> None:
    check = diagnose(640e6, spent(network=0.006), demand(step_seconds=None))
    assert (check.status, check.measured["shortest_step_seconds"]) == ("ok", pytest.approx(1e-4))
    assert "data keeps up with steps of 0.1 ms or longer (64,000 tokens a rank)" in check.found
    assert "below that, network sets the pace" in check.found
    assert "--step-seconds" in check.advice


@pytest.mark.parametrize(
    ("server", "num_servers", "status", "processes"),
    [(0.004, 1, "ok", 0.256), (0.032, 2, "warn", 2.048), (0.032, 3, "ok", 2.048)],
)
def test_all_ranks_together_need_so_many_server_processes(
    server: float, num_servers: int, status: str, processes: float
) -> None:
    check = servers_for_all(spent(server=server), demand(), num_servers)
    assert check is not None
    assert check.status == status
    assert check.measured["server_processes"] == pytest.approx(processes)
    assert ("--workers over all replicas are 3 or more" in check.advice) == (status == "warn")


@pytest.mark.parametrize("changes", [{"step_seconds": None}, {"world_size": 1}])
def test_one_rank_or_an_unknown_step_says_nothing_of_all_ranks(changes: dict[str, Any]) -> None:
    assert servers_for_all(spent(), demand(**changes), 1) is None


@pytest.mark.parametrize("changes", [{"tokens_per_step": 0}, {"step_seconds": 0}, {"step_seconds": -1.0}])
def test_a_demand_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument, match="must be above 0, got"):
        demand(**changes)


def test_shares_of_a_request() -> None:
    assert percentages(spent(network=0.002)) == "server 25%, network 50%, host copy 25%"
