"""What every kind of rows must do, taken from the registry: against the second implementation, and backwards.

How documents are packed is tested in `test_documents.py` and `test_packing.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan import ROWS, Plan
from corpus_server.plan.named import Registry
from corpus_server.plan.questions.diff import compare
from corpus_server.plan.questions.lookup import look_up
from corpus_server.plan.rows.rows import Rows
from corpus_server.work import Budget, Limits
from tests.packed import PackedCase, plans_of, ranges_of, rows_of
from tests.plans import bounded
from tests.serving import ROOT

STEPS = 20

every_kind = pytest.mark.parametrize("kind", list(ROWS), ids=lambda kind: kind.name)


@every_kind
def test_the_page_defines_every_kind_of_rows(kind: type[Rows]) -> None:
    page = (ROOT / "docs" / "arithmetic.md").read_text().lower()
    assert f"\n## {kind.name}\n" in page or f"\n## rows of {kind.name}\n" in page


@every_kind
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_rows_are_those_of_the_second_implementation(kind: type[Rows], data: st.DataObject) -> None:
    """In each order, over mixtures, stages, exclusions and skipped steps; the plan's id, too."""
    case = data.draw(plans_of(kind))
    second, plan = case.second, case.sampler.plan
    fingerprints = {name: f"sampled-{name}" for name in plan.sources}
    canonical = plan.bind(fingerprints)
    if plan.tabled is not None:
        canonical = canonical.with_digests(case.digests)
    assert second.canonical_json(fingerprints) == canonical.canonical_json
    for step in range(STEPS):
        size = case.sampler.check_part(step)
        assert size == second.global_batch_size(step)
        found = rows_of(case.sampler.pieces(step, range(size)).without_empty())
        assert found == [second.pieces(step, row) for row in range(size)], f"step {step}"


@every_kind
@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.data())
def test_world_size_and_count_change_nothing(kind: type[Rows], step: int, data: st.DataObject) -> None:
    case = data.draw(plans_of(kind))
    sampler, whole = case.sampler, case.rows_of(step)
    world_size = data.draw(st.sampled_from([n for n in range(1, 7) if len(whole) % n == 0]))
    size = len(whole) // world_size
    ranks = [rows_of(sampler.pieces(step, range(k * size, (k + 1) * size))) for k in range(world_size)]
    assert whole == list(itertools.chain(*ranks))
    try:
        sampler.check_part(step, count=3)
    except InvalidParameter:
        return  # the batch size changes
    together = rows_of(sampler.pieces(step, range(len(whole)), count=3))
    assert together == [row for each in range(step, step + 3) for row in case.rows_of(each)]


@every_kind
@settings(deadline=None, max_examples=50)
@given(st.data())
def test_an_exclusion_replaces_only_rows_that_hold_it(kind: type[Rows], data: st.DataObject) -> None:
    """By rows that hold none of it, of the same source; against sets of tokens."""
    case = data.draw(plans_of(kind, skip=False))
    denied: dict[str, set[int]] = {name: set() for name in case.lengths}
    stages = {stage["from_step"]: stage for stage in case.document["stages"]}
    for held, before in zip(case.run(STEPS), case.without("exclude").run(STEPS), strict=True):
        if held.row == 0 and held.plan_step in stages:
            for name, ranges in stages[held.plan_step].get("exclude", {}).items():
                denied[name].update(token for start, stop in ranges for token in range(start, stop))
        assert held.source == before.source
        assert all(denied[held.source].isdisjoint(case.tokens(piece)) for piece in held.pieces)
        if all(denied[held.source].isdisjoint(case.tokens(piece)) for piece in before.pieces):
            assert held.pieces == before.pieces


@every_kind
@settings(deadline=None, max_examples=50)
@given(st.data())
def test_a_look_up_finds_every_row_and_no_other(kind: type[Rows], data: st.DataObject) -> None:
    """Against going through all rows: which row, its beginning, and where most of the tokens stand in it."""
    case = data.draw(plans_of(kind, epochs=True))
    name = data.draw(st.sampled_from(case.sampler.plan.sources))
    start, stop = data.draw(ranges_of(sum(map(sum, case.lengths[name]))))
    skipless = case.with_fields(skip_steps=[])
    expected = []
    bare = skipless.without("exclude")
    for held, before in zip(skipless.run(STEPS), bare.run(STEPS), strict=True):
        touched = [
            place
            for place, piece in enumerate(held.pieces)
            if set(case.tokens(piece)) & {*range(start, stop)}
        ]
        if held.source == name and held.epoch < 2 and touched:
            counts = [len({*case.tokens(piece)} & {*range(start, stop)}) for piece in held.pieces]
            longest = counts.index(max(counts))
            offset = sum(count for _, _, count in held.pieces[:longest])
            offset += max(0, start - case.tokens(held.pieces[longest]).start)
            replaced = any(held.pieces[place] != before.pieces[place] for place in touched)
            place = held.plan_step, held.row, held.epoch
            expected.append((*place, *held.pieces[0][:2], offset, max(counts), replaced))
    found = look_up(case.sampler, name, start, stop, Budget(), epochs=2).rows
    shown = [
        (
            each.plan_step,
            each.row,
            each.epoch,
            each.shard,
            each.start,
            each.offset,
            each.held,
            each.substitute,
        )
        for each in found
        if each.plan_step < STEPS
    ]
    assert shown == expected
    skips = case.sampler.plan.skip_steps
    for each in found:
        skipped = any(first <= each.plan_step < end for first, end in skips.to_json())
        assert each.step == (None if skipped else skips.outside_before(each.plan_step))


@every_kind
@settings(deadline=None, max_examples=30)
@given(st.data())
def test_the_first_step_that_differs_is_found(kind: type[Rows], data: st.DataObject) -> None:
    """With other stages, and with other exclusions, over the same documents."""
    case, other = (data.draw(plans_of(kind, epochs=True)) for _ in range(2))
    last = case.document["stages"][-1]
    for stages in (other.document["stages"], [*case.document["stages"][:-1], {**last, "exclude": {}}]):
        second = case.with_fields(stages=[{**stage, "exclude": {}} for stage in stages])
        assume(set(second.document["stages"][0]["mixture"]) <= set(case.lengths))
        second.accepted()  # stages of the other plan may have lengths that do not divide this one's
        compared = compare(case.sampler, second.sampler, Budget(Limits(rows=2**14)), num_steps=1)
        until = STEPS if compared.compared_until is None else min(STEPS, compared.compared_until)
        differs = [step for step in range(until) if named_rows(case, step) != named_rows(second, step)]
        first = compared.first_step if compared.first_step is None or compared.first_step < until else None
        assert first == (differs[0] if differs else None)


def named_rows(case: PackedCase, step: int) -> list[list[Any]]:
    """The rows of a training step, with names of shards that hold in every plan."""
    return [[(case.shards[shard], *rest) for shard, *rest in row] for row in case.rows_of(step)]


@every_kind
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 9), st.data())
def test_what_is_read_ahead_and_staged_holds_the_rows(
    kind: type[Rows], blocks: int, groups: int, number: int, data: st.DataObject
) -> None:
    """Rows of a group lie in its extents, and a row reads the shards that it is said to read."""
    case = data.draw(plans_of(kind, epochs=True)).with_fields(order=bounded(blocks, groups)).accepted()
    sampler, rows = case.sampler, case.sampler.rows
    every = np.arange(rows.first_row[-1], dtype="uint64")
    exclusions = map(sampler.laid[0].exclusion_at, range(len(sampler.plan.stages)))
    for source, exclusion in itertools.product(range(len(sampler.plan.sources)), exclusions):
        its = every[int(rows.first_row[source]) : int(rows.first_row[source + 1])]
        epochs = np.full(its.size, 3, dtype="uint64")
        found = rows.pieces(source, its, epochs, exclusion)
        pieces, of = found.places, its[found.each_once()]
        shards, which = rows.shards(source, its, epochs, exclusion)
        read = set(zip(its[which].tolist(), shards.tolist(), strict=True))
        assert read == set(zip(of.tolist(), pieces[:, 0].tolist(), strict=True))
        if exclusion is not None and not rows.holds_several:
            continue  # a row that stands in for another one is near, unless all near it are excluded
        extents = sampler.group_extents(source, number)
        assert len(set(extents)) == len(extents)
        held = {(shard, token) for shard, start, stop in extents for token in range(start, stop)}
        for start, stop in (sampler.order.group_rows(source, number) + rows.first_row[source]).tolist():
            for shard, begin, count in pieces[(of >= start) & (of < stop)].tolist():
                assert {(shard, token) for token in range(begin, begin + count)} <= held


@every_kind
def test_one_spelling_of_rows_is_kept(kind: type[Rows]) -> None:
    """The default is left out, so that plans which were made before have the ids that they had."""
    base = {"seq_len": 7, "stages": [{"global_batch_size": 4, "mixture": {"web": 1}}]}
    spelled = {"corpus": "web", "seq_len": 7, "batch_size": 4, "rows": kind.name}
    for rows in (kind.name, kind()) if not kind.required() else ():
        plan = Plan.from_json({**base, "rows": rows})
        assert ("rows" in plan.to_json()) is (kind() != ROWS.default)
        assert plan == Plan.from_json(plan.to_json()) == Plan.spelled(spelled)
    assert kind() != ROWS.default or Plan.from_json(base).rows == kind()


@pytest.mark.parametrize("rows", ["lines", {"windows": {}}], ids=str)
def test_other_rows_are_refused_with_the_choices(rows: object) -> None:
    base = {"seq_len": 7, "stages": [{"global_batch_size": 4, "mixture": {"web": 1}}]}
    with pytest.raises(InvalidPlan) as caught:
        Plan.from_json({**base, "rows": rows})
    names = ", ".join(kind.name for kind in ROWS if not kind.required())
    assert caught.value.parameter == "rows"
    assert caught.value.detail.startswith(f"rows must be one of {names}")
    assert caught.value.detail.endswith(f", got {rows!r}")


def test_rows_that_lack_a_method_are_refused_at_import() -> None:
    class Unfinished(Rows):
        name, sentence = "unfinished", "each row is missing"

    with pytest.raises(TypeError, match=r"rows Unfinished lacks extents, first_row, .*, unit$"):
        Registry(Unfinished)
