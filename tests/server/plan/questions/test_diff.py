"""Comparing plans: fields by name, and rows as if every step had been looked at."""

from __future__ import annotations

import json
from functools import lru_cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidPlan, ResponseTooLarge
from corpus_server.plan import Plan, Sampler
from corpus_server.plan.questions.diff import (
    FieldChange,
    RowComparison,
    StepChange,
    changed_fields,
    compare,
    count_equal_steps,
)
from corpus_server.plan.stage import MAX_STEP
from corpus_server.work import Budget, Limits
from tests.server.plan.drawn import Draw, accepted_plan, draw_plan, draw_ranges
from tests.server.plan.drawn import sampler_of as random_sampler


def compare_rows(
    a: Plan,
    b: Plan,
    tokens: dict[str, list[int]],
    *,
    num_steps: int = 10,
    max_rows: int = 2**24,
    num_pieces: int = 1,
) -> RowComparison:
    """Compare about `max_rows` rows of each plan at most, in so many pieces, each of which costs 512."""
    budget = Budget(Limits(rows=2 * max_rows + 512 * num_pieces))
    return compare(Sampler(a, tokens), Sampler(b, tokens), budget, num_steps=num_steps)


SHARD_TOKENS = {"code": [300], "math": [150, 7, 90], "web": [120, 400]}
WEB = {"from_step": 0, "global_batch_size": 4, "mixture": {"web": 1.0}}
BOTH = {"from_step": 0, "global_batch_size": 4, "mixture": {"web": 0.5, "code": 0.5}}


def plan(*stages: dict[str, Any], **fields: Any) -> Plan:
    """Return a bound plan; the fingerprints are those of its sources unless given."""
    document = {"seq_len": 8, "seed": 1, "stages": stages or [WEB], **fields}
    names = {name for stage in document["stages"] for name in stage["mixture"]}
    document.setdefault("fingerprints", {name: f"sampled-{name}" for name in names})
    return Plan.from_json(document)


def stage(base: dict[str, Any], from_step: int, **fields: Any) -> dict[str, Any]:
    return {**base, "from_step": from_step, **fields}


CASES: list[tuple[str, Plan, Plan, list[tuple[str, Any, Any]], int | None]] = [
    ("same", plan(), plan(), [], None),
    ("seed", plan(), plan(seed=2), [("seed", 1, 2)], 0),
    ("seq_len", plan(stride=8), plan(stride=8, seq_len=9), [("seq_len", 8, 9)], 0),
    (
        "order",
        plan(stride=1),
        plan(order="random"),
        [("order", "shuffle", "random")],
        0,
    ),
    (
        "order-nested",
        *(plan(order={"shuffle": {"block_windows": 4, "group_blocks": blocks}}) for blocks in (2, 3)),
        [("order.shuffle.group_blocks", 2, 3)],
        0,
    ),
    (
        "weights",
        plan(BOTH),
        plan(stage(BOTH, 0, mixture={"web": 0.75, "code": 0.25})),
        [
            ("stages[from_step=0].mixture.code", 0.5, 0.25),
            ("stages[from_step=0].mixture.web", 0.5, 0.75),
        ],
        0,
    ),
    (
        "new-stage",
        plan(),
        plan(WEB, stage(WEB, 30)),
        [("stages[from_step=30]", None, stage(WEB, 30))],
        30,
    ),
    (
        "moved-stage",
        plan(WEB, stage(BOTH, 50), fingerprints={"web": "a", "code": "b"}),
        plan(WEB, stage(BOTH, 40), fingerprints={"web": "a", "code": "b"}),
        [
            ("stages[from_step=40]", None, stage(BOTH, 40)),
            ("stages[from_step=50]", stage(BOTH, 50), None),
        ],
        40,
    ),
    (
        "later-stage",
        plan(WEB, stage(WEB, 10), stage(WEB, 20), skip_steps=[[3, 5]]),
        plan(WEB, stage(WEB, 10), stage(WEB, 20, exclude={"web": [[5, 9]]}), skip_steps=[[3, 5]]),
        [("stages[from_step=20].exclude.web", [], [[5, 9]])],
        18,
    ),
    (
        "exclude",
        plan(stage(WEB, 0, exclude={"web": [[1, 2], [5, 7]]})),
        plan(stage(WEB, 0, exclude={"web": [[5, 7], [9, 10]]})),
        [("stages[from_step=0].exclude.web", [[1, 2]], [[9, 10]])],
        0,
    ),
    ("skip", plan(), plan(skip_steps=[[12, 14]]), [("skip_steps", [], [[12, 14]])], 12),
    (
        "skip-longer",
        plan(skip_steps=[[2, 4], [12, 14]]),
        plan(skip_steps=[[2, 4], [12, 15]]),
        [("skip_steps", [[12, 14]], [[12, 15]])],
        10,
    ),
    (
        "content",
        plan(WEB, stage(BOTH, 7), fingerprints={"web": "a", "code": "b"}),
        plan(WEB, stage(BOTH, 7), fingerprints={"web": "a", "code": "c"}),
        [("fingerprints.code", "b", "c")],
        7,
    ),
]


@pytest.mark.parametrize(
    ("a", "b", "changes", "equal_steps"), [pytest.param(*case, id=name) for name, *case in CASES]
)
def test_fields_and_how_far_documents_tell_that_rows_are_equal(
    a: Plan, b: Plan, changes: list[tuple[str, Any, Any]], equal_steps: int | None
) -> None:
    assert changed_fields(a, b, Budget()) == [change(name, one, other) for name, one, other in changes]
    assert changed_fields(b, a, Budget()) == [change(name, other, one) for name, one, other in changes]
    assert count_equal_steps(a, b) == count_equal_steps(b, a) == equal_steps


def change(name: str, a: Any, b: Any) -> FieldChange:
    """Return a change of a field; of lists of ranges, with their numbers."""
    if (isinstance(a, list) and name.partition(".")[2].startswith("exclude")) or name == "skip_steps":
        return FieldChange(field=name, a=a, b=b, num_a=len(a), num_b=len(b))
    return FieldChange(field=name, a=a, b=b)


def test_a_stage_that_is_new_counts_its_ranges() -> None:
    for ranges, counted in (([[5, 9]], "1 range"), ([[5, 9], [12, 13]], "2 ranges")):
        new = plan(stage(WEB, 0), stage(WEB, 20, exclude={"web": ranges}))
        told = [change.b for change in changed_fields(plan(stage(WEB, 0)), new, Budget())]
        assert told[0]["exclude"] == {"web": counted}


def test_of_many_ranges_the_first_are_shown_with_their_number() -> None:
    """A response of a megabyte must not take forty."""
    ranges = [[3 * k, 3 * k + 1] for k in range(400_000)]
    (found,) = changed_fields(
        plan(skip_steps=ranges), plan(skip_steps=[*ranges[5:], [2 * 10**6, 3 * 10**6]]), Budget()
    )
    assert found == FieldChange(
        field="skip_steps", a=ranges[:5], b=[[2 * 10**6, 3 * 10**6]], num_a=5, num_b=1
    )
    (found,) = changed_fields(plan(skip_steps=ranges), plan(), Budget())
    assert (found.a, found.b, found.num_a, found.num_b) == (ranges[:100], [], 400_000, 0)


def test_more_fields_than_a_response_may_hold_are_refused() -> None:
    stages = [[stage(WEB, 10 * k, global_batch_size=size) for k in range(400)] for size in (4, 5)]
    excluding = [{**each, "exclude": {"web": [[k, k + 1]]}} for k, each in enumerate(stages[1])]
    more = [{**each, "mixture": {"web": 1, "code": 1}} for each in excluding]
    plans = plan(*stages[0]), plan(*more)
    fields = changed_fields(*plans, Budget(max_response_bytes=200_000))
    assert len({each.field for each in fields}) == len(fields) > 1600
    with pytest.raises(ResponseTooLarge, match="at most 80000 bytes"):
        changed_fields(*plans, Budget(max_response_bytes=80_000))


@lru_cache(maxsize=8)
def sampler_of(document: str) -> Sampler:
    return Sampler(Plan.from_json(json.loads(document)), SHARD_TOKENS)


def rows_of(made: Plan, step: int) -> list[tuple[str, int, int, int]]:
    """Return corpus, shard, start and length of every row of a step."""
    shards = [(name, k) for name in made.sources for k in range(len(SHARD_TOKENS[name]))]
    sampler = sampler_of(made.canonical_json)
    located, length = sampler.locate(step)[0].tolist(), sampler.seq_len(step) + 1
    return [(*shards[shard], start, length) for shard, start in located]


def differing_rows(a: Plan, b: Plan, step: int) -> list[int]:
    """Return the rows of a step that differ, looked at one by one."""
    one, other = rows_of(a, step), rows_of(b, step)
    shared = min(len(one), len(other))
    return [row for row in range(max(len(one), len(other))) if row >= shared or one[row] != other[row]]


ranges = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 6)).map(lambda p: [p[0], p[0] + p[1]]), max_size=2
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw plans that are often alike."""
    from_steps = [0, *sorted(draw(st.sets(st.sampled_from([5, 9, 20]), max_size=2)))]
    mixtures = st.sampled_from(
        [{"web": 1.0}, {"web": 1.0}, {"web": 0.5, "code": 0.5}, {"math": 0.2, "web": 0.8}]
    )
    stages = [
        {
            "from_step": from_step,
            "global_batch_size": draw(st.sampled_from([4, 4, 4, 6])),
            "mixture": draw(mixtures),
        }
        for from_step in from_steps
    ]
    used = {name for each in stages for name in each["mixture"]}
    for each in stages:
        if "web" in used and (excluded := draw(ranges)):
            each["exclude"] = {"web": excluded}
    seq_len = draw(st.sampled_from([8, 8, 8, 8, 9]))
    for each in stages:
        if seq_len == 8 and draw(st.integers(0, 3)) == 0:
            each["seq_len"] = 4
    return plan(
        *stages,
        seq_len=seq_len,
        stride=8,
        seed=draw(st.sampled_from([1, 1, 1, 2])),
        skip_steps=draw(ranges),
    )


@given(a=plans(), b=plans(), num_steps=st.integers(1, 6), max_rows=st.sampled_from([12, 30, 200, 400]))
@settings(max_examples=100, deadline=None)
def test_rows_are_those_that_differ_one_by_one(a: Plan, b: Plan, num_steps: int, max_rows: int) -> None:
    compared = compare_rows(a, b, SHARD_TOKENS, num_steps=num_steps, max_rows=max_rows, num_pieces=200)
    assert compared.equal_steps == count_equal_steps(a, b)
    if compared.equal_steps is None:
        assert compared.steps == ()
        assert all(not differing_rows(a, b, step) for step in range(60))
        return
    until = compared.compared_until
    assert until is not None
    assert until > compared.equal_steps
    near = min(until, 130)
    expected = [(step, rows) for step in range(near) if (rows := differing_rows(a, b, step))]
    found = [
        (change.step, [row for start, stop in change.rows for row in range(start, stop)])
        for change in compared.steps
    ]
    assert [each for each in found if each[0] < near] == expected
    assert len(found) <= num_steps
    for change in compared.steps:
        assert change.num_rows == sum(stop - start for start, stop in change.rows)
        timelines = [sampler_of(each.canonical_json).timeline for each in (a, b)]
        assert change.plan_steps == tuple(timeline.plan_step(change.step) for timeline in timelines)
    if len(found) < num_steps:
        # Where only exclusions differ it sees much further than it was allowed to look.
        assert (until - compared.equal_steps) * 6 >= max_rows


@given(
    excluded=st.tuples(ranges, ranges),
    mixture=st.sampled_from([{"web": 1.0}, {"web": 0.5, "code": 0.5}]),
    from_step=st.sampled_from([0, 3, 30]),
    extra_stage=st.booleans(),
    skips=ranges,
)
@settings(max_examples=30, deadline=None)
def test_where_only_exclusions_differ_no_step_is_missed(
    excluded: tuple[list[list[int]], list[list[int]]],
    mixture: dict[str, float],
    from_step: int,
    extra_stage: bool,
    skips: list[list[int]],
) -> None:
    first = {"from_step": 0, "global_batch_size": 4, "mixture": mixture}
    made = []
    for number, ranges_of_web in enumerate(excluded):
        exclude = {"exclude": {"web": ranges_of_web}} if ranges_of_web else {}
        if number == 0 and extra_stage:  # for one source a stage more changes nothing by itself
            made.append(plan({**first, **exclude}, skip_steps=skips))
        elif from_step:
            made.append(plan(first, stage(first, from_step, **exclude), skip_steps=skips))
        else:
            made.append(plan({**first, **exclude}, skip_steps=skips))
    compared = compare_rows(*made, SHARD_TOKENS, num_steps=100, max_rows=400, num_pieces=1000)
    if compared.equal_steps is None:
        return
    until = compared.compared_until
    assert until is not None
    found = {change.step for change in compared.steps}
    assert {step for step in range(min(until, 120)) if differing_rows(*made, step)} == {
        step for step in found if step < 120
    }


def test_a_denied_document_is_found_in_a_trillion_tokens() -> None:
    """Without looking at the steps before it: rows of half a billion windows come first."""
    tokens = {"code": [10**11], "web": [10**12]}
    mixed = {"from_step": 0, "global_batch_size": 512, "mixture": {"web": 0.5, "code": 0.5}}
    a = plan(mixed, seq_len=1024)
    b = plan({**mixed, "exclude": {"web": [[10**9, 10**9 + 5]]}}, seq_len=1024)
    compared = compare_rows(a, b, tokens, num_steps=3)
    assert len(compared.steps) == 3
    assert compared.steps[0].step > 10**5
    assert [change.num_rows for change in compared.steps] == [1, 1, 1]
    for change in compared.steps:
        ((row, _),) = change.rows
        assert Sampler(a, tokens).locate(change.step)[0, row].tolist() == [0, 10**9 - 10**9 % 1024] or (
            Sampler(a, tokens).locate(change.step)[0, row, 1] // 1024 == 10**9 // 1024
        )


@pytest.mark.parametrize(
    "options", [{}, {"num_steps": 2}, {"num_steps": 40}, {"num_steps": 9, "max_rows": 12}], ids=str
)
def test_rows_of_another_length_all_differ(options: dict[str, int]) -> None:
    """Ten steps unless asked otherwise."""
    compared = compare_rows(plan(stride=8), plan(stride=8, seq_len=9), SHARD_TOKENS, **options)
    num_steps = min(options.get("num_steps", 10), options.get("max_rows", 160) // 4)
    whole = [StepChange(step=k, plan_steps=(k, k), num_rows=4, rows=((0, 4),)) for k in range(num_steps)]
    assert compared == RowComparison.of(0, num_steps, tuple(whole))
    assert compared.first_step == 0


@pytest.mark.parametrize(
    ("max_rows", "until"), [(1, 5), (4, 6), (7, 6), (8, 7), (99, 29), (100, 30), (103, 30)]
)
def test_about_so_many_rows_are_compared(max_rows: int, until: int) -> None:
    """From step 5 on, where the documents differ and the rows do not; steps have four rows."""
    one, other = (plan(WEB, *more, order="random", stride=1) for more in ([], [stage(WEB, 5)]))
    compared = compare_rows(one, other, SHARD_TOKENS, num_steps=2, max_rows=max_rows)
    assert compared == RowComparison.of(5, until, ())
    assert compared.first_step is None


def test_the_last_step_of_a_plan_is_compared() -> None:
    one, other = (
        plan(WEB, stage(WEB, MAX_STEP - 3), *more, order="random", stride=1)
        for more in ([], [stage(WEB, MAX_STEP - 1)])
    )
    compared = compare_rows(one, other, SHARD_TOKENS, num_steps=2)
    assert compared == RowComparison.of(MAX_STEP - 1, MAX_STEP + 1, ())


def test_a_change_far_away_is_found_at_once() -> None:
    """What the documents tell costs nothing: 10^11 steps are not looked at."""
    far = 10**11
    compared = compare_rows(
        plan(), plan(skip_steps=[[far, far + 1]]), SHARD_TOKENS, num_steps=2, max_rows=100
    )
    assert (compared.equal_steps, compared.first_step) == (far, far)
    assert compared.steps[0].plan_steps == (far, far + 1)


class Spent(Budget):
    """A budget that fails where a question spends without an end."""

    def __init__(self, rows: int) -> None:
        super().__init__(Limits(rows=rows))
        self.num_spends = 0

    def spend(self, *, rows: int = 0, num_bytes: int = 0) -> None:
        super().spend(rows=rows, num_bytes=num_bytes)
        self.num_spends += 1
        assert self.num_spends <= self.limits.rows // 64


@pytest.mark.parametrize("first", range(0, 100, 50))
@pytest.mark.parametrize("rows", [0, 2**10, 2**14])
def test_a_diff_of_random_plans_ends_within_its_budget(first: int, rows: int) -> None:
    """Of two plans over the same corpora, and of plans that exclude other tokens alone."""
    for seed in range(first, first + 50):
        document, shard_tokens, sampler = accepted_plan(Draw(seed))
        for other in (draw_plan(Draw(seed + 1))[0], excluding(Random(seed), document, shard_tokens)):
            try:
                against = random_sampler(other, shard_tokens)
            except (InvalidPlan, KeyError):  # of other corpora
                continue
            budget = Spent(rows)
            found = compare(sampler, against, budget)
            assert budget.rows <= rows, f"seed {seed}"
            if found.equal_steps is None:
                assert found.compared_until is None
            else:
                assert found.compared_until is not None
                assert found.compared_until >= found.equal_steps


def excluding(random: Random, document: dict[str, Any], tokens: dict[str, list[int]]) -> dict[str, Any]:
    """Return a plan that differs in what its first stage excludes."""
    first, *later = document["stages"]
    excluded = {name: draw_ranges(random, sum(tokens[name])) for name in first["mixture"]}
    return {**document, "stages": [{**first, "exclude": excluded}, *later]}


def test_excluded_windows_that_would_not_fit_into_memory_are_not_listed() -> None:
    """10^12 windows are excluded: the budget ends long before that."""
    tokens = {"web": [2**44]}
    plans = [plan({**WEB, "exclude": {"web": [[0, 2**43 + more]]}}) for more in (0, 1000)]
    budget = Spent(2**16)
    a, b = (Sampler(each, tokens) for each in plans)
    assert compare(a, b, budget).equal_steps == 0
    assert budget.rows <= 2**16
