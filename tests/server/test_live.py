"""Samples of the last hour follow from the counters, and their number is bounded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
import pytest

from corpus_server import live
from corpus_server.live import hour
from corpus_server.metrics.kinds import BOUNDS, METRICS, SHARED, CorpusColumn
from corpus_server.metrics.shared import Numbers, add_up

PLAN = "a" * 64


def counted(
    *, requests: float = 0, ranks: Mapping[tuple[str, ...], list[float]] | None = None, **more: float
) -> Numbers:
    """Return numbers of workers that answered requests of 2 ms."""
    numbers: Numbers = {name: {} for name in SHARED}
    took = [0.0] * (len(BOUNDS) + 2)
    took[BOUNDS.index(0.0025)] = requests
    numbers["corpus_requests"][("/v1/batches", "200", "fast-path")] = [requests]
    numbers["corpus_requests"][("/page/live", "200", "application")] = [1e6]  # not training
    numbers["corpus_request_seconds"][("/v1/batches",)] = took
    numbers["corpus_tokens"] = {("web",): [requests * 900], ("code",): [requests * 100]}
    numbers["corpus_refusals"] = {("overloaded",): [more.get("refusals", 0)], ("forbidden",): [0]}
    numbers["corpus_reads"] = {("hit",): [more.get("hits", 0)], ("miss",): [more.get("misses", 0)]}
    numbers["corpus_workers"][()] = [2]
    numbers["ranks"] = dict(ranks or {})
    return numbers


def advance(state: Any, numbers: Numbers, now: float) -> dict[str, Any]:
    """Return the next state as the workers' file holds it."""
    after: dict[str, Any] = orjson.loads(orjson.dumps(live.next_state(state, numbers, now)))
    return after


def last(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[-1] for name, values in state["response"]["samples"].items()}


def test_a_sample_is_what_was_counted_since_the_one_before() -> None:
    state = advance({}, counted(requests=100, refusals=2), 1000.0)
    assert state["response"]["samples"]["unix_seconds"] == []
    state = advance(state, counted(requests=150, refusals=3, hits=30, misses=10), 1005.0)
    sample = last(state)
    assert (sample["requests_per_second"], sample["tokens_per_second"]) == (10.0, 10_000.0)
    assert (sample["refusals"], sample["cache_hit_share"]) == (1, 0.75)
    assert 0.001 < sample["p50_seconds"] < sample["p99_seconds"] < 0.0025
    assert state["response"]["refusals"] == {"overloaded": 3}
    assert state["response"]["num_workers"] == 2


def test_nothing_answered_is_null_and_not_zero() -> None:
    state = advance(advance({}, counted(), 0.0), counted(), 5.0)
    assert [last(state)[name] for name in ("p50_seconds", "p99_seconds", "cache_hit_share")] == [None] * 3
    assert last(state)["tokens_per_second"] == 0


def test_a_worker_that_was_killed_makes_no_rate_negative() -> None:
    ranks = {("", PLAN, "1", "0"): [5.0, 7.0, -1, 0, 0, 0, 8.0, 1.0, 1.0]}
    state = advance({}, counted(requests=100, ranks=ranks), 0.0)
    lost = {("", PLAN, "1", "0"): [6.0, 8.0, -1, 0, 0, 0, 7.0, 0.5, 0.5]}
    state = advance(state, counted(requests=90, ranks=lost), 5.0)
    assert last(state)["requests_per_second"] == 0
    (rank,) = state["response"]["plans"][0]["ranks"]
    assert rank["steps_per_second"] == rank["waiting_share"] == 0


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([10], 0.5, BOUNDS[0] / 2),
        ([10, 10], 0.75, (BOUNDS[0] + BOUNDS[1]) / 2),
        ([0, 4, 0, 4], 1.0, BOUNDS[3]),
        ([0] * len(BOUNDS) + [5], 0.5, BOUNDS[-1]),
        ([0] * len(BOUNDS), 0.5, None),
    ],
)
def test_quantiles_are_linear_within_a_bucket(
    counts: list[float], share: float, expected: float | None
) -> None:
    assert live.quantile(counts, share) == (None if expected is None else pytest.approx(expected))


def test_the_shares_of_a_rank_come_near_to_what_it_does() -> None:
    """A rank that waits 40 % of the time, while 10 % go into sending, and trains two steps per second."""
    state: live.State = {}
    for k in range(60):
        now = 5.0 * k
        ranks = {("", PLAN, "8", "3"): [now, 10.0 * k, -1, 0, 0, 0, 10.0 * k, 2.0 * k, 0.5 * k]}
        state = advance(state, counted(ranks=ranks), now)
    (plan,) = state["response"]["plans"]
    (rank,) = plan["ranks"]
    assert plan["plan"] == PLAN
    assert (rank["rank"], rank["world_size"], rank["step"], rank["seen_unix_seconds"]) == (3, 8, 590, 295.0)
    assert rank["steps_per_second"] == pytest.approx(2, rel=0.01)
    assert rank["trained_steps_per_second"] is None
    assert rank["waiting_share"] == pytest.approx(0.4, rel=0.01)
    assert rank["sending_share"] == pytest.approx(0.1, rel=0.01)


def test_steps_that_were_trained_are_told_from_those_that_were_asked_for() -> None:
    """A loader that fetches ahead asks for 100 steps/s at first, and its loop trains 4."""
    state: live.State = {}
    for k in range(60):
        ranks = {("", PLAN, "1", "0"): [5.0 * k, 500.0 * k, 20.0 * k, 0, 0, 0, 500.0 * k, 0.0, 0.0]}
        state = advance(state, counted(requests=50 * k, ranks=ranks), 5.0 * k)
    (rank,) = state["response"]["plans"][0]["ranks"]
    assert rank["steps_per_second"] == pytest.approx(100, rel=0.01)
    assert rank["trained_steps_per_second"] == pytest.approx(4, rel=0.01)


def test_rates_of_the_whole_server_have_the_window_of_the_table_of_corpora() -> None:
    """A server that was idle for long and then answers 600 requests in a sample."""
    state = advance({}, counted(requests=0), 0.0)
    state = advance(state, counted(requests=600), 5.0)
    assert last(state)["requests_per_second"] == 120
    weight = 1 - math.exp(-5 / live.AVERAGE_SECONDS)
    assert state["response"]["averages"]["requests_per_second"] == pytest.approx(120 * weight)
    rates = {each.name for each in live.COLUMNS if each.name.endswith("_per_second")}
    assert set(state["response"]["averages"]) == rates


def test_samples_and_ranks_are_kept_for_an_hour_and_no_more_than_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hour, "MAX_SHOWN_RANKS", 3)
    ranks = {("", PLAN, "8", str(k)): [10.0 * k, 1.0, -1, 0, 0, 0, 1.0, 0.0, 0.0] for k in range(5)}
    state: live.State = {}
    for now in range(0, 8000, 500):
        state = advance(state, counted(ranks=ranks), float(now))
        shown = state["response"]["plans"]
        if now <= 3600:
            assert [rank["rank"] for rank in shown[0]["ranks"]] == [2, 3, 4]
    assert shown == []
    assert not any(PLAN in name for name in state["averages"])
    assert state["response"]["samples"]["unix_seconds"] == [4000.0 + 500 * k for k in range(8)]


def test_plans_are_grouped_by_run_and_tools_come_last() -> None:
    seen = {("", "c"): 50.0, ("a", "d"): 20.0, ("bench", "c"): 40.0, ("b", "c"): 30.0, ("a", "c"): 10.0}
    ranks = {
        (run, plan, "1", "0"): [at, 99.0, at, 0, 0, 0, 1.0, 0.0, 0.0] for (run, plan), at in seen.items()
    }
    plans = advance({}, counted(ranks=ranks), 60.0)["response"]["plans"]
    assert [(each["run"], each["plan"], each["is_tool"]) for each in plans] == [
        ("b", "c", False),
        ("a", "d", False),
        ("a", "c", False),
        ("", "c", False),
        ("bench", "c", True),
    ]
    assert [(rank["trained_step"], rank["step"]) for rank in plans[0]["ranks"]] == [(30, 99)]


def test_a_follower_gets_only_what_is_new() -> None:
    state: live.State = {}
    for now in (0.0, 5.0, 10.0, 15.0):
        state = advance(state, counted(requests=now), now)
    whole = state["response"]
    assert live.after(whole, 0.0) == whole
    assert live.after(whole, 10.0)["samples"]["unix_seconds"] == [15.0]
    assert {len(each) for each in live.after(whole, 15.0)["samples"].values()} == {0}


def test_the_table_of_corpora_has_the_columns_that_metrics_declare() -> None:
    """Averages of what each corpus gave, in which half a minute counts most."""
    state: Any = None
    for k in range(60):
        state = advance(state, counted(requests=50 * k), 5.0 * k)
    response = state["response"]
    assert {"column": "tokens_per_second", "title": "tokens/s"} in response["corpus_columns"]
    declared = [
        each.title for metric in METRICS.values() for each in metric.live if isinstance(each, CorpusColumn)
    ]
    assert [each["title"] for each in response["corpus_columns"]] == declared
    speeds = {each["corpus"]: each["values"]["tokens_per_second"] for each in response["corpora"]}
    assert speeds == {"code": pytest.approx(1000, rel=0.01), "web": pytest.approx(9000, rel=0.01)}
    named = {line["column"] for chart in response["charts"] for line in chart["lines"]}
    assert (
        {"tokens_per_second", "p99_seconds", "refusals", "active_requests"}
        <= named
        <= set(response["samples"])
    )


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        {"at": 5.0},
        {"at": 5.0, "numbers": {"corpus_tokens": 7}, "averages": {}, "response": {"samples": {}}},
        {"at": "5", "numbers": {}, "averages": {}, "response": {"samples": {"unix_seconds": [1.0]}}},
    ],
    ids=str,
)
def test_the_hour_begins_anew_where_the_file_of_it_is_damaged_or_of_another_release(damaged: Any) -> None:
    state = advance(advance(damaged, counted(requests=5), 10.0), counted(requests=10), 15.0)
    assert state["response"]["samples"]["unix_seconds"] == [15.0]
    assert state["response"]["samples"]["requests_per_second"] == [1.0]


def test_a_rank_that_moved_to_another_worker_is_one_rank() -> None:
    key = ("a", PLAN, "1", "0")
    before, after = [10.0, 7.0, 5, 9.0, 4, 3.0, 8.0, 1.0, 0.5], [20.0, 3.0, -1, 0, 0, 20.0, 4.0, 0.25, 0.5]
    total = add_up([counted(ranks={key: after}), counted(ranks={key: before})])
    assert total["ranks"] == {key: [20.0, 3.0, -1, 9.0, 4, 20.0, 12.0, 1.25, 1.0]}


@pytest.mark.parametrize(
    ("seen", "trained", "ended", "begun", "has_ended"),
    [
        (100.0, 39, 0.0, 90.0, False),
        (100.0, 39, 100.0, 90.0, True),
        (105.0, 38, 100.0, 90.0, True),  # sent before the end, and read after it
        (105.0, -1, 100.0, 105.0, False),  # the first request of the next loader
        (105.0, 3, 100.0, 101.0, False),  # a later one
        (105.0, 40, 100.0, 90.0, False),
        (111.0, 20, 100.0, 90.0, False),
    ],
)
def test_a_loader_has_ended_until_another_one_asks(
    seen: float, trained: float, ended: float, begun: float, has_ended: bool
) -> None:
    ranks = {("", PLAN, "1", "0"): [seen, 50.0, trained, ended, 39.0, begun, 9.0, 0.0, 0.0]}
    (rank,) = advance({}, counted(ranks=ranks), 120.0)["response"]["plans"][0]["ranks"]
    assert rank["has_ended"] == has_ended
    assert rank["trained_step"] == (39 if has_ended else None if trained < 0 else trained)


def test_a_clock_that_was_set_back_makes_no_absurd_rates() -> None:
    """The failure was: what was counted in 5 s was divided by a millisecond."""
    state = advance(advance({}, counted(), 10_000.0), counted(requests=50), 10_005.0)
    state = advance(state, counted(requests=100), 7_000.0)
    assert state["response"]["samples"]["unix_seconds"] == []
    assert all(each["values"]["tokens_per_second"] == 0 for each in state["response"]["corpora"])
    state = advance(state, counted(requests=150), 7_005.0)
    assert last(state)["requests_per_second"] == 10.0
    assert state["response"]["samples"]["unix_seconds"] == [7_005.0]
