"""Usage equals counting rows one by one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import ResponseTooLarge
from corpus_server.plan import Sampler
from corpus_server.plan.questions.usage import Usage, count_usage
from corpus_server.work import Budget, Limits
from tests.packed import PackedCase, packed_plans
from tests.plans import PLAIN_ORDERS, Case, small_plans
from tests.reference import ReferencePlan


def usage_between(sampler: Sampler, since: int, step: int, most: int = 2**62) -> Usage:
    return count_usage(sampler, since, step, Budget(Limits(rows=most)))


def counted(reference: ReferencePlan, first: int, last: int) -> tuple[Counter[str], Counter[str], int]:
    """Rows by source of plan steps [first, last): those that training saw, those skipped; skipped steps."""
    seen: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    for plan_step in range(first, last):
        where = skipped if reference.training_step(plan_step) is None else seen
        stage = reference.stages[reference.stage_of(plan_step)]
        where.update(reference.row_of(plan_step, row).source for row in range(stage["global_batch_size"]))
    steps = sum(reference.training_step(plan_step) is None for plan_step in range(first, last))
    return seen, skipped, steps


def counted_tokens(reference: ReferencePlan, begin: int, step: int) -> Counter[str]:
    """Inputs by source of training steps [begin, step)."""
    found: Counter[str] = Counter()
    for each in range(begin, step):
        for row in range(reference.global_batch_size(each)):
            found[reference.window(each, row)[0]] += reference.seq_len(each)
    return found


def rows(usage: Usage) -> tuple[dict[str, int], dict[str, int], int]:
    """The same of a response."""
    return (
        {name: each.rows for name, each in usage.sources.items()},
        {name: each.rows for name, each in usage.skipped.items()},
        usage.skipped_steps,
    )


@settings(deadline=None, max_examples=60)
@given(small_plans(orders=(*PLAIN_ORDERS, "bounded")), st.data())
def test_usage_equals_counting_rows(case: Case, data: st.DataObject) -> None:
    """Before a step, and between two; what was skipped before training step 0 counts as before step 1."""
    reference, sampler = case.reference(), case.sampler()
    step = data.draw(st.integers(0, 40))
    since = data.draw(st.integers(0, step))
    for begin in (0, since):
        usage = usage_between(sampler, begin, step)
        first = reference.plan_step(begin) if begin else 0
        last = reference.plan_step(step) if step > begin else first
        seen, skipped, steps = counted(reference, first, last)
        tokens = counted_tokens(reference, begin, step)
        assert usage.plan_step == reference.plan_step(step)
        assert rows(usage) == (
            {name: seen[name] for name in reference.sources},
            {name: skipped[name] for name in reference.sources},
            steps,
        )
        for name, each in usage.sources.items():
            assert each.tokens == tokens[name]
            size = reference.sources[name].num_windows * case.document["seq_len"]
            epochs = pytest.approx(each.tokens / size)
            assert each.epochs == (epochs if sampler.plan.order.has_epochs else None)
        rows_of_steps = sum(reference.global_batch_size(each) for each in range(begin, step))
        assert sum(each.rows for each in usage.sources.values()) == rows_of_steps


@settings(deadline=None, max_examples=40)
@given(packed_plans(lengths=True), st.data())
def test_epochs_of_rows_of_several_lengths_are_those_of_each_length(
    case: PackedCase, data: st.DataObject
) -> None:
    """A source whose rows of 8 were all seen once, and then half of those of 16, was seen 1.5 times."""
    sampler = case.accepted().sampler
    num_rows = {laid.seq_len: laid.rows.num_rows.tolist() for laid in sampler.laid}
    whole = case.with_fields(skip_steps=[])
    skipped = {step for first, stop in case.document.get("skip_steps", []) for step in range(first, stop)}
    since = data.draw(st.integers(0, 12))
    step = data.draw(st.integers(since, 16))
    usage = usage_between(sampler, since, step)
    begin = sampler.timeline.plan_step(since) if since else 0
    end = usage.plan_step if step > since else begin
    for name, own in (("sources", set(range(begin, end)) - skipped), ("skipped", skipped)):
        expected = dict.fromkeys(sampler.plan.sources, 0.0)
        for held in whole.run(end):
            if held.plan_step in own and held.plan_step >= begin:
                size = num_rows[whole.sampler.seq_len(held.plan_step)]
                expected[held.source] += 1 / size[sampler.plan.sources.index(held.source)]
        found = {source: each.epochs for source, each in getattr(usage, name).items()}
        assert found == pytest.approx(expected)


@settings(deadline=None, max_examples=30)
@given(small_plans(), st.lists(st.integers(0, 10**9), min_size=2, max_size=5))
def test_usage_of_parts_adds_up(case: Case, steps: list[int]) -> None:
    """Also far into a run."""
    sampler = case.sampler()
    steps = sorted(steps)
    parts = [rows(usage_between(sampler, a, b)) for a, b in pairwise(steps)]
    whole = rows(usage_between(sampler, steps[0], steps[-1]))
    for name in whole[0]:
        assert sum(part[0][name] for part in parts) == whole[0][name]
        assert sum(part[1][name] for part in parts) == whole[1][name]
    assert sum(part[2] for part in parts) == whole[2]


def test_usage_of_a_long_run_is_exact() -> None:
    """10^8 steps: integers, not floats; 7/10 of every block of 65,536 is no whole number of rows."""
    stage = {"from_step": 0, "global_batch_size": 65536, "mixture": {"web": 0.7, "code": 0.3}}
    case = Case({"seq_len": 1024, "stages": [stage]}, {"web": [10**12], "code": [10**9]})
    usage = usage_between(case.sampler(), 0, 10**8)
    units = {"code": 19661, "web": 45875}
    assert {name: each.rows for name, each in usage.sources.items()} == {
        name: share * 10**8 for name, share in units.items()
    }
    assert usage.sources["web"].tokens == 45875 * 10**8 * 1024


def test_a_million_skipped_ranges_are_counted() -> None:
    stage = {"from_step": 0, "global_batch_size": 512, "mixture": {"web": 1}}
    skip_steps = [[3 * k, 3 * k + 1] for k in range(10**6)]
    case = Case({"seq_len": 4, "stages": [stage], "skip_steps": skip_steps}, {"web": [10**9]})
    usage = usage_between(case.sampler(), 0, 10**7)
    assert (usage.skipped_steps, usage.skipped["web"].rows) == (10**6, 512 * 10**6)
    assert usage.sources["web"].rows == 512 * 10**7


def test_skipped_ranges_of_a_mixture_are_counted_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges in a stage of one source are not counted against it."""
    alone = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 1}}
    both = {"from_step": 30, "global_batch_size": 6, "mixture": {"web": 1, "code": 1}}
    skip_steps = [[k, k + 1] for k in (0, 3, 6, 9, 12, 29, 32, 35)]
    case = Case(
        {"seq_len": 4, "stages": [alone, both], "skip_steps": skip_steps}, {"web": [401], "code": [401]}
    )
    most = 2 * 2 * 256  # two ranges of a mixture, with a begin and an end each
    assert usage_between(case.sampler(), 0, 50, most).skipped_steps == 8
    more = case.with_fields(skip_steps=[*skip_steps, [38, 39]]).sampler()
    with pytest.raises(ResponseTooLarge) as caught:
        usage_between(more, 0, 50, most)
    error = caught.value
    assert (error.parameter, error.received) == ("step", 3 * 2 * 256)
    assert error.remedy == "ask for parts with since= and add them up"
    assert usage_between(more, 26, 50, most).skipped_steps == 2
