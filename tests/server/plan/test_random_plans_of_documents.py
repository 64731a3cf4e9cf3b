"""Random plans with rows of documents: the server and the page's second implementation agree."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.packed import PackedCase
from tests.plans import EPOCH_ORDERS
from tests.server.plan.drawn import (
    PLANS,
    PLANS_A_TEST,
    Draw,
    accepted_case,
    check_id,
    check_rows,
    draw_packed_plan,
    draw_steps,
    features,
)


@pytest.mark.parametrize("first", range(0, PLANS, PLANS_A_TEST))
def test_random_plans_with_rows_of_documents(first: int) -> None:
    for seed in range(first, first + PLANS_A_TEST):
        random = Draw(seed)
        case = accepted_case(random, draw_packed_plan)
        plan = case.second
        check_id(case, plan)
        steps = draw_steps(random, case.document)
        for step in random.sample(steps, min(3, len(steps))):
            if step < 1000 or len(plan.sources) == 1:  # a far block of a mixture is dear
                check_rows(case, plan, step)


def packed_features(case: PackedCase) -> set[str]:
    found = features(case.document, {})
    block_documents = case.document["rows"]["documents"].get("block_documents")
    found.add("blocks" if block_documents else "block_documents left out")
    found |= {"begin"} if case.document["rows"]["documents"].get("begin") else set()
    found |= {"end-of-text first"} if case.eot_first else set()
    found |= {"open documents"} if any(case.opened.values()) else set()
    for shards in case.lengths.values():
        if any(0 in shard for shard in shards):
            found.add("empty document")
        if any(max(shard, default=0) > 2 * case.document["seq_len"] for shard in shards):
            found.add("document in several pieces")
        if len(shards) > 1:
            found.add("shards")
    if case.document["seq_len"] > 512:
        found.add("merged lengths")
    return found


def test_random_plans_with_rows_of_documents_cover_what_the_page_defines() -> None:
    counts = Counter(
        feature for seed in range(PLANS // 5) for feature in packed_features(draw_packed_plan(Draw(seed)))
    )
    assert set(counts) == {
        *(f"order {each}" for each in (*EPOCH_ORDERS, "bounded", "left out")),
        *("skip_steps", "exclude", "stages", "seq_len", "shards", "blocks", "block_documents left out"),
        *(f"mixture of version {each}" for each in (1, 2, "left out")),
        *("empty document", "document in several pieces", "merged lengths"),
        *("begin", "end-of-text first", "open documents"),
    }
    assert min(counts.values()) > PLANS // 5 // 40
