"""Plans that continue others: the rows, and every response, of one document with all the stages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidPlan
from corpus_server.plan import Plan, Sampler, chain
from corpus_server.plan.chain import Continued, KeptLink, Link
from corpus_server.plan.document import MAX_STAGES
from corpus_server.plan.questions.diff import changed_fields, compare
from corpus_server.plan.questions.lookup import look_up
from corpus_server.plan.questions.usage import count_usage
from corpus_server.work import Budget
from tests.plans import Case, small_plans

STAGE = {"from_step": 0, "global_batch_size": 4, "mixture": {"web": 1.0}}
ROOT = {"seq_len": 8, "stages": [STAGE]}


def stage(from_step: int, **fields: Any) -> dict[str, Any]:
    return {**STAGE, "from_step": from_step, **fields}


def bound(plan: Plan) -> Any:
    return plan.bind({name: f"sampled-{name}" for name in plan.sources})


def continued(parent: Plan, stages: Sequence[dict[str, Any]], **fields: Any) -> Continued:
    found = bound(Continued.of(parent, Link.from_json({"parent": parent.id, "stages": stages, **fields})))
    assert isinstance(found, Continued)
    return found


def samplers(case: Case, cuts: Sequence[int]) -> list[Sampler]:
    """The sampler of each plan of a chain, whose documents begin with these stages."""
    stages = case.document["stages"]
    borders = [*sorted({*cuts, 1}), len(stages)]
    plan = bound(Plan.from_json({**case.document, "stages": stages[:1]}))
    found = [Sampler(plan, case.shard_tokens)]
    for start, stop in pairwise(borders):
        if start < stop:
            plan = continued(plan, stages[start:stop])
            found.append(Sampler(plan, case.shard_tokens, parent=found[-1]))
    return found


@settings(deadline=None, max_examples=60)
@given(small_plans(max_stages=6), st.data())
def test_a_chain_is_the_plan_with_all_stages_in_one_document(case: Case, data: st.DataObject) -> None:
    """Rows, usage, look-ups; and how the stages were put together when they were posted shows nowhere."""
    stages = case.document["stages"]
    cuts = data.draw(st.sets(st.integers(1, len(stages) - 1))) if len(stages) > 1 else set()
    *earlier, last = samplers(case, sorted(cuts))
    document = {**case.document, "version": last.plan.version}
    whole = Sampler(bound(Plan.from_json(document)), case.shard_tokens)
    assert last.plan.id == samplers(case, range(1, len(stages)))[-1].plan.id
    assert last.plan.sources == whole.plan.sources
    end = stages[-1]["from_step"] + 8
    for step in range(end):
        assert (whole.locate(step) == last.locate(step)).all()
    for sampler in earlier:  # later plans of the chain have left it alone
        begins = sampler.plan.skip_steps.outside_before(stages[len(sampler.plan.stages)]["from_step"])
        for step in range(begins):
            assert (whole.locate(step) == sampler.locate(step)).all()
    assert count_usage(last, 0, end, Budget()) == count_usage(whole, 0, end, Budget())
    name = data.draw(st.sampled_from(whole.plan.sources))
    token = data.draw(st.integers(0, sum(case.shard_tokens[name]) - 1))
    found = [look_up(each, name, token, token + 1, Budget(), epochs=3) for each in (whole, last)]
    assert found[0] == found[1]
    assert changed_fields(whole.plan, last.plan, Budget()) == []
    assert compare(whole, last, Budget()).equal_steps is None


@settings(deadline=None, max_examples=30)
@given(small_plans(max_stages=5), st.integers(0, 4), st.integers(1, 5))
def test_a_fork_of_any_decision_changes_nothing_before(case: Case, at: int, later: int) -> None:
    """Neither the rows of the fork before it, nor those of the run that it leaves."""
    chain = samplers(case, range(1, len(case.document["stages"])))
    parent, run = chain[min(at, len(chain) - 1)], chain[-1]
    before = [run.locate(step) for step in range(40)]
    begin = int(parent.timeline.from_steps[-1]) + later
    name = parent.plan.sources[0]
    fork_plan = continued(
        parent.plan, [{"from_step": begin, "global_batch_size": 5 * 12, "mixture": {name: 1}}]
    )
    fork = Sampler(fork_plan, case.shard_tokens, parent=parent)
    assert all((run.locate(step) == rows).all() for step, rows in enumerate(before))
    steps = parent.plan.skip_steps.outside_before(begin)
    assert all((fork.locate(step) == parent.locate(step)).all() for step in range(steps))
    if fork_plan.id != run.plan.id:
        first = compare(run, fork, Budget()).equal_steps
        assert first is not None
        assert first <= steps


def test_ids_are_a_hash_chain() -> None:
    """To the bit, and frozen: as docs/arithmetic.md has it."""
    root = bound(Plan.from_json(ROOT))
    mixture = {"web": 0.75, "code": 0.25}
    plan = continued(root, [stage(3, mixture=mixture), stage(9, exclude={"web": [[5, 9], [1, 6]]})])
    first = (
        f'{{"fingerprints":{{"code":"sampled-code"}},"parent":"{root.id}",'
        '"stages":[{"from_step":3,"global_batch_size":4,"mixture":{"code":0.25,"web":0.75}}],"version":1}'
    )
    first_id = hashlib.sha256(first.encode()).hexdigest()
    last = (
        f'{{"parent":"{first_id}","stages":[{{"exclude":{{"web":[[1,9]]}},'
        '"from_step":9,"global_batch_size":4,"mixture":{"web":1.0}}],"version":1}'
    )
    last_id = hashlib.sha256(last.encode()).hexdigest()
    assert plan.links == (KeptLink(first_id, first), KeptLink(last_id, last))
    assert (plan.id, plan.canonical_json) == (last_id, last)
    assert last_id == "edf67dcff2b8e16a68e4f3d8eade332ac6fb49bd4fc057219870d879f8ebf14d"


def test_links_are_restored_as_they_were_and_damaged_ones_are_not() -> None:
    root = bound(Plan.from_json(ROOT))
    stages = [
        stage(3, mixture={"web": 2, "code": 1}),
        stage(9, seq_len=4),
        stage(12, exclude={"web": [[5, 9]]}),
    ]
    plan = continued(root, stages)
    found = Continued.restored(bound(Plan.from_json(ROOT)), plan.links)
    assert found is not None
    assert (found.id, found.sources, list(found.stages)) == (plan.id, plan.sources, list(plan.stages))
    assert found.fingerprints == plan.fingerprints
    for number, link in enumerate(plan.links):
        damaged = [*plan.links]
        damaged[number] = KeptLink(
            link.id, link.document.replace('"global_batch_size":4', '"global_batch_size":8')
        )
        assert Continued.restored(root, damaged) is None
    assert Continued.restored(root, plan.links[1:]) is None


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (
            {"stages": [stage(0)]},
            r"stages\[0\].from_step must be above 0, .* last stage of its parent begins, got 0",
        ),
        (
            {"stages": [stage(4), stage(4)]},
            r"stages must be a list of stages with rising from_step, got \[4, 4\]",
        ),
        ({"stages": []}, "rising from_step"),
        ({"stages": [stage(4)], "seed": 3}, "unknown field 'seed'"),
        ({"stages": [stage(4)], "skip_steps": []}, "unknown field 'skip_steps'"),
        ({"stages": [stage(4)], "version": 2}, "version must be the version of its parent, 1, got 2"),
        ({"stages": [stage(4)], "version": 3}, "version must be a version"),
        ({"stages": [stage(4)], "parent": "ab"}, "parent must be the id of a plan"),
        ({"stages": [stage(4, seq_len=3)]}, r"stages\[0\].seq_len must be a divisor of the plan's seq_len 8"),
        (
            {"stages": [stage(4, exclude={"code": [[0, 1]]})]},
            r"stages\[0\].exclude must be sources of the plan up",
        ),
        (
            {"stages": [stage(4)], "fingerprints": {"web": "x"}},
            "fingerprints must be corpora that the link uses and",
        ),
        ({"stages": [stage(4)], "lengths": {"code": "x"}}, "lengths must be corpora that the link uses"),
        ({"stages": [stage(4, mixture={"code": 1})], "lengths": {"code": "x"}}, "lengths must be left out"),
        ({"stages": [stage(k) for k in range(1, MAX_STAGES + 2)]}, "at most 512 stages, got 513"),
    ],
)
def test_what_contradicts_its_parent_is_refused_by_name(link: dict[str, Any], message: str) -> None:
    root = bound(Plan.from_json(ROOT))
    with pytest.raises(InvalidPlan, match=message):
        Continued.of(root, Link.from_json({"parent": root.id, **link}))


def test_a_chain_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stages, of stages times sources, of stages that exclude; with smaller numbers in their place."""
    root = bound(Plan.from_json(ROOT))
    monkeypatch.setattr(chain, "MAX_CHAIN_STAGES", 5)
    plan = continued(root, [stage(k) for k in range(1, 5)])
    with pytest.raises(InvalidPlan, match="at most 5 stages, got 6"):
        continued(plan, [stage(5)])
    monkeypatch.setattr(chain, "MAX_CHAIN_STAGES", 2000)
    monkeypatch.setattr(chain, "MAX_CHAIN_WEIGHTS", 11)
    with pytest.raises(InvalidPlan, match=r"at most 11 stages times the sources .*, got 12"):
        continued(plan, [stage(5, mixture={"code": 1})])
    monkeypatch.setattr(chain, "MAX_CHAIN_WEIGHTS", 4000)
    excluding = [stage(k, exclude={"web": [[k, k + 1]]}) for k in range(1, MAX_STAGES + 1)]
    plan = continued(root, excluding)
    with pytest.raises(InvalidPlan, match="exclude must be in at most 512 stages of a plan, got 513"):
        continued(plan, [stage(MAX_STAGES + 1, exclude={"web": [[0, 1]]})])


def test_of_more_decisions_than_a_document_may_have_each_source_gives_its_next_window() -> None:
    """Positions, by counting what each source has given."""
    draw = np.random.default_rng(0)
    shard_tokens = {"web": [4001], "code": [977], "math": [60]}
    sizes = {name: (sum(tokens) - 1) // 4 for name, tokens in shard_tokens.items()}
    weights = draw.integers(1, 100, (1500, 3)).tolist()
    stages = [
        stage(2 * k + 1, global_batch_size=3, mixture=dict(zip(shard_tokens, each, strict=True)))
        for k, each in enumerate(weights)
    ]
    first = {**STAGE, "global_batch_size": 3, "mixture": dict.fromkeys(shard_tokens, 1)}
    plan = bound(Plan.from_json({"seq_len": 4, "order": "sequential", "stages": [first]}))
    sampler = Sampler(plan, shard_tokens)
    for at in range(0, len(stages), 500):
        sampler = Sampler(continued(sampler.plan, stages[at : at + 500]), shard_tokens, parent=sampler)
    given = dict.fromkeys(sampler.plan.sources, 0)
    for step in range(3001):
        for shard, start in sampler.locate(step)[0].tolist():
            name = sampler.plan.sources[shard]
            assert start == given[name] % sizes[name] * 4
            given[name] += 1
    used = count_usage(sampler, 0, 3001, Budget()).sources
    assert {name: its.rows for name, its in used.items()} == given
    assert json.loads(sampler.plan.canonical_json)["stages"][0]["from_step"] == 2999
