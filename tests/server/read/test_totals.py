"""How many rows of two plans differ, against plans whose rows were all looked at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.catalog import Catalog
from corpus_server.plan import Plan
from corpus_server.plan.questions.slices import finish
from corpus_server.plan.questions.totals import total_slices
from corpus_server.read.bound_plan import BoundPlan
from tests.views import viewed_catalog

DRAW = np.random.default_rng(5)
SHARDS = [DRAW.integers(1, 40, size).tolist() for size in (300, 40)]
COUNTS = DRAW.choice([0, 1, 1, 1, 2, 3], 340).tolist()
VIEWS = {"a": [1] * 340, "hq": COUNTS, "less": [*COUNTS[:-60], *[0] * 60]}
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"order": "sequential"},
    {"order": "random", "stride": 1},
    {"order": {"shuffle": {"block_windows": 8, "group_blocks": 3}}},
    {"rows": {"documents": {"block_documents": 64}}},
]
SEQ_LEN, STEPS = 16, 80


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    with viewed_catalog(tmp_path_factory.mktemp("corpora"), SHARDS, VIEWS) as catalog:
        yield catalog


def looked_at(a: BoundPlan, b: BoundPlan, until: int) -> dict[str, tuple[int, int]]:
    """Rows of each source of the first plan before a step, and how many of them differ, one by one."""
    found = dict.fromkeys(a.plan.sources, (0, 0))
    for step in range(until):
        rows = [_rows(each, step) for each in (a, b)]
        for (name, one), (_, other) in zip(*rows, strict=True):
            seen, differ = found[name]
            found[name] = seen + 1, differ + (one != other)
    return found


def _rows(plan: BoundPlan, step: int) -> list[tuple[str, list[tuple[str, int, int]]]]:
    """The source of each row of a step, and its pieces: fingerprint of the corpus, token, tokens."""
    pieces, borders = plan.sampler.pieces(step, range(plan.sampler.check_part(step)))
    rows = []
    for low, high in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        its = [(plan.shards[shard][0], shard, at, count) for shard, at, count in pieces[low:high].tolist()]
        name = its[0][0]
        base, first = plan.corpora[name].base, [each for each, _ in plan.shards].index(name)
        rows.append(
            (name, [(base.fingerprint, base.starts[shard - first] + at, n) for _, shard, at, n in its])
        )
    return rows


excluded = st.lists(st.integers(0, 1500).map(lambda at: [at, at + 9]), max_size=3)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two documents alike but for the source called web, its exclusions and, sometimes, one thing more."""
    layout, shares = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from([(1.0, 0), (0.6, 0.4)]))
    begins = [0, *draw(st.sampled_from([[], [7], [7, 20]]))]
    is_short = [layout.keys() <= {"order"} and draw(st.integers(0, 2)) == 0 for _ in begins]
    sizes = [draw(st.sampled_from([4, 6])) for _ in begins]
    skips = draw(st.sampled_from([[], [[3, 5], [9, 12]]]))
    made = []
    for name in draw(st.tuples(*[st.sampled_from(["web", "web", *VIEWS])] * 2)):
        exclude = {} if layout.get("order") == "random" else {name: draw(excluded)}
        stages = [
            {
                "from_step": begin,
                "global_batch_size": size,
                "mixture": {name: shares[0], **({"code": shares[1]} if shares[1] else {})},
                **({"seq_len": SEQ_LEN // 2} if short else {}),
                **({"exclude": exclude} if exclude.get(name) and begin == begins[-1] else {}),
            }
            for begin, size, short in zip(begins, sizes, is_short, strict=True)
        ]
        more = {"seed": 8} if draw(st.integers(0, 9)) == 0 else {}
        made.append({"seq_len": SEQ_LEN, "seed": 7, "stages": stages, "skip_steps": skips, **layout, **more})
    return made[0], made[1]


@given(documents=pairs(), until=st.integers(1, STEPS))
@settings(max_examples=60, deadline=None)
def test_totals_are_those_of_all_rows(
    catalog: Catalog, documents: tuple[dict[str, Any], dict[str, Any]], until: int
) -> None:
    a, b = (catalog.bind(Plan.from_json(document)) for document in documents)
    found = finish(total_slices(a.sampler, b.sampler, until=until))
    mixtures = [document["stages"][0]["mixture"] for document in documents]
    is_elsewhere = (
        len({min(each) for each in mixtures if len(each) > 1}) > 1
    )  # shares go by the order of names
    if documents[0]["seed"] != documents[1]["seed"] or is_elsewhere:
        assert found is None
        return
    assert found is not None
    expected = looked_at(a, b, until)
    assert {each.a: (each.num_rows, each.num_differ) for each in found.sources} == expected
    assert all(each.at_least == each.num_differ == each.at_most for each in (*found.sources, found))
    assert found.num_rows == sum(seen for seen, _ in expected.values())
    assert found.num_differ == sum(differ for _, differ in expected.values())


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=["shuffle", "sequential"])
def test_many_rows_are_estimated(catalog: Catalog, layout: dict[str, Any]) -> None:
    """Without code, which is the same, and under a bound that holds for the exact number."""
    a, b = (
        catalog.bind(
            Plan.from_json(
                {
                    "seq_len": SEQ_LEN,
                    "seed": 7,
                    "stages": [{"global_batch_size": 8, "mixture": {name: 0.5, "code": 0.5}}],
                    **layout,
                }
            )
        )
        for name in ("hq", "less")
    )
    exact, found = (
        finish(total_slices(a.sampler, b.sampler, until=2000, max_compared=most)) for most in (10**6, 2000)
    )
    assert exact is not None
    assert found is not None
    assert exact.at_least == exact.at_most == exact.num_differ
    ((code, viewed), (_, truth)) = (sorted(each.sources, key=lambda its: its.a) for each in (found, exact))
    assert (code.num_differ, code.at_most, code.num_rows + viewed.num_rows) == (0, 0, 16_000)
    for its, right in ((viewed, truth), (found, exact)):
        assert its.num_rows == right.num_rows
        assert its.at_least <= right.num_differ <= its.at_most
        assert 0 < its.at_most - its.at_least < 1500
        assert its.at_least <= its.num_differ <= its.at_most


def test_by_default_each_row_of_a_source_that_differs_comes_once(catalog: Catalog) -> None:
    stages = [{"global_batch_size": 4, "mixture": {"hq": 1}}]
    plain, other = (
        {"seq_len": SEQ_LEN, "stages": stages, **more}
        for more in ({}, {"stages": [{**stages[0], "exclude": {"hq": [[40, 41]]}}]})
    )
    a, b = (catalog.bind(Plan.from_json(each)) for each in (plain, other))
    found = finish(total_slices(a.sampler, b.sampler))
    assert found is not None
    assert found.until == -(-int(a.sampler.num_windows[0]) // 4)
    assert found.num_differ == looked_at(a, b, found.until)["hq"][1] > 0
