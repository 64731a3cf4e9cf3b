"""Random plans of families: the server and the page's second implementation agree."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from corpus_server.plan import Plan
from tests.packed import PackedCase
from tests.plans import EPOCH_ORDERS, PLAIN_ORDERS, STRIDES
from tests.server.plan.drawn import (
    PLANS,
    PLANS_A_TEST,
    Draw,
    accepted_case,
    check_rows,
    draw_order,
    draw_packed_plan,
    draw_steps,
    fingerprints,
)


def draw_family_plan(random: Draw) -> PackedCase:
    """Return a plan of a family, with windows or rows of documents; the server may refuse it."""
    case = draw_packed_plan(random).without("exclude")
    fields: dict[str, Any] = {
        "leave_out": random.choice((0.1, 0.5, 0.9, random.random())),
        "member": random.choice((0, 1, random.randrange(2**16))),
    }
    if random.random() < 0.8:
        fields["seed"] = random.choice((0, 7, 2**64 - 1))
    if random.random() < 0.5:
        fields["double"] = fields["leave_out"] * random.choice((1.0, random.random()))
    case = case.with_fields(family=fields)
    if random.random() < 0.3:
        case = case.by("site", distinct=random.choice((2, 30)))
    if random.round % 2:
        return case
    document = {**case.without("seq_len").document, "rows": "windows", "order": draw_order(random)}
    if str(document["order"]) not in STRIDES and random.random() < 0.4:
        document["stride"] = random.randint(1, 3 * document["seq_len"])
    return PackedCase(document, case.lengths, values=case.values)


@pytest.mark.parametrize("first", range(0, PLANS, PLANS_A_TEST))
def test_random_plans_of_families(first: int) -> None:
    for seed in range(first, first + PLANS_A_TEST):
        random = Draw(seed)
        case = accepted_case(random, draw_family_plan)
        plan = case.second
        family = {"family": {**case.document["family"], "documents": case.ends_digests}}
        if case.values:
            family["family"]["values"] = case.values_digests
        document = case.with_fields(**family).document
        bound = Plan.from_json(document).bind(fingerprints(plan)).with_digests(case.digests)
        assert plan.canonical_json(fingerprints(plan)) == bound.canonical_json
        for step in draw_steps(random, case.document)[:3]:
            if step < 1000 or len(plan.sources) == 1:
                check_rows(case, plan, step)


def test_random_plans_of_families_cover_what_the_page_defines() -> None:
    counts: Counter[str] = Counter()
    for seed in range(PLANS // 5):
        case = accepted_case(Draw(seed), draw_family_plan)
        rows, order = case.document["rows"], case.document.get("order", "shuffle")
        kind = "windows" if rows == "windows" else "documents"
        counts[f"{kind} {order if isinstance(order, str) else 'bounded'}"] += 1
        counts["seed left out"] += "seed" not in case.document["family"]
        counts["by"] += bool(case.values)
        counts["double"] += "double" in case.document["family"]
    windows = {f"windows {each}" for each in (*PLAIN_ORDERS, "bounded")}
    documents = {f"documents {each}" for each in (*EPOCH_ORDERS, "bounded")}
    assert set(counts) == {"seed left out", "by", "double"} | windows | documents
    assert min(counts.values()) > PLANS // 5 // 50
