"""(plan, step, rank) to windows: against the slow reference, over ranks, over epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan import Plan, Sampler
from corpus_server.plan.stage import MAX_GLOBAL_BATCH_SIZE, MAX_STEP
from tests.arithmetic import chi_square_p_value
from tests.plans import EPOCH_ORDERS, PLAIN_ORDERS, REPEATING_ORDERS, STRIDES, bounded
from tests.reference import one_source, window_of_row


def sampler(document: dict[str, Any], shard_tokens: list[int]) -> Sampler:
    return Sampler(Plan.from_json(document), {"web": shard_tokens})


@pytest.mark.parametrize("order", PLAIN_ORDERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 24])
def test_the_ranks_of_steps_are_the_slices_of_the_global_batch(order: str, world_size: int) -> None:
    """Catalogue row 2, arithmetic half; five steps of 24 rows cross epochs of 57 windows."""
    subject = sampler(one_source("web", 8, 24, order=order, stride=STRIDES.get(order, 8)), [300, 169])
    whole = subject.locate(3, count=5)
    assert whole.shape == (5, 24, 2)
    parts = [subject.locate(3, count=5, rank=r, world_size=world_size) for r in range(world_size)]
    assert (np.concatenate(parts, axis=1) == whole).all()


@given(step=st.integers(0, 2**40 - 20), count=st.integers(1, 20), order=st.sampled_from(PLAIN_ORDERS))
def test_several_steps_at_once_are_the_steps_one_by_one(step: int, count: int, order: str) -> None:
    subject = sampler(one_source("web", 4, 10, order=order), [97, 41])
    together = subject.locate(step, count=count)
    assert together.shape == (count, 10, 2)
    for k in range(count):
        assert (subject.locate(step + k)[0] == together[k]).all()


@pytest.mark.parametrize("num_windows", [1, 3, 7, 1000])
def test_a_step_of_any_number_of_epochs_agrees_with_the_reference(num_windows: int) -> None:
    """From 2,400 epochs in a step to a fraction of one."""
    document, shard_tokens = one_source("web", 4, 2400), [4 * num_windows + 1]
    expected = [list(window_of_row(document, shard_tokens, 1, row)) for row in range(2400)]
    assert sampler(document, shard_tokens).locate(1)[0].tolist() == expected


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_part_that_was_checked_lies_where_locate_says(world_size: int) -> None:
    subject = sampler(one_source("web", 8, 24), [300, 169])
    for rank in range(world_size):
        rows = subject.check_part(3, count=5, rank=rank, world_size=world_size)
        located = (
            subject.pieces(3, range(rank * rows, (rank + 1) * rows), count=5)
            .places[:, :2]
            .reshape(5, rows, 2)
        )
        assert (located == subject.locate(3, count=5, rank=rank, world_size=world_size)).all()
        some = range(rank * rows + 1, rank * rows + 4)
        assert (subject.pieces(3, some, count=5).places[:, :2] == located[:, 1:4].reshape(-1, 2)).all()


@pytest.mark.parametrize("order", EPOCH_ORDERS)
@pytest.mark.parametrize("batch_size", [1, 5, 34, 35, 36, 100], ids=lambda size: f"batch-{size}")
def test_every_epoch_holds_every_window_once(order: str, batch_size: int) -> None:
    """Catalogue row 3: also when a step straddles epochs or holds several of them.

    An order that says of itself that it repeats has the same order in each, and any other one does not.
    """
    subject = sampler(one_source("web", 4, batch_size, order=order), [97, 0, 5, 41])
    num_windows = int(subject.num_windows[0])
    assert num_windows == 24 + 0 + 1 + 10
    rows = subject.locate(0, count=-(-4 * num_windows // batch_size)).reshape(-1, 2)
    epochs = [
        [tuple(row) for row in rows[k * num_windows : (k + 1) * num_windows].tolist()] for k in range(4)
    ]
    assert all(len(set(epoch)) == num_windows for epoch in epochs)
    assert all(set(epoch) == set(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == (1 if order in REPEATING_ORDERS else 4)


def test_sequential_is_file_order() -> None:
    subject = sampler(one_source("web", 3, 5, order="sequential"), [10, 7])
    assert subject.locate(0)[0].tolist() == [[0, 0], [0, 3], [0, 6], [1, 0], [1, 3]]
    assert (subject.locate(10**9) == subject.locate(0)).all()


def test_random_draws_every_valid_start_and_no_other() -> None:
    """Starts are [0, T - seq_len) as in the widespread `get_batch`: 7 + 1 of them."""
    subject = sampler(one_source("web", 3, 1000, order="random"), [10, 4])
    rows = subject.locate(0, count=8).reshape(-1, 2)
    assert sorted({tuple(row) for row in rows.tolist()}) == [*((0, start) for start in range(7)), (1, 0)]
    cells = np.where(rows[:, 0] == 0, rows[:, 1], 7)
    assert chi_square_p_value(np.bincount(cells, minlength=8)) > 1e-4
    assert subject.steps_per_epoch("web") is None


def test_starts_of_a_large_corpus_are_uniform() -> None:
    """Catalogue row 6: for both shuffled orders, over 4 shards of together 10^12 tokens."""
    shard_tokens = [10**11, 2 * 10**11, 3 * 10**11, 4 * 10**11]
    bases = np.concatenate(([0], np.cumsum(shard_tokens)))[:4]
    for order in ("shuffle", "random"):
        rows = sampler(one_source("web", 1024, 4096, order=order), shard_tokens).locate(10**6, count=5)
        starts = bases[rows[..., 0]] + rows[..., 1]
        observed = np.bincount((starts.reshape(-1) // 10**10), minlength=100)
        assert chi_square_p_value(observed) > 1e-4


def test_the_last_step_of_the_largest_batch_is_still_exact() -> None:
    document = one_source("web", 1, MAX_GLOBAL_BATCH_SIZE, seed=2**64 - 1)
    subject = sampler(document, [1001])
    world_size = MAX_GLOBAL_BATCH_SIZE // 4
    located = subject.locate(MAX_STEP, rank=world_size - 1, world_size=world_size)[0]
    last = MAX_GLOBAL_BATCH_SIZE - 1
    assert located[-1].tolist() == list(window_of_row(document, [1001], MAX_STEP, last))


@pytest.mark.parametrize(
    ("arguments", "parameter", "accepted"),
    [
        ({"step": -1}, "step", f"in [0, {MAX_STEP}]"),
        ({"step": MAX_STEP + 1}, "step", f"in [0, {MAX_STEP}]"),
        ({"step": MAX_STEP, "count": 2}, "step", f"in [0, {MAX_STEP - 1}]"),
        ({"step": 0, "rank": 1}, "rank", "in [0, 1)"),
        ({"step": 0, "rank": 2, "world_size": 2}, "rank", "in [0, 2)"),
        ({"step": 0, "rank": -1, "world_size": 2}, "rank", "in [0, 2)"),
    ],
    ids=str,
)
def test_what_lies_outside_is_refused(arguments: dict[str, int], parameter: str, accepted: str) -> None:
    subject = sampler(one_source("web", 4, 12), [100])
    for refusing in (subject.check_part, subject.locate):
        with pytest.raises(InvalidParameter) as caught:
            refusing(**arguments)
        error, value = caught.value, arguments[parameter]
        assert error.detail == f"{parameter} must be {accepted}, got {value}"
        assert (error.parameter, error.received) == (parameter, value)


def test_the_last_steps_and_ranks_are_inside() -> None:
    subject = sampler(one_source("web", 4, 12), [100])
    assert subject.check_part(MAX_STEP) == 12
    assert subject.check_part(MAX_STEP - 1, count=2, rank=11, world_size=12) == 1
    assert subject.check_part(0, count=MAX_STEP + 1, rank=2, world_size=3) == 4


@pytest.mark.parametrize("world_size", [5, 7, 24])
def test_the_divisors_are_named(world_size: int) -> None:
    with pytest.raises(InvalidParameter) as caught:
        sampler(one_source("web", 4, 12), [100]).check_part(0, world_size=world_size)
    error = caught.value
    assert error.detail == f"world_size must divide global_batch_size 12, got {world_size}"
    found = error.parameter, error.received, error.accepted
    assert found == ("world_size", world_size, "one of 1, 2, 3, 4, 6, 12")


NONE_FITS = "no value fits this corpus"


@pytest.mark.parametrize(
    ("shard_tokens", "longest", "accepted"),
    [
        ([], 0, NONE_FITS),
        ([0], 0, NONE_FITS),
        ([1], 1, NONE_FITS),
        ([4, 3], 4, "at most 3"),
        ([2], 2, "at most 1"),
    ],
    ids=str,
)
def test_a_corpus_without_a_window_is_refused(shard_tokens: list[int], longest: int, accepted: str) -> None:
    """Catalogue row 5: with seq_len 4 it takes five tokens in one shard."""
    stage = {"global_batch_size": 2, "mixture": {"a": 1, "web": 1}}
    plan = Plan.from_json({"seq_len": 4, "stages": [stage]})
    with pytest.raises(InvalidPlan) as caught:
        Sampler(plan, {"a": [5], "web": shard_tokens})
    error = caught.value
    assert error.detail == (
        f"corpus 'web': no shard holds a window of seq_len + 1 = 5 tokens; the longest has {longest}"
    )
    assert (error.parameter, error.received, error.accepted) == ("seq_len", 4, accepted)


def test_corpora_hold_at_most_2_to_63_tokens() -> None:
    document = one_source("web", 2**20, 2)
    assert sampler(document, [2**62, 2**62]).num_windows.tolist() == [2 * (2**42 - 1)]
    with pytest.raises(InvalidPlan) as caught:
        sampler(document, [2**62, 2**62, 1])
    assert caught.value.detail == "the plan's corpora hold more than 9223372036854775808 tokens together"


def test_steps_per_epoch() -> None:
    """Of the last stage that uses a source; two of its rows are one window."""
    assert sampler(one_source("web", 4, 10), [97, 41]).steps_per_epoch("web") == 3.4
    both = {"from_step": 3, "global_batch_size": 12, "mixture": {"web": 1, "code": 3}, "seq_len": 4}
    stages = [{"global_batch_size": 4, "mixture": {"web": 1}}, both]
    shard_tokens = {"web": [8 * 60 + 1], "code": [8 * 90 + 1]}
    for last, expected in (([], [40, 20]), ([{**stages[0], "from_step": 9}], [15, 20])):
        found = Sampler(Plan.from_json({"seq_len": 8, "stages": [*stages, *last]}), shard_tokens)
        assert [found.steps_per_epoch(name) for name in ("web", "code")] == expected


def test_the_memory_of_a_plan_is_that_of_its_text_stages_and_ranges() -> None:
    """What a stage excludes for all later ones is kept once: 32 bytes a range, 56 a source that has some.

    A stage takes 24 bytes, and 12 for each source. Plans that continue this one share all but its text.
    """
    both = {"global_batch_size": 4, "mixture": {"web": 1, "code": 1}}
    stages = [
        {"global_batch_size": 4, "mixture": {"web": 1}},
        {**both, "from_step": 3, "exclude": {"web": [[0, 1], [20, 21]]}},
        {**both, "from_step": 5},
        {**both, "from_step": 7, "exclude": {"code": [[8, 9]]}},
    ]
    plan = Plan.from_json({"seq_len": 4, "stages": stages, "skip_steps": [[5, 6], [8, 9]]})
    found = Sampler(plan, {"web": [101], "code": [101]})
    assert found.num_bytes == len(plan.canonical_json) + 32 * 2
    assert plan.log.num_bytes == 4 * (24 + 12 * 2) + 32 * (2 + 1)
    assert sum(each.num_bytes for _, each in found.exclusions) == 32 * (2 + 3) + 56 * (1 + 2)


@pytest.mark.parametrize("order", [*PLAIN_ORDERS, bounded(3, 2)], ids=str)
def test_positions_and_tokens_of_windows_are_found_again(order: object) -> None:
    """Of the second source, in several epochs; only draws with replacement have no place."""
    stage = {"global_batch_size": 4, "mixture": {"a": 1, "b": 1}}
    found = Sampler(
        Plan.from_json({"seq_len": 4, "order": order, "stages": [stage]}), {"a": [30], "b": [25, 3, 46]}
    )
    windows = np.arange(found.rows.first_row[1], found.rows.first_row[2], dtype="uint64")
    if not found.plan.order.has_epochs:
        with pytest.raises(InvalidParameter) as caught:
            found.laid[0].positions_of(1, windows, np.zeros(1, "uint64"))
        assert caught.value.parameter == "plan"
        return
    positions = np.arange(3 * windows.size, 5 * windows.size, dtype="uint64")
    shown, epochs = found.laid[0].rows_at(1, positions)
    assert epochs.tolist() == [3] * windows.size + [4] * windows.size
    assert sorted(shown.tolist()) == sorted(2 * windows.tolist())
    assert (found.laid[0].positions_of(1, shown, epochs) == positions).all()
    assert (
        found.pieces_at(1, positions, np.zeros(positions.size, np.int64))[0][:, :2].tolist()
        == found.rows.pieces(1, shown, epochs).places[:, :2].tolist()
    )
    every = found.laid[0].rows_at(np.ones(positions.size, dtype=np.intp), positions)
    assert (every[0] == shown).all()
    assert (every[1] == epochs).all()


def test_in_most_orders_a_row_is_one_piece() -> None:
    stage = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 1}}
    found = sampler({"seq_len": 4, "stages": [stage], "seed": 1}, [50, 60])
    pieces, borders = found.pieces(2, range(1, 5), count=3)
    rows = np.concatenate([found.locate(step)[0, 1:5] for step in (2, 3, 4)])
    assert pieces.tolist() == [[shard, start, 5] for shard, start in rows.tolist()]
    assert borders.tolist() == list(range(13))
