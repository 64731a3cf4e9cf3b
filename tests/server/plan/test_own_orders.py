"""The orders of other trainers agree with the second implementation, which docs/arithmetic.md defines."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_server.errors import InvalidPlan
from corpus_server.plan import Plan, Sampler
from corpus_server.plan.orders.neox import NeoxOrder
from corpus_server.plan.streams import Sequences
from tests import second

SEEDS = st.integers(0, 2**32 - 1)
FEW = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 12)


class Shards:
    """What an order is told of a corpus whose documents do not count."""

    content = ""

    def __init__(self, shard_tokens: list[int]) -> None:
        self.shard_ends, self.num_tokens = list(accumulate(shard_tokens)), sum(shard_tokens)
        self.digest, self.num_documents = "", 0

    def sequences(self) -> Sequences:
        raise AssertionError("the order does not need the documents")


@given(data=st.data(), seed=st.integers(0, 2**64 - 1), length=st.integers(2, 6), together=st.integers(1, 3))
def test_olmos_steps(data: st.DataObject, seed: int, length: int, together: int) -> None:
    shard_tokens = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=5))
    numbers = st.integers(0, len(shard_tokens) - 1)
    shards = data.draw(st.one_of(st.none(), st.lists(numbers, min_size=1, max_size=6)))
    size = sum(shard_tokens[each] // (length * together) for each in shards or range(len(shard_tokens)))
    if not size:
        return
    fields = {
        "num_epochs": data.draw(st.integers(1, 3)),
        "first_epoch": data.draw(st.integers(0, 2)),
        "shards": shards,
        "max_target_sequence_length": length * together,
    }
    batch_size = data.draw(st.integers(1, size * together))
    plan = Plan.from_json(
        {
            "seq_len": length - 1,
            "seed": seed,
            "order": {"olmo": fields},
            "stages": [{"global_batch_size": batch_size, "mixture": {"web": 1}}],
        }
    )
    (job,) = plan.order.jobs({"web": Shards(shard_tokens)}, seq_len=length - 1, seed=seed, decides={})
    sampler = Sampler(plan, {"web": shard_tokens}, tables=[job.build()])
    fields["target"] = fields.pop("max_target_sequence_length")
    steps = second.olmo_steps(shard_tokens, seq_len=length - 1, batch_size=batch_size, seed=seed, **fields)
    assert sampler.num_steps == len(steps)
    for step, rows in enumerate(steps):
        assert [tuple(place) for place in sampler.locate(step)[0].tolist()] == rows
    source, table = 0, sampler.rows
    every = np.arange(int(table.num_rows[source]), dtype=np.uint64)
    there = sampler.order.rows_at(source, np.zeros_like(every), every)
    assert (sampler.order.offsets_of(source, np.zeros_like(every), there) == every).all()


@given(
    data=st.data(),
    lengths=st.lists(FEW, min_size=1, max_size=4),
    seq_len=st.integers(1, 12),
    num_samples=st.integers(1, 80),
    seed=SEEDS,
)
def test_neoxs_rows(
    data: st.DataObject, lengths: list[list[int]], seq_len: int, num_samples: int, seed: int
) -> None:
    weight = st.floats(0.01, 100)
    weights = data.draw(st.lists(weight, min_size=len(lengths), max_size=len(lengths)))
    alone = len(lengths) == 1 and data.draw(st.booleans())
    names = [f"{chr(ord('z') - number)}" for number in range(len(lengths))]
    fields = {"num_samples": num_samples, "blend": names, **({} if alone else {"weights": weights})}
    plan = Plan.from_json(
        {
            "seq_len": seq_len,
            "seed": seed,
            "order": {"neox": fields},
            "stages": [
                {"global_batch_size": 1, "mixture": dict(zip(names, [1] if alone else weights, strict=True))}
            ],
        }
    )
    tokens = {name: sum(own) for name, own in zip(names, lengths, strict=True)}
    firsts = dict(zip(plan.sources, accumulate((tokens[n] for n in plan.sources), initial=0), strict=False))
    sequences = {}
    for name in plan.sources:
        own = lengths[names.index(name)]
        starts = [*accumulate(own, initial=firsts[name])][:-1]
        sequences[name] = Sequences(np.array(starts, dtype=np.int64), np.array(own, dtype=np.int64))
    assert isinstance(plan.order, NeoxOrder)
    table = plan.order.build(sequences, seq_len=seq_len, seed=seed)
    given_weights, shapes = None if alone else weights, {name: [tokens[name]] for name in plan.sources}
    try:
        expected = second.neox_rows(
            lengths, given_weights, num_samples=num_samples, seq_len=seq_len, seed=seed
        )
    except IndexError:  # a source has no more samples
        with pytest.raises(InvalidPlan, match=r"the blend takes .* and GPT-NeoX draws"):
            Sampler(plan, shapes, tables=[table])
        return
    sampler = Sampler(plan, shapes, tables=[table])
    assert sampler.num_steps == len(expected)
    for step, (source, row) in enumerate(expected):
        found = [
            (plan.sources[shard], token)
            for shard, start, count in sampler.pieces(step, range(1)).places.tolist()
            for token in range(start, start + count)
        ]
        begins = [*accumulate(lengths[source], initial=0)]
        assert found == [(names[source], begins[document] + token) for document, token in row]


@given(split=st.lists(st.floats(0, 100), min_size=1, max_size=3), size=st.integers(1, 3000))
def test_neoxs_splits(split: list[float], size: int) -> None:
    if sum(split) < 1:
        return
    bounds = NeoxOrder.split_bounds(split, size)
    for part in range(3):
        assert range(*bounds[part : part + 2]) == second.neox_part(split, part, size)
