"""Rows of documents in plans: each prediction once an epoch, ranks that are balanced, and what is excluded.

How a source is packed is tested in `test_packing.py`, and what all kinds of rows must do in `test_rows.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan import Plan
from corpus_server.plan.dealing import deal
from corpus_server.plan.questions.lookup import look_up
from corpus_server.plan.questions.usage import count_usage
from corpus_server.work import Budget
from tests.packed import PackedCase, packed_plans
from tests.plans import EPOCH_ORDERS

STEPS = 20
BASE = {"seq_len": 8, "stages": [{"global_batch_size": 4, "mixture": {"web": 1}}], "rows": "documents"}
PERMUTING = ", ".join(EPOCH_ORDERS)


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
@given(packed_plans(lengths=True), st.integers(0, 9), st.data())
def test_balanced_ranks_share_the_same_rows(case: PackedCase, step: int, data: st.DataObject) -> None:
    """By what their pieces cost, the excluded ones included; in all steps that are asked for together."""
    plain, sampler = case.accepted().sampler, case.balanced().sampler
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
    skipless = case.accepted().with_fields(skip_steps=[])
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


@pytest.mark.parametrize(
    ("change", "parameter", "message"),
    [
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
            {
                "seq_len": 2**17,
                "stages": [
                    {
                        "from_step": n,
                        "global_batch_size": 2**n,
                        "seq_len": 2 ** (17 - n),
                        "mixture": {"web": 1},
                    }
                    for n in range(17)
                ],
            },
            "stages[].seq_len",
            "stages[].seq_len must be of at most 16 values with the plan's, with rows documents, got "
            f"{tuple(2**n for n in range(17, 0, -1))}",
        ),
        (
            {
                "seq_len": 2,
                "rows": {"documents": {"begin": True}},
                "stages": [{"global_batch_size": 4, "seq_len": 1, "mixture": {"web": 1}}],
            },
            "stages[0].seq_len",
            "stages[0].seq_len must be at least 2 where each row begins with a document, got 1",
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
