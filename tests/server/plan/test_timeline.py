"""Where sources stand: against counting the rows of a run one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.plan.timeline import Timeline
from tests.plans import Case, small_plans


@settings(deadline=None, max_examples=40)
@given(small_plans(exclude=False), st.data())
def test_positions_and_rows_are_those_of_a_run(case: Case, data: st.DataObject) -> None:
    """Each position of a source is found in the row that holds it; sources that are not used stand still."""
    reference, sampler = case.reference(), case.sampler()
    timeline = Timeline(sampler.plan)
    names = list(sampler.plan.sources)
    from_steps = [stage["from_step"] for stage in case.document["stages"]]
    end = from_steps[-1] + 8
    before = np.zeros((2, len(names)), dtype=int)
    begins, holding = [], dict[int, list[tuple[int, int]]]()
    for plan_step in range(end):
        number = reference.stage_of(plan_step)
        stage, parts = reference.stages[number], reference.parts[number]
        if plan_step in from_steps:
            begins.append(before[0].copy())
        placed = timeline.stage_at(plan_step)
        assert (placed.number, placed.num_parts) == (number, parts)
        assert placed.seq_len == case.document["seq_len"] // parts
        assert placed.step_windows == stage["global_batch_size"] // parts
        assert timeline.given_before(plan_step).tolist() == before.tolist()
        for row in range(0, stage["global_batch_size"], parts):
            source = names.index(reference.row_of(plan_step, row).source)
            holding.setdefault(source, []).append((plan_step, row))
            before[:, source] += (1, parts)
    for source in range(len(names)):
        member = [name in stage["mixture"] for name in [names[source]] for stage in case.document["stages"]]
        assert [placed.member(source) is not None for placed in timeline.stages] == member
        assert timeline.begins(source).tolist() == [int(each[source]) for each in begins]
        rows = holding.get(source, [])
        positions = np.arange(len(rows), dtype="uint64")
        plan_steps, first_rows, given_ = timeline.rows_of(source, positions)
        assert list(zip(plan_steps.tolist(), first_rows.tolist(), strict=True)) == rows
        assert given_.all()
        numbers = [reference.stage_of(plan_step) for plan_step, _ in rows]
        assert timeline.stage_numbers(source, positions).tolist() == numbers
        chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(rows))), max_size=6))) if rows else []
        found = timeline.blocks_of(source, positions[chosen]).tolist()
        kinds = sorted({numbers[k] for k in chosen})  # no stage is as long as a block
        assert found == [kinds.index(numbers[k]) for k in chosen]
        if not member[-1]:
            after = timeline.rows_of(source, np.array([len(rows), len(rows) + 5], dtype="uint64"))
            assert [column.tolist() for column in after] == [[0, 0], [0, 0], [False, False]]


@settings(deadline=None, max_examples=40)
@given(small_plans(exclude=False), st.lists(st.integers(0, 60), max_size=12))
def test_steps_fall_into_stages(case: Case, steps: list[int]) -> None:
    timeline = Timeline(case.sampler().plan)
    plan_steps = np.array(sorted(steps), dtype="uint64")
    parts = timeline.by_stage(plan_steps)
    assert [step for _, part in parts for step in part.tolist()] == sorted(steps)
    assert [placed.number for placed, _ in parts] == sorted({placed.number for placed, _ in parts})
    for placed, part in parts:
        assert part.size
        assert {timeline.stage_at(step).number for step in part.tolist()} == {placed.number}
        total = sum(timeline.given_before(step) for step in part.tolist())
        assert (placed.given_at(part) == total).all()


def test_positions_in_several_blocks_are_numbered_by_block() -> None:
    """Half of each block of 65,536 rows; a stage begins a block of its own."""
    both = {"from_step": 0, "global_batch_size": 65536, "mixture": {"web": 1, "code": 1}}
    stages = [both, {**both, "from_step": 3}, {**both, "from_step": 5, "mixture": {"web": 1}}]
    tokens = {"web": [10**6], "code": [10**6]}
    timeline = Timeline(Case({"seq_len": 4, "stages": stages}, tokens).sampler().plan)
    half = 2**15
    positions = np.array([5, half - 1, half, 3 * half - 1, 3 * half, 4 * half, 5 * half, 5 * half + 2**17])
    assert timeline.blocks_of(1, positions.astype("uint64")).tolist() == [0, 0, 1, 2, 3, 4, 5, 5]
    assert timeline.blocks_of(1, positions[2:4].astype("uint64")).tolist() == [0, 1]
    assert timeline.blocks_of(1, positions[:0].astype("uint64")).tolist() == []
