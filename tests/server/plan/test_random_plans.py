"""Random plans of windows: the server and the page's second implementation agree on every row."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.plans import PLAIN_ORDERS
from tests.second import SecondPlan
from tests.server.plan.drawn import (
    PLANS,
    PLANS_A_TEST,
    Draw,
    accepted_plan,
    draw_plan,
    draw_steps,
    features,
    fingerprints,
    rows_of,
)


@pytest.mark.parametrize("first", range(0, PLANS, PLANS_A_TEST))
def test_random_plans(first: int) -> None:
    for seed in range(first, first + PLANS_A_TEST):
        random = Draw(seed)
        document, shard_tokens, sampler = accepted_plan(random)
        case = f"seed {seed}: {json.dumps(document)} over {json.dumps(shard_tokens)}"
        plan = SecondPlan(document, shard_tokens)
        assert plan.canonical_json(fingerprints(plan)) == sampler.plan.canonical_json, case
        assert plan.id(fingerprints(plan)) == sampler.plan.id, case
        for step in draw_steps(random, document):
            rows = rows_of(plan, step)
            found = sampler.locate(step)[0]
            assert [tuple(row) for row in found.tolist()] == rows, f"step {step}, {case}"
            world_size = random.choice([size for size in range(1, len(rows) + 1) if len(rows) % size == 0])
            rank = random.randrange(world_size)
            share = slice(rank * len(rows) // world_size, (rank + 1) * len(rows) // world_size)
            found = sampler.locate(step, rank=rank, world_size=world_size)[0]
            assert [tuple(row) for row in found.tolist()] == rows[share], f"step {step}, rank {rank}, {case}"


def test_random_plans_cover_what_the_page_defines() -> None:
    counts = Counter(feature for seed in range(PLANS) for feature in features(*draw_plan(Draw(seed))))
    assert set(counts) == {
        *(
            *(f"order {each}" for each in PLAIN_ORDERS),
            "order bounded",
            "order left out",
            "seed left out",
        ),
        *("stride", "skip_steps", "seq_len", "exclude", "stages", "shard without a window"),
        *(f"mixture of version {each}" for each in (1, 2, "left out")),
    }
    assert min(counts.values()) > PLANS // 20
