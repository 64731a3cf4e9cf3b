"""Exclusions: no denied token is shown again, and no other row changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidPlan
from tests.arithmetic import chi_square_p_value
from tests.plans import EPOCH_ORDERS, PLAIN_ORDERS, Case, run_of, small_plans, source_numbers, token_ranges
from tests.reference import ReferencePlan


def denied_tokens(case: Case, plan_step: int) -> dict[str, set[int]]:
    """Tokens that no row of a plan step may hold, one by one."""
    found: dict[str, set[int]] = {name: set() for name in case.shard_tokens}
    for stage in case.document["stages"]:
        if stage["from_step"] <= plan_step:
            for name, ranges in stage.get("exclude", {}).items():
                found[name].update(token for start, stop in ranges for token in range(start, stop))
    return found


def tokens_of(case: Case, name: str, shard: int, start: int) -> set[int]:
    """Corpus-wide tokens of a window."""
    first = sum(case.shard_tokens[name][:shard]) + start
    return set(range(first, first + case.document["seq_len"] + 1))


@settings(deadline=None, max_examples=60)
@given(small_plans(orders=(*PLAIN_ORDERS, "bounded")))
def test_only_rows_that_touch_an_exclusion_change_and_they_touch_none(case: Case) -> None:
    """Against sets of tokens; the substitute is of the same source, all other windows are the same."""
    with_them, without = case.sampler(), case.without_exclusions().sampler()
    names, first_shards = case.names(), case.first_shards()
    for step in range(case.document["stages"][-1]["from_step"] + 8):
        denied = denied_tokens(case, with_them.timeline.plan_step(step))
        shown, before = with_them.locate(step)[0], without.locate(step)[0]
        numbers = source_numbers(case, shown)
        # Where a window is read in parts, it is replaced as a whole.
        seq_len = with_them.seq_len(step)
        at = seq_len * (np.arange(len(shown)) % (case.document["seq_len"] // seq_len))
        shown[:, 1], before[:, 1] = shown[:, 1] - at, before[:, 1] - at
        assert (numbers == source_numbers(case, before)).all()
        for number, now, then in zip(numbers, shown.tolist(), before.tolist(), strict=True):
            name = names[number]
            now[0], then[0] = now[0] - first_shards[name], then[0] - first_shards[name]
            assert not tokens_of(case, name, *now) & denied[name]
            if not tokens_of(case, name, *then) & denied[name]:
                assert now == then


@settings(deadline=None, max_examples=60)
@given(small_plans(max_stages=2, skip=False), st.data())
def test_denying_something_leaves_every_earlier_row_as_it_was(case: Case, data: st.DataObject) -> None:
    last = case.document["stages"][-1]
    cut = data.draw(st.integers(last["from_step"] + 1, last["from_step"] + 10))
    name = data.draw(st.sampled_from(sorted(last["mixture"])))
    added = {**last, "from_step": cut}
    added["exclude"] = {name: [data.draw(token_ranges(sum(case.shard_tokens[name])))]}
    longer = case.with_fields(stages=[*case.document["stages"], added])
    reference = ReferencePlan(longer.document, case.shard_tokens)
    if sum(map(len, reference.denied[-1][name])) == reference.sources[name].num_windows:
        with pytest.raises(InvalidPlan, match=name):
            longer.sampler()
    else:
        assert run_of(longer, cut) == run_of(case, cut)


def one(exclude: Any, num_tokens: int = 4001, **fields: Any) -> Case:
    """One source of 1,000 windows of five tokens, every four."""
    stage = {"from_step": 0, "global_batch_size": 500, "mixture": {"web": 1}, "exclude": {"web": exclude}}
    return Case({"seq_len": 4, "stages": [stage], **fields}, {"web": [num_tokens]})


@pytest.mark.parametrize("order", EPOCH_ORDERS)
def test_the_others_come_as_before_and_substitutes_are_spread_without_repetition(order: str) -> None:
    """An epoch with 300 of 1,000 windows denied: 700 once, and 300 different ones a second time."""
    case = one([[0, 1200]], order=order)  # window 299 ends with token 1,200, which is allowed
    sampler = case.sampler()
    seconds = []
    for epoch in range(3):
        starts = np.concatenate([sampler.locate(2 * epoch + k)[0, :, 1] for k in range(2)]) // 4
        seen, times = np.unique(starts, return_counts=True)
        assert seen.tolist() == list(range(300, 1000))
        assert np.bincount(times, minlength=3).tolist() == [0, 400, 300]
        seconds.append(set(seen[times == 2].tolist()))
    assert seconds[0] != seconds[1] != seconds[2]


def test_more_denied_than_allowed_goes_round_the_others_evenly() -> None:
    """900 of 1,000 denied: each of the other 100 comes ten times an epoch, in mixed order."""
    starts = np.concatenate([one([[0, 3600]]).sampler().locate(k)[0, :, 1] for k in range(2)]) // 4
    assert np.bincount(starts, minlength=1000)[900:].tolist() == [10] * 100


def test_substitutes_are_uniform() -> None:
    """Catalogue row 6: of 10^12 tokens the first half denied, the substitutes lie anywhere in the other."""
    document = one([[0, 5 * 10**11]], seed=3).document
    starts = Case(document, {"web": [10**12]}).sampler().locate(10**8, count=40)[..., 1].reshape(-1)
    assert starts.min() >= 5 * 10**11
    cells = (starts - 5 * 10**11) // 10**10
    assert chi_square_p_value(np.bincount(cells, minlength=50)) > 1e-4


@pytest.mark.parametrize("exclude", [{}, {"web": []}], ids=str)
def test_nothing_excluded_is_left_out_of_the_document(exclude: dict[str, Any]) -> None:
    case = one([])
    case.document["stages"][0]["exclude"] = exclude
    assert "exclude" not in case.sampler().plan.to_json()["stages"][0]


@pytest.mark.parametrize("stride", [4, 5, 8, 1])
@pytest.mark.parametrize(("start", "stop"), [(0, 4001), (0, 4000), (1, 4001), (4, 3998)])
def test_a_source_denied_whole_is_refused(start: int, stop: int, stride: int) -> None:
    """Whole in windows: also where tokens between or beside them are left over."""
    case = one([[start, stop]], stride=stride)
    reference = case.reference()
    if sum(map(len, reference.denied[0]["web"])) < reference.sources["web"].num_windows:
        reference_starts = {reference.window(0, row)[2] for row in range(500)}
        assert {start for _, start in run_of(case, 1)[0]} == reference_starts
        return
    with pytest.raises(InvalidPlan) as caught:
        case.sampler()
    assert caught.value.detail == (
        f"exclude leaves none of the {reference.sources['web'].num_windows} windows of 'web'; "
        "leave the source out of the mixture instead"
    )
    assert caught.value.parameter == "stages[].exclude.web"


def test_a_range_beyond_the_corpus_is_refused() -> None:
    with pytest.raises(InvalidPlan) as caught:
        one([[5, 7], [4000, 4002]]).sampler()
    error = caught.value
    assert error.detail == "stages[].exclude.web reaches to token 4002, the corpus has 4001"
    found = error.parameter, error.received, error.accepted
    assert found == ("stages[].exclude.web", 4002, "at most 4001")


def test_one_window_left_is_enough() -> None:
    case = one([[0, 2000], [2005, 4001]], stride=5)
    assert set(run_of(case, 1)[0]) == {(0, 2000)}


def test_cumulative_exclusions_may_only_together_deny_a_source_whole() -> None:
    first = one([[0, 2000]]).document["stages"][0]
    second = {**first, "from_step": 10, "exclude": {"web": [[2000, 4001]]}}
    case = Case({"seq_len": 4, "stages": [first, second]}, {"web": [4001]})
    with pytest.raises(InvalidPlan, match="web"):
        case.sampler()


def test_a_hundred_thousand_ranges_agree_with_the_reference() -> None:
    """Over 10^12 tokens in three shards; rows that are denied and rows that are not."""
    draw = random.Random(5)
    ranges = [
        [start, start + draw.choice([1, 10**7])] for start in draw.sample(range(10**12 - 10**7), 100_000)
    ]
    stage = {"from_step": 0, "global_batch_size": 512, "mixture": {"web": 1}, "exclude": {"web": ranges}}
    case = Case({"seq_len": 1024, "stages": [stage]}, {"web": [10**11, 5, 9 * 10**11 - 5]})
    reference = case.reference()
    rows = [reference.row_of(10**8, row) for row in range(40)]
    located = case.sampler().locate(10**8)[0]
    assert located[:40].tolist() == [[row.shard, row.start] for row in rows]
    assert {row.substitute for row in rows} == {True, False}
