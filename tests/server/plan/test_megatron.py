"""Plans in orders of samples: what their tables take, how many steps they have, what is refused."""

from __future__ import annotations

from itertools import accumulate, zip_longest
from typing import Any

import numpy as np
import pytest

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan import Plan, Sampler
from corpus_server.plan.orders import samples
from corpus_server.plan.orders.samples import Table
from corpus_server.plan.questions.diff import compare
from corpus_server.plan.streams import Sequences
from corpus_server.work import Budget

LENGTHS = {"a": [5, 3, 4], "b": [9, 0, 8, 7]}
"""12 and 24 tokens: with a seq_len of 4, two and five samples an epoch."""
FIRST = {"a": 0, "b": 12}


def plan(
    num_samples: int,
    stages: list[tuple[int, int]],
    skip_steps: list[list[int]] | None = None,
    name: str = "megatron",
    **order: Any,
) -> Plan:
    """A plan of both corpora, or of `a` alone, whose stages begin at steps and have batch sizes."""
    mixture = dict(zip(order.get("blend", ["a"]), order.get("weights", [1]), strict=True))
    document = {
        "seq_len": 4,
        "order": {name: {"num_samples": num_samples, **order}},
        "stages": [
            {"from_step": step, "global_batch_size": size, "mixture": mixture} for step, size in stages
        ],
        "skip_steps": skip_steps or [],
    }
    return Plan.from_json(document)


def both(num_samples: int, weights: list[float], name: str = "megatron") -> Plan:
    return plan(num_samples, [(0, 1)], blend=["b", "a"], weights=weights, name=name)


def sequences(made: Plan) -> dict[str, Sequences]:
    found = {}
    for name in made.sources:
        starts = [*accumulate(LENGTHS[name], initial=FIRST[name] if len(made.sources) > 1 else 0)][:-1]
        found[name] = Sequences(np.array(starts, dtype=np.int64), np.array(LENGTHS[name], dtype=np.int64))
    return found


def build(made: Plan) -> Table:
    return made.order.build(sequences(made), seq_len=made.seq_len, seed=made.seed)


def sampler(made: Plan, table: Table | None = None) -> Sampler:
    tokens = {name: [sum(LENGTHS[name])] for name in made.sources}
    return Sampler(made, tokens, tables=[table or build(made)])


@pytest.mark.parametrize(
    ("made", "shuffled", "num_bytes"),
    [
        pytest.param(plan(6, [(0, 1)]), 9 + 8, 6 * 6 + 16 * 9 + 8 * 8, id="three epochs of a"),
        # 0.005 more than half of 8 are 5 samples of each: two epochs of a, and one of b.
        pytest.param(both(8, [1, 1]), 6 + 5 + 4 + 5, 6 * 8 + 16 * 10 + 8 * 10, id="both"),
        # 2 and 6 wanted become 3 and 7: two epochs of each.
        pytest.param(both(8, [3, 1]), 6 + 5 + 8 + 11, 6 * 8 + 16 * 14 + 8 * 16, id="more of b"),
    ],
)
def test_a_table_has_a_size_that_is_bounded(
    monkeypatch: pytest.MonkeyPatch, made: Plan, shuffled: int, num_bytes: int
) -> None:
    """16 bytes a document of the streams, 8 a sample of them and 6 a sample of the run."""
    found = sequences(made)
    assert samples.MAX_BYTES == 16 * 2**30
    monkeypatch.setattr(samples, "MAX_BYTES", num_bytes)
    assert made.order.check_size(found, seq_len=4) == shuffled
    monkeypatch.setattr(samples, "MAX_BYTES", num_bytes - 1)
    with pytest.raises(InvalidPlan) as caught:
        made.order.check_size(found, seq_len=4)
    num_samples = made.order.num_samples
    assert caught.value.detail == (
        f"the tables of {num_samples} samples have {num_bytes} bytes, and a plan may have at most "
        f"{num_bytes - 1}; order shuffle needs none"
    )
    assert (caught.value.parameter, caught.value.received) == ("order.megatron.num_samples", num_samples)


@pytest.mark.parametrize(("lengths", "fits"), [([0], False), ([1, 0], False), ([1, 1], True), ([2], True)])
def test_a_part_of_less_than_two_tokens_is_refused(lengths: list[int], fits: bool) -> None:
    made = plan(3, [(0, 1)], split=[1, 1])
    whole = np.array([*lengths, *[9] * len(lengths)], dtype=np.int64)
    found = {"a": Sequences(np.zeros_like(whole), whole)}
    if fits:
        made.order.check_size(found, seq_len=4)
        return
    with pytest.raises(InvalidPlan) as caught:
        made.order.check_size(found, seq_len=4)
    assert caught.value.detail == "corpus 'a' has no documents in its part train of split [1.0, 1.0]"
    assert (caught.value.parameter, caught.value.received) == ("order.megatron.split", [1.0, 1.0])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("megatron", "Megatron draws 5; Megatron refuses this blend, too"),
        (
            "neox",
            "GPT-NeoX draws 5; GPT-NeoX then gives some again, which this order does not; ask for fewer "
            "num_samples",
        ),
    ],
)
def test_a_blend_that_takes_more_than_is_drawn_is_refused(name: str, said: str) -> None:
    short, long = build(both(8, [1, 1], name)), build(both(14, [1, 1]))
    table = Table(*short[:5], *build(both(10, [1, 1]))[5:])
    assert sampler(both(10, [1, 1], name), table).num_steps == 10
    table = Table(*short[:5], *[array[:11] for array in long[5:7]], long[7])
    with pytest.raises(InvalidPlan) as caught:
        sampler(both(11, [1, 1], name), table)
    assert caught.value.detail == f"the blend takes 6 samples of 'b', and {said}"
    assert caught.value.parameter == f"order.{name}.weights"


@pytest.mark.parametrize(
    ("num_samples", "stages", "skip_steps", "num_steps"),
    [
        (12, [(0, 4)], [], 3),
        (13, [(0, 4)], [], 3),
        (3, [(0, 4)], [], 0),
        (12, [(0, 4), (3, 2)], [], 3),
        (13, [(0, 4), (3, 2)], [], 3),
        (14, [(0, 4), (3, 2)], [], 4),
        (11, [(0, 4), (3, 2)], [], 2),
        (33, [(0, 4), (3, 2), (5, 8)], [], 7),
        (15, [(0, 4), (3, 2), (5, 1)], [], 4),
        (16, [(0, 4), (3, 2), (5, 1)], [], 5),
        (17, [(0, 4), (3, 2), (5, 1)], [], 6),
        (12, [(0, 4)], [[1, 2]], 2),
        (12, [(0, 4)], [[2, 9]], 2),
        (12, [(0, 4)], [[3, 9]], 3),
    ],
)
def test_the_samples_of_a_run_make_whole_steps(
    num_samples: int, stages: list[tuple[int, int]], skip_steps: list[list[int]], num_steps: int
) -> None:
    assert sampler(plan(num_samples, stages, skip_steps)).num_steps == num_steps


@pytest.mark.parametrize(
    ("step", "count", "accepted"),
    [(3, 1, "at most 2"), (2, 2, "at most 1"), (0, 4, "none with this count"), (1, 3, "at most 0")],
)
def test_steps_beyond_the_samples_are_refused(step: int, count: int, accepted: str) -> None:
    found = sampler(plan(13, [(0, 4)]))
    assert found.check_part(2) == found.check_part(1, count=2) == found.check_part(0, count=3) == 4
    assert found.check_part(2, rank=1, world_size=2) == 2
    with pytest.raises(InvalidParameter) as caught:
        found.check_part(step, count=count)
    error = caught.value
    assert error.detail == (
        f"the plan's order ends after 3 steps, and step {step} with count {count} ends beyond; give the "
        "loader num_steps=3, or the plan's order a longer run"
    )
    assert (error.parameter, error.received, error.accepted) == ("step", step, accepted)


def rows_of(found: Sampler, step: int) -> list[list[list[int]]]:
    """What each row of a step is made of."""
    pieces, borders = found.pieces(step, range(found.check_part(step)))
    return [each.tolist() for each in np.split(pieces, borders[1:-1])]


@pytest.mark.parametrize(
    ("other", "equal"),
    [
        (plan(33, [(0, 4), (3, 2)]), 3),
        (plan(33, [(0, 4)], [[5, 6]]), 5),
        (plan(32, [(0, 4)]), 0),
        (plan(33, [(0, 4)], split=[3, 1]), 0),
    ],
)
def test_rows_of_two_plans_are_compared_to_the_end_of_the_shorter(other: Plan, equal: int) -> None:
    one, second = sampler(plan(33, [(0, 4)])), sampler(other)
    compared = compare(one, second, Budget(), num_steps=100)
    assert one.num_steps is not None
    assert second.num_steps is not None
    end = min(one.num_steps, second.num_steps)
    assert (compared.equal_steps, compared.compared_until) == (equal, end)
    rows = [(rows_of(one, step), rows_of(second, step)) for step in range(end)]
    differ = [step for step, (a, b) in enumerate(rows) if a != b]
    assert [change.step for change in compared.steps] == differ
    for change in compared.steps:
        a, b = rows[change.step]
        changed = [n for n, pair in enumerate(zip_longest(a, b)) if pair[0] != pair[1]]
        assert [row for start, stop in change.rows for row in range(start, stop)] == changed
