"""Rows of documents in plans: each prediction once an epoch, backwards, and with what is excluded.

How a source is packed is tested in `packing/`. Here are mixtures, stages, skips and orders over its rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan import Plan
from corpus_server.plan.dealing import deal
from corpus_server.plan.layouts import LAYOUTS
from corpus_server.plan.questions.diff import compare
from corpus_server.plan.questions.lookup import look_up
from corpus_server.plan.questions.usage import count_usage
from corpus_server.work import Budget, Limits
from tests.packed import PackedCase, packed_plans, ranges_of
from tests.plans import EPOCH_ORDERS, bounded

STEPS = 20
BASE = {"seq_len": 8, "stages": [{"global_batch_size": 4, "mixture": {"web": 1}}], "rows": "documents"}
PERMUTING = ", ".join(EPOCH_ORDERS)


def some(case: PackedCase) -> PackedCase:
    """The case, if its exclusions leave something of every source."""
    try:
        _ = case.sampler
    except InvalidPlan as error:
        assume("exclude leaves none" not in error.detail)
        raise
    return case


@settings(deadline=None, max_examples=50)
@given(packed_plans(exclude=False, skip=False))
def test_every_prediction_comes_once_an_epoch(case: PackedCase) -> None:
    """In each order, over mixtures and stages; no row is longer than its places, or leaves its block."""
    blocks = {piece: block for piece, _, block in case.cut()}
    seen: dict[tuple[str, int], list[Any]] = {}
    rows: dict[tuple[str, int], int] = {}
    for held in case.run(STEPS):
        assert sum(count for _, _, count in held.pieces) <= case.document["seq_len"] + 1
        assert len({blocks[piece] for piece in held.pieces}) == 1
        key = held.source, held.epoch
        seen.setdefault(key, []).extend(held.pieces)
        rows[key] = rows.get(key, 0) + 1
    for number, name in enumerate(case.sampler.plan.sources):
        expected = sorted(piece for piece, its, _ in case.cut() if its == name)
        for (source, epoch), pieces in seen.items():
            assert len(set(pieces)) == len(pieces)
            if source == name and rows[source, epoch] == case.sampler.num_windows[number]:
                assert sorted(pieces) == expected, (name, epoch)


@settings(deadline=None, max_examples=40)
@given(packed_plans(), st.integers(0, 9), st.data())
def test_world_size_and_count_change_nothing(case: PackedCase, step: int, data: st.DataObject) -> None:
    sampler, whole = some(case).sampler, case.rows_of(step)
    world_size = data.draw(st.sampled_from([n for n in range(1, 7) if len(whole) % n == 0]))
    size, ranks = len(whole) // world_size, []
    for rank in range(world_size):
        pieces, borders = sampler.pieces(step, range(rank * size, (rank + 1) * size))
        ranks += [pieces[low:high].tolist() for low, high in itertools.pairwise(borders)]
    assert [[list(piece) for piece in row] for row in whole] == ranks
    try:
        sampler.check_part(step, count=3)
    except InvalidParameter:
        return  # the batch size changes
    together, _ = sampler.pieces(step, range(len(whole)), count=3)
    alone = [piece for each in range(step, step + 3) for row in case.rows_of(each) for piece in row]
    assert list(map(tuple, together.tolist())) == alone


@settings(deadline=None, max_examples=40)
@given(packed_plans(), st.integers(0, 9), st.data())
def test_balanced_ranks_share_the_same_rows(case: PackedCase, step: int, data: st.DataObject) -> None:
    """By what their pieces cost, the excluded ones included; in all steps that are asked for together."""
    plain, sampler = some(case).sampler, case.balanced().sampler
    whole, size = case.rows_of(step), plain.check_part(step)
    world_size = data.draw(st.sampled_from([n for n in range(1, 7) if size % n == 0]))
    costs = [sum(count**2 for *_, count in row) for row in case.without("exclude").rows_of(step)]
    expected = range(size) if world_size == 1 else deal(np.array(costs), world_size).tolist()
    assert case.balanced().rows_of(step) == whole
    low = data.draw(st.integers(0, size - 1))
    high = data.draw(st.integers(low + 1, size))
    count = data.draw(st.integers(1, 3))
    try:
        sampler.check_part(step, count=count, world_size=world_size)
    except InvalidParameter:
        count = 1  # the batch size changes
    numbers = sampler.row_numbers(step, range(low, high), count=count, world_size=world_size)
    assert numbers[0].tolist() == list(expected[low:high])
    found = sampler.pieces(step, range(low, high), count=count, world_size=world_size)
    rows = [row.tolist() for row in np.split(found[0], found[1][1:-1])]
    every = [case.rows_of(each) for each in range(step, step + count)]
    its = np.broadcast_to(numbers, (count, high - low)).tolist()
    assert rows == [list(map(list, every[n][row])) for n in range(count) for row in its[n]]


@settings(deadline=None, max_examples=50)
@given(packed_plans())
def test_an_exclusion_replaces_only_its_pieces_and_by_pieces_of_their_class(case: PackedCase) -> None:
    """All else stays as it was: other pieces of the row, other rows, other sources."""
    skipless = some(case).with_fields(skip_steps=[])
    blocks = {piece: block for piece, _, block in case.cut()}
    longest = case.document["seq_len"] + 1
    denied: dict[str, set[int]] = {name: set() for name in case.lengths}
    stages = {stage["from_step"]: stage for stage in case.document["stages"]}
    for held, before in zip(skipless.run(STEPS), skipless.without("exclude").run(STEPS), strict=True):
        if held.row == 0 and held.plan_step in stages:
            for name, ranges in stages[held.plan_step].get("exclude", {}).items():
                denied[name].update(token for start, stop in ranges for token in range(start, stop))
        assert (held.source, held.epoch) == (before.source, before.epoch)
        assert len(held.pieces) == len(before.pieces)
        assert sum(count for _, _, count in held.pieces) <= longest
        for piece, its in zip(held.pieces, before.pieces, strict=True):
            if denied[held.source].isdisjoint(case.tokens(its)):
                assert piece == its
            elif piece[2]:
                assert denied[held.source].isdisjoint(case.tokens(piece))
                assert blocks[piece] == blocks[its]


@settings(deadline=None, max_examples=50)
@given(packed_plans(), st.data())
def test_a_look_up_finds_every_row_and_no_other(case: PackedCase, data: st.DataObject) -> None:
    """Against going through all rows: which row, where it begins, and where in it the tokens begin."""
    some(case)
    name = data.draw(st.sampled_from(sorted(case.lengths)))
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
            offset = sum(count for _, _, count in held.pieces[: touched[0]])
            offset += max(0, start - case.tokens(held.pieces[touched[0]]).start)
            replaced = any(held.pieces[place] != before.pieces[place] for place in touched)
            place = held.plan_step, held.row, held.epoch
            expected.append((*place, *held.pieces[0][:2], offset, replaced))
    found = look_up(case.sampler, name, start, stop, Budget(), epochs=2).rows
    answered = [
        (each.plan_step, each.row, each.epoch, each.shard, each.start, each.offset, each.substitute)
        for each in found
        if each.plan_step < STEPS
    ]
    assert answered == expected
    skips = case.sampler.plan.skip_steps
    for each in found:
        skipped = any(first <= each.plan_step < end for first, end in skips.to_json())
        assert each.step == (None if skipped else skips.outside_before(each.plan_step))


def test_a_piece_that_stands_in_for_many_is_found_in_all_their_rows() -> None:
    stage = {"global_batch_size": 1, "mixture": {"web": 1}, "exclude": {"web": [[4, 120]]}}
    case = PackedCase({**BASE, "stages": [stage]}, {"web": ((4,) * 30,)})
    found = look_up(case.sampler, "web", 0, 4, Budget()).rows
    assert [each.plan_step for each in found] == [*range(15)]
    assert [case.rows_of(step) for step in range(15)] == [[[(0, 0, 4)] * 2]] * 15


def test_a_place_that_is_left_empty_is_not_where_a_look_up_points() -> None:
    stage = {"global_batch_size": 1, "mixture": {"a": 1}, "exclude": {"a": [[5, 9]]}}
    rows = {"documents": {"block_documents": 2}}
    case = PackedCase({"seq_len": 12, "seed": 0, "rows": rows, "stages": [stage]}, {"a": ((5, 4),)})
    found = look_up(case.sampler, "a", 2, 9, Budget(), epochs=8).rows
    assert [(each.epoch, each.offset) for each in found] == [(epoch, 2) for epoch in range(8)]


@settings(deadline=None, max_examples=30)
@given(packed_plans(), packed_plans())
def test_the_first_step_that_differs_is_found(case: PackedCase, other: PackedCase) -> None:
    """With other stages, and with other exclusions, over the same documents."""
    last = case.document["stages"][-1]
    some(case)
    for stages in (other.document["stages"], [*case.document["stages"][:-1], {**last, "exclude": {}}]):
        second = case.with_fields(stages=[{**stage, "exclude": {}} for stage in stages])
        assume(set(second.document["stages"][0]["mixture"]) <= set(case.lengths))
        compared = compare(case.sampler, second.sampler, Budget(Limits(rows=2**14)), num_steps=1)
        until = STEPS if compared.compared_until is None else min(STEPS, compared.compared_until)
        differs = [step for step in range(until) if named_rows(case, step) != named_rows(second, step)]
        first = compared.first_step if compared.first_step is None or compared.first_step < until else None
        assert first == (differs[0] if differs else None)


def named_rows(case: PackedCase, step: int) -> list[list[Any]]:
    """The rows of a training step, with names of shards that hold in every plan."""
    return [[(case.shards[shard], *rest) for shard, *rest in row] for row in case.rows_of(step)]


@settings(deadline=None, max_examples=60)
@given(packed_plans(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_what_is_read_ahead_and_staged_holds_the_rows(
    case: PackedCase, blocks: int, groups: int, number: int
) -> None:
    """Rows of a group lie in its extents, and rows are numbered shard by shard."""
    sampler = some(case.with_fields(order=bounded(blocks, groups))).sampler
    rows = sampler.rows
    assert rows.shard_row is not None
    assert rows.shard_row.size == len(case.shards) + 1
    every = np.arange(rows.first_row[-1], dtype="uint64")
    exclusions = map(sampler.exclusion_at, range(len(sampler.plan.stages)))
    for source, exclusion in itertools.product(range(len(sampler.plan.sources)), exclusions):
        its = every[int(rows.first_row[source]) : int(rows.first_row[source + 1])]
        epochs = np.full(its.size, 3, dtype="uint64")
        pieces, borders = rows.pieces(source, its, epochs, exclusion)
        of = np.repeat(its, np.diff(borders))
        assert (rows.shard_row[pieces[:, 0]] <= of).all()
        assert (of < rows.shard_row[pieces[:, 0] + 1]).all()
        extents = sampler.group_extents(source, number)
        assert len(set(extents)) == len(extents)
        held = {(shard, token) for shard, start, stop in extents for token in range(start, stop)}
        for start, stop in (sampler.order.group_rows(source, number) + rows.first_row[source]).tolist():
            for shard, begin, count in pieces[(of >= start) & (of < stop)].tolist():
                assert {(shard, token) for token in range(begin, begin + count)} <= held


def test_usage_counts_rows_and_epochs() -> None:
    document = {
        "seq_len": 4,
        "rows": "documents",
        "stages": [{"global_batch_size": 2, "mixture": {"a": 1}}],
    }
    case = PackedCase(document, {"a": ((5, 5, 3), (2, 3))})
    assert case.sampler.num_windows.tolist() == [4]
    used = count_usage(case.sampler, 0, 3, Budget()).sources["a"]
    assert (used.rows, used.tokens, used.epochs) == (6, 24, 1.5)
    assert case.sampler.steps_per_epoch("a") == 2
    assert case.sampler.rows.describe(0) == {"num_pieces": 5, "fill": (4 * 3 + 4 + 2) / 20}


CANONICAL = {"documents": {"block_documents": 2**18}}


@pytest.mark.parametrize("rows", ["documents", {"documents": {}}, CANONICAL], ids=str)
def test_one_spelling_of_rows_is_kept(rows: Any) -> None:
    plan = Plan.from_json({**BASE, "rows": rows})
    assert plan.to_json()["rows"] == CANONICAL
    assert plan == Plan.from_json(plan.to_json())
    assert plan == Plan.spelled({"corpus": "web", "seq_len": 8, "batch_size": 4, "rows": "documents"})


@pytest.mark.parametrize("rows", [{}, {"rows": "windows"}], ids=str)
def test_windows_are_left_out_of_the_document(rows: Any) -> None:
    plan = Plan.from_json({name: value for name, value in BASE.items() if name != "rows"} | rows)
    assert plan.rows == LAYOUTS.default
    assert "rows" not in plan.to_json()


@pytest.mark.parametrize(
    ("change", "parameter", "message"),
    [
        ({"rows": "lines"}, "rows", "rows must be one of windows, documents, got 'lines'"),
        ({"rows": {"windows": {}}}, "rows", "rows must be one of windows, documents, got {'windows': {}}"),
        (
            {"rows": {"documents": {"block_documents": 0}}},
            "rows.documents.block_documents",
            "rows.documents.block_documents must be an integer in [1, 16777216], got 0",
        ),
        (
            {"rows": {"documents": {"balance_ranks": 1}}},
            "rows.documents.balance_ranks",
            "rows.documents.balance_ranks must be true or false, got 1",
        ),
        (
            {
                "rows": {"documents": {"balance_ranks": True}},
                "stages": [{"global_batch_size": 2**17, "mixture": {"web": 1}}],
            },
            "stages[0].global_batch_size",
            "stages[0].global_batch_size must be at most 65536 with balance_ranks, which deals the rows of "
            "each step, got 131072",
        ),
        (
            {"order": "random"},
            "order",
            f"order must be an order that permutes rows ({PERMUTING}) with rows documents, got 'random'",
        ),
        (
            {"order": {"megatron": {"num_samples": 5}}},
            "order",
            f"order must be an order that permutes rows ({PERMUTING}) with rows documents, got 'megatron'",
        ),
        (
            {"stride": 9},
            "stride",
            "stride must be left out or seq_len (8) with rows documents, which have no windows, got 9",
        ),
        (
            {"stages": [{"global_batch_size": 4, "mixture": {"web": 1}, "seq_len": 4}]},
            "stages[0].seq_len",
            "stages[0].seq_len must be left out or 8 with rows documents, which are packed for one length, "
            "got 4",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_rows_of_documents_cannot_carry_is_refused(
    change: dict[str, Any], parameter: str, message: str
) -> None:
    with pytest.raises(InvalidPlan) as caught:
        Plan.from_json({**BASE, **change})
    assert (caught.value.parameter, caught.value.detail) == (parameter, message)


def test_a_corpus_without_predictions_is_refused() -> None:
    with pytest.raises(InvalidPlan, match="corpus 'web' has no document of two tokens"):
        _ = PackedCase(BASE, {"web": ((1, 0), (1,))}).sampler


def test_all_pieces_excluded_are_refused_and_all_of_a_class_leave_their_places_empty() -> None:
    """A tail of 5 tokens has no other of its class; the row keeps its places."""
    stage = {"global_batch_size": 1, "mixture": {"web": 1}, "exclude": {"web": [[2, 3]]}}
    document = {**BASE, "rows": {"documents": {"block_documents": 9}}, "stages": [stage]}
    case = PackedCase(document, {"web": ((5, *[9] * 20),)})
    rows = [row for step in range(21) for row in case.rows_of(step)]
    assert sorted(count for row in rows for _, _, count in row)[:1] == [0]
    stage["exclude"] = {"web": [[0, 185]]}
    with pytest.raises(InvalidPlan, match="exclude leaves none of the 21 pieces of 'web'"):
        _ = PackedCase(document, {"web": ((5, *[9] * 20),)}).sampler
