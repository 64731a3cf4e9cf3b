"""Schedules computed from stated durations: arithmetic against rules, and what no schedule may do."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_client.errors import InvalidArgument
from corpus_client.tools.timeline import WAYS, Durations, Span, Way, schedule, stall, step_seconds

BY_NAME = {way.name: way for way in WAYS}
seconds = st.integers(0, 40).map(lambda tenths: tenths / 10)


@st.composite
def durations(draw: st.DrawFn) -> Durations:
    return Durations(
        fetch=draw(seconds),
        copy=draw(seconds),
        transfer=draw(seconds),
        compute=draw(seconds.filter(bool)),
        workers=draw(st.integers(1, 4)),
        prefetch=draw(st.integers(1, 3)),
        slots=draw(st.integers(2, 5)),
        item=draw(st.booleans()),
    )


@pytest.mark.parametrize(
    ("stated", "periods"),
    [
        # fetch 4, copy 2, transfer 1, compute 5; two workers
        (Durations(fetch=4, copy=2, transfer=1, compute=5), {"a": 8, "b": 7, "c": 6, "d": 6, "e": 5, "f": 5}),
        # the same loop reads its loss: (a) to (c) do everything in turn
        (
            Durations(fetch=4, copy=2, transfer=1, compute=5, item=True),
            {"a": 12, "b": 12, "c": 12, "d": 6, "e": 5, "f": 5},
        ),
        # a network slower than the step: workers divide the wait, one connection does not
        (
            Durations(fetch=8, copy=1, transfer=1, compute=5),
            {"a": 10, "b": 10, "c": 9, "d": 6, "e": 8, "f": 5},
        ),
        # a bus slower than the step
        (
            Durations(fetch=1, copy=1, transfer=7, compute=5),
            {"a": 13, "b": 12, "c": 12, "d": 12, "e": 7, "f": 5},
        ),
        # nothing but compute
        (Durations(fetch=0, copy=0, transfer=0, compute=5), dict.fromkeys("abcdef", 5)),
        # one worker that makes one batch ahead cannot fetch while its batch is pinned
        (
            Durations(fetch=6, copy=3, transfer=0, compute=5, workers=1, prefetch=1),
            {"a": 9, "b": 9, "c": 9, "d": 9, "e": 6, "f": 5},
        ),
    ],
    ids=["usual", "item", "slow network", "slow bus", "free data", "one worker"],
)
def test_a_step_takes_by_rule_and_by_schedule(stated: Durations, periods: dict[str, float]) -> None:
    for way in WAYS:
        assert way.period(stated) == pytest.approx(periods[way.letter]), way.name
        assert fmean(step_seconds(schedule(way, stated, 100))[-48:]) == pytest.approx(periods[way.letter])


@given(durations(), st.sampled_from(WAYS))
def test_the_rule_is_what_the_schedule_comes_to(stated: Durations, way: Way) -> None:
    lengths = step_seconds(schedule(way, stated, 600))
    assert fmean(lengths[-240:]) == pytest.approx(way.period(stated), rel=1e-3, abs=1e-9)


@given(durations(), st.sampled_from(WAYS))
def test_a_lane_does_one_thing_at_a_time(stated: Durations, way: Way) -> None:
    lanes = defaultdict[str, list[Span]](list)
    for span in schedule(way, stated, 20):
        assert 0 <= span.start <= span.stop
        lanes[span.lane].append(span)
    for spans in lanes.values():
        for before, after in pairwise(spans):
            assert before.stop <= after.start


@given(durations(), st.sampled_from([way for way in WAYS if way.name != "constant"]))
def test_nothing_begins_before_what_it_needs(stated: Durations, way: Way) -> None:
    """Fetched before copied before transferred before computed; each as long as stated."""
    order = ("fetch", "copy", "transfer", "compute")
    steps = defaultdict[int, dict[str, Span]](dict)
    for span in schedule(way, stated, 20):
        if span.kind != "wait":
            assert span.stop - span.start == pytest.approx(getattr(stated, span.kind), abs=1e-9)
            steps[span.step][span.kind] = span
    assert len(steps) == 20
    for spans in steps.values():
        present = [kind for kind in order if kind in spans]
        assert present == [kind for kind in order if kind != "copy" or way.name != "corpus-loader"]
        for before, after in pairwise(present):
            assert spans[before].stop <= spans[after].start + 1e-9


@given(durations())
def test_no_way_is_faster_than_a_batch_that_is_there(stated: Durations) -> None:
    assert stall(BY_NAME["constant"].period(stated), stated) == 0
    for way in WAYS:
        assert stall(way.period(stated), stated) >= 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute": 0}, r"compute must be in \(0, 1e6\) seconds, got 0"),
        ({"fetch": -1}, r"fetch must be in \[0, 1e6\) seconds, got -1"),
        ({"copy": float("nan")}, "copy must be in .* got nan"),
        ({"slots": 1}, r"slots must be in \[2, 1024\], got 1"),
        ({"workers": 0}, r"workers must be in \[1, 1024\], got 0"),
    ],
)
def test_durations_that_cannot_be(change: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Durations(**change)  # type: ignore[arg-type]
