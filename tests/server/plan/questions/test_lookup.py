"""Lookup is the exact inverse of rows."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidParameter, ResponseTooLarge
from corpus_server.plan import Sampler
from corpus_server.plan.questions import lookup
from corpus_server.plan.questions.lookup import Sighting, Sightings
from corpus_server.work import Budget, ClientLeft, Limits
from tests.plans import NO_EPOCH_ORDERS, Case, small_plans, wild_plan
from tests.reference import Row
from tests.server.plan.test_agreement import interesting_steps

NUM_DRAWS, ROWS_PER_DRAW, ROWS_PER_PLAN = 20, 500, 100
MAX_EPOCHS = 2


def look_up(
    sampler: Sampler,
    corpus: str,
    start: int,
    stop: int,
    epochs: int = 1,
    limit: int | None = None,
    most: int = 2**21,
) -> Sightings:
    budget = Budget(Limits(rows=most))
    return lookup.look_up(sampler, corpus, start, stop, budget, epochs=epochs, limit=limit)


def sighting(row: Row, case: Case, token: int, stop: int | None = None) -> Sighting:
    """What lookup says of a row of the reference that holds tokens of [token, stop), or the one token."""
    begins = sum(case.shard_tokens[row.source][: row.shard]) + row.start
    stage = [each for each in case.document["stages"] if each["from_step"] <= row.plan_step][-1]
    tokens = range(begins, begins + stage.get("seq_len", case.document["seq_len"]) + 1)
    return Sighting(
        epoch=row.epoch,
        step=row.step,
        plan_step=row.plan_step,
        row=row.row,
        shard=case.reference().first_shard[row.source] + row.shard,
        start=row.start,
        offset=max(0, token - begins),
        held=min(tokens.stop, token + 1 if stop is None else stop) - max(begins, token),
        held_at=max(token, begins) - token,
        substitute=row.substitute,
    )


def first_beyond(case: Case, sampler: Sampler, name: str, epochs: int) -> int:
    """A plan step of the last stage at which a source has given all rows of its first epochs, if ever."""
    windows = case.reference().sources[name].num_windows
    last = case.document["stages"][-1]
    if name not in last["mixture"]:
        return int(last["from_step"])
    step = int(last["from_step"])
    names = list(sampler.plan.sources)
    while sampler.timeline.given_before(step)[0][names.index(name)] < epochs * windows:
        step += 1
    return step


@settings(deadline=None, max_examples=60)
@given(small_plans(), st.data())
def test_lookup_finds_every_row_and_no_other(case: Case, data: st.DataObject) -> None:
    """Against going through the whole run: over stages, skips and substitutes."""
    reference, sampler = case.reference(), case.sampler()
    name = data.draw(st.sampled_from(sorted(reference.sources)))
    num_tokens = sum(case.shard_tokens[name])
    start = data.draw(st.integers(0, num_tokens - 1))
    stop = data.draw(st.integers(start + 1, min(num_tokens, start + 9)))
    epochs = data.draw(st.integers(1, 3))
    plan_steps = first_beyond(case, sampler, name, epochs)
    expected = reference.lookup(name, start, stop, epochs=epochs, plan_steps=plan_steps)
    found = look_up(sampler, name, start, stop, epochs=epochs)
    assert found.rows == [sighting(row, case, start, stop) for row in expected]
    assert found.num_found == len(expected)
    limit = data.draw(st.integers(0, 5))
    first = look_up(sampler, name, start, stop, epochs=epochs, limit=limit)
    assert (first.num_found, first.rows) == (found.num_found, found.rows[:limit])


@pytest.mark.parametrize("seed", range(8))
def test_the_first_row_of_a_stage_is_found_once(seed: int) -> None:
    """At a place of an excluded window, in half of the orders: both stages have others stand in for it."""
    stage = {"global_batch_size": 1, "mixture": {"web": 1}}
    stages = [{**stage, "from_step": 0, "exclude": {"web": [[0, 21]]}}, {**stage, "from_step": 7}]
    case = Case({"seq_len": 2, "seed": seed, "stages": stages}, {"web": [41]})
    reference, sampler = case.reference(), case.sampler()
    expected = reference.lookup("web", 0, 41, epochs=1, plan_steps=20)
    assert len(expected) == 20
    found = look_up(sampler, "web", 0, 41, epochs=1)
    assert found.rows == [sighting(row, case, 0, 41) for row in expected]


@pytest.mark.parametrize("number", range(NUM_DRAWS))
def test_lookup_finds_10_000_random_rows(number: int) -> None:
    """Catalogue row 7: of at least 100 plans of any scale, at most 100 rows each; any token of the window."""
    draw = random.Random(1000 + number)
    num_found = 0
    while num_found < ROWS_PER_DRAW:
        case = wild_plan(draw)
        stride = case.document.get("stride", case.document["seq_len"])
        # A token lies in seq_len / stride windows; a plan of tiny sources soon has none of the first epochs.
        if case.document["order"] not in NO_EPOCH_ORDERS and case.document["seq_len"] < 10 * stride:
            num_found += rows_found_again(case, draw)


def rows_found_again(case: Case, draw: random.Random) -> int:
    """Check a few rows of the first epochs at each of some steps; return how many there were."""
    told = f"shards {json.dumps(case.shard_tokens)}, plan {json.dumps(case.document)}"
    reference, sampler = case.reference(), case.sampler()
    steps = interesting_steps(draw, reference)
    checked = 0
    for step in draw.sample(steps, min(len(steps), 25)):
        size = reference.global_batch_size(step)
        for row in draw.sample(range(size), min(size, 3)):
            expected = reference.row_of(reference.plan_step(step), row)
            source, denied = reference.sources[expected.source], reference.denied[-1][expected.source]
            nearly_whole = sum(map(len, denied)) > 0.9 * source.num_windows
            if expected.epoch >= MAX_EPOCHS or checked == ROWS_PER_PLAN or nearly_whole:
                continue
            first = sum(case.shard_tokens[expected.source][: expected.shard]) + expected.start
            token = first + draw.randrange(reference.seq_len(step) + 1)
            found = look_up(sampler, expected.source, token, token + 1, epochs=expected.epoch + 1)
            assert sighting(expected, case, token) in found.rows, f"{expected}, token {token}, {told}"
            checked += 1
    return checked


def test_a_window_that_stands_in_for_thousands_is_found_in_every_row() -> None:
    """9,998 of 10,000 windows denied: each of the two others comes 5,000 times an epoch."""
    stage = {"from_step": 0, "global_batch_size": 100, "mixture": {"web": 1}}
    stage["exclude"] = {"web": [[0, 4 * 9_998]]}
    case = Case({"seq_len": 4, "stride": 4, "stages": [stage], "seed": 4}, {"web": [40_001]})
    reference, sampler = case.reference(), case.sampler()
    expected = reference.lookup("web", 39_999, 40_000, epochs=1, plan_steps=100)
    assert 4_990 <= len(expected) <= 5_010
    assert look_up(sampler, "web", 39_999, 40_000).rows == [sighting(row, case, 39_999) for row in expected]


def test_a_window_that_stands_in_for_too_many_is_refused() -> None:
    """Never a response that leaves rows out: one window is left of 2.5 * 10^11."""
    stage = {"from_step": 0, "global_batch_size": 100, "mixture": {"web": 1}}
    stage["exclude"] = {"web": [[0, 10**12 - 8]]}
    case = Case({"seq_len": 4, "stages": [stage]}, {"web": [10**12 + 1]})
    with pytest.raises(ResponseTooLarge, match="at most 2097152 rows"):
        look_up(case.sampler(), "web", 10**12 - 1, 10**12)


@pytest.mark.parametrize("stop", [4, 200, 401])
def test_what_is_excluded_of_a_source_that_is_not_used_any_more_brings_no_rows(stop: int) -> None:
    stage = {"from_step": 0, "global_batch_size": 10, "mixture": {"web": 1}}
    after = {
        "from_step": 10,
        "global_batch_size": 10,
        "mixture": {"code": 1},
        "exclude": {"web": [[0, stop]]},
    }
    case = Case({"seq_len": 4, "stages": [stage, after]}, {"web": [401], "code": [401]})
    found = look_up(case.sampler(), "web", 399, 400, epochs=3)
    assert [each.plan_step < 10 and not each.substitute for each in found.rows] == [True]


def random_order() -> Case:
    stage = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 1}}
    return Case({"seq_len": 4, "stages": [stage], "order": "random"}, {"web": [401]})


def test_order_random_says_why_it_cannot() -> None:
    with pytest.raises(InvalidParameter) as caught:
        look_up(random_order().sampler(), "web", 0, 1)
    assert caught.value.detail == (
        "a plan with order 'random' cannot be looked up: it draws each row anew, with replacement, so a "
        "token has no place in it"
    )
    found = caught.value.parameter, caught.value.accepted
    assert found == ("plan", "plans of an order with epochs")


def test_a_range_of_too_many_windows_is_refused() -> None:
    case = Case({**random_order().document, "order": "shuffle"}, {"web": [10**12]})
    with pytest.raises(ResponseTooLarge) as caught:
        look_up(case.sampler(), "web", 0, 10**12)
    assert (caught.value.received, caught.value.remedy) == (249_999_999_999, "ask for fewer tokens")
    assert look_up(case.sampler(), "web", 4_001, 4_002, epochs=1000).num_found == 1000


@pytest.mark.parametrize(
    ("num_windows", "epochs", "parameter"), [(12, 1, "stop"), (6, 2, "epochs"), (4, 3, "epochs")]
)
def test_windows_times_epochs_are_bounded(num_windows: int, epochs: int, parameter: str) -> None:
    """The error names what there may be less of: tokens, or epochs if there are several."""
    most = 12 + 256 * 12  # each row may lie in a block of the mixture of its own
    sampler, first = mixed(10**6, 512), 4 * 1000 + 1  # windows begin every 4 tokens, and share one
    found = look_up(sampler, "web", first, first + 4 * num_windows - 3, epochs=epochs, most=most)
    assert found.num_found == num_windows * epochs
    with pytest.raises(ResponseTooLarge) as caught:
        look_up(sampler, "web", first, first + 4 * num_windows + 1, epochs=epochs, most=12)
    assert (caught.value.parameter, caught.value.received) == (parameter, (num_windows + 1) * epochs)


def mixed(num_windows: int, batch_size: int) -> Sampler:
    """Return a plan of version 1: version 2 has no blocks to look up."""
    stage = {"from_step": 0, "global_batch_size": batch_size, "mixture": {"web": 1, "code": 1}}
    document = {"seq_len": 4, "stages": [stage], "version": 1}
    return Case(document, {"web": [4 * num_windows + 1], "code": [401]}).sampler()


def test_ten_thousand_epochs_of_a_mixture_are_counted_and_the_first_rows_returned() -> None:
    """Each epoch in blocks of its own; only those of the rows returned are computed."""
    sampler = mixed(10**6, 512)
    found = look_up(sampler, "web", 4_001, 4_002, epochs=10_000, limit=3)
    assert (found.num_found, [row.epoch for row in found.rows]) == (10_000, [0, 1, 2])
    assert found.rows == look_up(sampler, "web", 4_001, 4_002, epochs=3).rows


def test_rows_in_too_many_blocks_are_refused() -> None:
    """A row in each of so many epochs, whose blocks are apart."""
    sampler = mixed(10**6, 512)
    assert len(look_up(sampler, "web", 4_001, 4_002, epochs=4, most=4 + 4 * 256).rows) == 4
    with pytest.raises(ResponseTooLarge) as caught:
        look_up(sampler, "web", 4_001, 4_002, epochs=10, limit=5, most=10 + 4 * 256)
    assert (caught.value.parameter, caught.value.received) == ("limit", 10 + 5 * 256)
    assert caught.value.remedy is not None
    assert "a lower limit" in caught.value.remedy


@pytest.mark.parametrize(
    ("start", "stop", "epochs", "pairs"),
    [
        (201, 208, 1, 2 + 2 + 2),
        (201, 208, 3, 6 + 2 + 6),
        (37, 46, 1, 3 + 3 + 2),
        (37, 46, 2, 6 + 3 + 4),
    ],
)
def test_windows_that_stand_in_for_others_are_bounded_too(
    start: int, stop: int, epochs: int, pairs: int
) -> None:
    """Of 100 windows the first ten are excluded, so that each other one stands in for one at most."""
    stage = {"from_step": 0, "global_batch_size": 10, "mixture": {"web": 1}, "exclude": {"web": [[0, 40]]}}
    sampler = Case({"seq_len": 4, "stages": [stage]}, {"web": [401]}).sampler()
    expected = look_up(sampler, "web", start, stop, epochs=epochs)
    assert look_up(sampler, "web", start, stop, epochs=epochs, most=pairs + 256) == expected
    with pytest.raises(ResponseTooLarge) as caught:
        look_up(sampler, "web", start, stop, epochs=epochs, most=pairs - 1)
    assert (caught.value.received, caught.value.remedy) == (pairs, "ask for fewer epochs or tokens")


def test_a_plan_has_no_more_epochs_than_its_last_step_reaches() -> None:
    stage = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 1}}
    sampler = Case({"seq_len": 4, "stages": [stage]}, {"web": [4 * 2**10 + 1]}).sampler()
    with pytest.raises(ResponseTooLarge) as caught:
        look_up(sampler, "web", 1, 2, epochs=2**70)
    assert (caught.value.parameter, caught.value.received) == ("epochs", 2**50 + 1)


def test_a_look_up_ends_soon_when_nobody_waits_any_more() -> None:
    asked = 0

    def has_left() -> bool:
        nonlocal asked
        asked += 1
        return asked > 10

    with pytest.raises(ClientLeft):
        lookup.look_up(mixed(10**6, 512), "web", 4_001, 4_002, Budget(has_left=has_left), epochs=4000)
