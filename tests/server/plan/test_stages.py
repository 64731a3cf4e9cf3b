"""Stages: whatever changes at a step, nothing before it changes and nothing is lost or repeated."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidParameter
from tests.plans import Case, run_of, small_plans, source_numbers

Windows = dict[str, list[tuple[int, int]]]


def by_source(case: Case, num_steps: int) -> Windows:
    """The windows that each source gave over the first steps, in row order.

    A window that was read in parts is the one of its first part, which every step holds.
    """
    sampler, seq_len = case.sampler(), case.document["seq_len"]
    parts = [seq_len // sampler.seq_len(step) for step in range(num_steps)]
    located = np.concatenate([sampler.locate(step)[0, ::every] for step, every in enumerate(parts)])
    numbers = source_numbers(case, located)
    return {
        name: [tuple(row) for row in located[numbers == number].tolist()]
        for number, name in enumerate(case.names())
    }


def check_epochs(case: Case, found: Windows) -> None:
    """Every window of a source once an epoch, of the order `sequential` in the same order."""
    for name, rows in found.items():
        size = case.reference().sources[name].num_windows
        epochs = [rows[first : first + size] for first in range(0, len(rows), size)]
        assert all(len(set(epoch)) == len(epoch) for epoch in epochs)
        assert all(set(epoch) == set(epochs[0]) for epoch in epochs[:-1] if len(epoch) == size)
        if case.document["order"] == "sequential":
            assert all(epoch == epochs[0][: len(epoch)] for epoch in epochs)


@settings(deadline=None, max_examples=40)
@given(small_plans(exclude=False, skip=False))
def test_every_window_comes_once_an_epoch_over_changes_of_stage(case: Case) -> None:
    """Catalogue row 3."""
    check_epochs(case, by_source(case, case.document["stages"][-1]["from_step"] + 30))


@settings(deadline=None, max_examples=40)
@given(small_plans(skip=False, max_stages=2), st.data())
def test_a_cut_leaves_every_earlier_row_as_it_was(case: Case, data: st.DataObject) -> None:
    """In the middle of a block, always, as blocks are 65,536 rows long."""
    stages = case.document["stages"]
    cut = data.draw(st.integers(stages[-1]["from_step"] + 1, stages[-1]["from_step"] + 20))
    added = {
        "from_step": cut,
        "global_batch_size": data.draw(st.integers(1, 9)),
        "mixture": data.draw(
            st.dictionaries(st.sampled_from(sorted(case.shard_tokens)), st.integers(1, 9), min_size=1)
        ),
    }
    longer = case.with_fields(stages=[*stages, added])
    # The number of a shard may only grow by what the stage adds behind it.
    assert run_of(longer, cut) == run_of(case, cut)
    check_epochs(longer.without_exclusions(), by_source(longer.without_exclusions(), cut + 30))


@pytest.mark.parametrize("order", ["shuffle", "sequential"])
@pytest.mark.parametrize("cut", [1, 65, 200])
def test_a_cut_in_a_real_mixture_loses_nothing(order: str, cut: int) -> None:
    """1,000 rows a step: cuts inside blocks 0, 1 and 3; epochs of 700, 5,000 and 100,000 windows."""
    shard_tokens = {"books": [4 * 5000 + 1], "code": [4 * 300 + 1, 4 * 400 + 1], "web": [4 * 100_000 + 1]}
    first = {"from_step": 0, "global_batch_size": 1000, "mixture": {"web": 0.7, "code": 0.3}}
    second = {"from_step": cut, "global_batch_size": 1536, "mixture": {"web": 1, "code": 1, "books": 5}}
    document = {"seq_len": 4, "order": order, "stages": [first, second], "seed": 1}
    case = Case(document, shard_tokens)
    alone = case.with_fields(stages=[first])
    before = case.sampler().locate(cut - 1)[0]
    plain = Case(alone.document, {name: shard_tokens[name] for name in ("code", "web")})
    assert (before == plain.sampler().locate(cut - 1)[0]).all()
    check_epochs(case, by_source(case, cut + 40))


def test_a_stage_of_the_same_source_only_renames_its_steps() -> None:
    """A change of batch size alone: the same windows in the same order, in other steps."""
    stage = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 1}}
    one = Case({"seq_len": 4, "stages": [stage]}, {"web": [401]})
    larger = one.with_fields(stages=[stage, {**stage, "from_step": 10, "global_batch_size": 12}])
    small, large = run_of(one, 60), run_of(larger, 35)
    assert [row for step in small for row in step] == [row for step in large for row in step]


def change_of_size() -> Case:
    stage = {"from_step": 0, "global_batch_size": 6, "mixture": {"web": 1}}
    stages = [stage, {**stage, "from_step": 10}, {**stage, "from_step": 20, "global_batch_size": 12}]
    return Case({"seq_len": 4, "stages": stages, "skip_steps": [[5, 8]]}, {"web": [401]})


def test_steps_of_one_size_may_be_asked_together_over_a_change_of_stage() -> None:
    sampler = change_of_size().sampler()
    assert sampler.locate(0, count=17).shape == (17, 6, 2)
    assert (sampler.locate(0, count=17) == np.stack([sampler.locate(step)[0] for step in range(17)])).all()
    assert sampler.locate(17, count=9).shape == (9, 12, 2)
    assert [sampler.check_part(step) for step in (0, 16, 17, 10**8)] == [6, 6, 12, 12]


@pytest.mark.parametrize(("step", "count"), [(0, 18), (16, 2), (10, 4096)])
def test_a_count_over_a_change_of_batch_size_is_refused(step: int, count: int) -> None:
    """The plan step of the change is 20, after three skipped ones training step 17."""
    with pytest.raises(InvalidParameter) as caught:
        change_of_size().sampler().locate(step, count=count)
    error, most = caught.value, 17 - step
    assert error.detail == (
        f"steps {step} to {step + count - 1} differ in global_batch_size: it changes from 6 at step 17; "
        f"ask for at most {most} steps from {step}"
    )
    assert (error.parameter, error.received, error.accepted) == ("count", count, f"at most {most}")


def test_world_size_is_checked_against_the_stage_of_the_step() -> None:
    sampler = change_of_size().sampler()
    assert sampler.locate(17, world_size=12).shape == (1, 1, 2)
    with pytest.raises(InvalidParameter, match="must divide global_batch_size 6, got 12"):
        sampler.locate(16, world_size=12)


@settings(deadline=None)
@given(small_plans(exclude=False, skip=False))
def test_every_token_comes_once_an_epoch_whatever_the_lengths_of_stages(case: Case) -> None:
    """Each input of each window, over the first epoch of each source, its rows cut anywhere."""
    case = case.with_fields(stride=case.document["seq_len"])
    sampler, sources = case.sampler(), case.reference().sources
    seen: Counter[tuple[int, int, int]] = Counter()
    left = {
        number: source.num_windows * case.document["seq_len"]
        for number, source in enumerate(sources.values())
    }
    for step in range(case.document["stages"][-1]["from_step"] + 10):
        seq_len = sampler.seq_len(step)
        located = sampler.locate(step)[0]
        for (shard, start), number in zip(
            located.tolist(), source_numbers(case, located).tolist(), strict=True
        ):
            if left[number]:
                left[number] -= seq_len
                seen.update((number, shard, token) for token in range(start, start + seq_len))
    assert set(seen.values()) == {1}


def lengthened() -> Case:
    """A curriculum: rows of 2 inputs, then of 4, then of 8; 48 inputs a step throughout."""
    stages = [
        {"from_step": 0, "global_batch_size": 24, "mixture": {"web": 1}, "seq_len": 2},
        {"from_step": 10, "global_batch_size": 12, "mixture": {"web": 1}, "seq_len": 4},
        {"from_step": 20, "global_batch_size": 6, "mixture": {"web": 1}, "seq_len": 8},
    ]
    return Case({"seq_len": 8, "stages": stages, "skip_steps": [[5, 8]]}, {"web": [4001, 37]})


def test_parts_of_a_window_are_neighbours_and_steps_hold_the_windows_of_a_plan_of_one_length() -> None:
    """With a constant number of inputs, each step reads what it reads without a curriculum."""
    case = lengthened()
    stages = [{"from_step": 0, "global_batch_size": 6, "mixture": {"web": 1}}]
    sampler, plain = case.sampler(), case.with_fields(stages=stages).sampler()
    for step in (0, 6, 7, 16, 17, 1000):
        windows = plain.locate(step)[0]
        seq_len = sampler.seq_len(step)
        parts = [[[shard, start + at] for at in range(0, 8, seq_len)] for shard, start in windows.tolist()]
        assert sampler.locate(step)[0].tolist() == [row for window in parts for row in window]
    assert [sampler.seq_len(step) for step in (0, 6, 7, 16, 17, 10**8)] == [2, 2, 4, 4, 8, 8]


def test_ranks_join_to_the_batch_where_a_rank_holds_half_a_window() -> None:
    sampler = lengthened().sampler()
    joined = np.concatenate([sampler.locate(0, rank=rank, world_size=12)[0] for rank in range(12)])
    assert (joined == sampler.locate(0)[0]).all()


def test_a_count_over_a_change_of_length_is_refused() -> None:
    """The batch size stays: still one response cannot hold rows of two lengths."""
    stages = [
        {"from_step": 0, "global_batch_size": 8, "mixture": {"web": 1}, "seq_len": 2},
        {"from_step": 10, "global_batch_size": 8, "mixture": {"web": 1}},
    ]
    sampler = Case({"seq_len": 8, "stages": stages}, {"web": [4001]}).sampler()
    assert sampler.locate(0, count=10).shape == (10, 8, 2)
    with pytest.raises(InvalidParameter) as caught:
        sampler.locate(4, count=7)
    assert caught.value.detail == (
        "steps 4 to 10 differ in seq_len: it changes from 2 at step 10; ask for at most 6 steps from 4"
    )
