"""Decisions ahead of the loader: what was fetched stays, and a state holds all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed.checkpoint as checkpoint

from corpus_client import CorpusLoader, errors
from tests.client.conftest import make_corpus
from tests.client.reference_plan import tokens_of_step, whole
from tests.client.reference_server import ReferenceServer

MakeLoader = Callable[..., CorpusLoader]
CORPORA = [make_corpus("web", 1), make_corpus("code", 2), make_corpus("math", 3)]
SMALL = {"global_batch_size": 8, "prefetch_bytes": 1 << 14, "order": "shuffle"}
"""Fifty-odd steps ahead."""


@pytest.fixture
def server() -> Iterator[ReferenceServer]:
    with ReferenceServer(CORPORA) as server:
        yield server


def of_plan(make_loader: MakeLoader, plan: dict[str, Any]) -> CorpusLoader:
    unset = dict.fromkeys(("corpus", "seq_len", "global_batch_size"))
    return make_loader(plan=plan, prefetch_bytes=1 << 14, order="shuffle", **unset)


def take(loader: CorpusLoader, count: int) -> list[tuple[int, np.ndarray]]:
    return [(batch.step, batch.tokens.numpy().copy()) for _, batch in zip(range(count), loader, strict=False)]


def expect(taken: list[tuple[int, np.ndarray]], plan: dict[str, Any], start: int = 0) -> None:
    plan = whole(plan)
    assert [step for step, _ in taken] == list(range(start, start + len(taken)))
    for step, tokens in taken:
        np.testing.assert_array_equal(tokens, tokens_of_step(CORPORA, plan, step))


def settle(loader: CorpusLoader) -> int:
    """Wait until nothing more is fetched ahead; return the first step that is free."""
    found = num_same = 0
    while num_same < 20:  # looks, not seconds: a machine that stalls stops the fetcher, too
        time.sleep(0.01)
        before, found = found, loader.first_free_step
        num_same = num_same + 1 if found == before else 0
    return found


def mixture(number: int) -> dict[str, int]:
    return {"web": 1 + number % 7, "code": 1 + number % 5}


@pytest.mark.parametrize(
    "changes",
    [{}, {"global_batch_size": 16}, {"exclude": {"web": [[0, 500]]}}, {"mixture": {"web": 1, "math": 3}}],
    ids=["weights", "batch size", "exclude", "new source"],
)
def test_a_decision_ahead_holds_from_its_step(
    make_loader: MakeLoader, server: ReferenceServer, changes: dict[str, Any]
) -> None:
    """Twice, the second time by name; and where only weights change, no step is asked for twice."""
    loader = make_loader(**SMALL)
    taken = take(loader, 3)
    first = settle(loader) + 5
    asked = len(server.array_headers)
    old_id = loader.plan_id
    assert loader.extend({"mixture": mixture(0), **changes}, at_step=first) == loader.plan_id != old_id
    assert loader.last_stage_step == first
    taken += take(loader, 10)
    second = settle(loader)
    loader.extend(mixture=mixture(1), at_step=second)
    taken += take(loader, second + 20)
    expect(taken, loader.plan)
    assert [stage["from_step"] for stage in whole(loader.plan)["stages"]] == [0, first, second]
    sizes = {len(tokens) for step, tokens in taken if first <= step < second}
    assert sizes == {changes.get("global_batch_size", 8)}
    if "global_batch_size" not in changes:
        steps = [int(path.partition("step=")[2].split("&")[0]) for path in server.paths if "batches" in path]
        assert len(steps) == len(set(steps))
    assert len(server.array_headers) > asked


def test_a_step_that_was_asked_for_is_refused_and_the_first_free_one_named(
    make_loader: MakeLoader, server: ReferenceServer
) -> None:
    loader = make_loader(**SMALL)
    assert loader.first_free_step == 0
    taken = take(loader, 2)
    free, plan_id = settle(loader), loader.plan_id
    for step in (1, free - 1):
        with pytest.raises(errors.InvalidArgument, match=f"at_step must be {free} or later, got {step}"):
            loader.extend(mixture=mixture(1), at_step=step)
    assert loader.plan_id == plan_id
    loader.extend(mixture=mixture(1), at_step=free)
    with pytest.raises(errors.InvalidArgument, match=f"begin at plan step {free}, where or before which"):
        loader.extend(mixture=mixture(2), at_step=free)
    expect(taken + take(loader, free + 4), loader.plan)


@pytest.mark.parametrize("arguments", [{}, {"stage": {"mixture": {"web": 1}}, "mixture": {"web": 1}}])
def test_a_stage_is_given_in_one_way(make_loader: MakeLoader, arguments: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidArgument, match="a stage, or the fields of one by name"):
        make_loader().extend(**arguments)


def test_a_state_holds_every_decision_and_needs_no_server_that_remembers(
    make_loader: MakeLoader, server: ReferenceServer
) -> None:
    """Several hundred are posted in parts; of a lost plan only those that are missing."""
    before = [
        f"[{2 * number + 1},{65536 // (2 + number % 2)},{65536 - 65536 // (2 + number % 2)}]"
        for number in range(300)
    ]
    before[0] = json.dumps(
        {"from_step": 1, "global_batch_size": 8, "seq_len": 16, "mixture": {"web": 1, "code": 1}}
    )
    loader = of_plan(make_loader, {**make_loader(**SMALL).plan, "decisions": "\n".join(before)})
    loader.extend(mixture={"math": 1, "web": 3}, global_batch_size=4, exclude={"web": [[0, 99]]}, at_step=700)
    loader.extend(mixture={"web": 2, "math": 1, "code": 1}, at_step=701)
    state = json.loads(json.dumps(loader.state_dict()))
    lines = state["plan"]["decisions"].splitlines()
    assert lines[1:300] == before[1:]
    assert json.loads(lines[0])["mixture"] == {"code": 32768, "web": 32768}
    assert lines[301:] == ["[701,32768,16384,16384]"]
    assert json.loads(lines[-2]) == {
        "from_step": 700,
        "global_batch_size": 4,
        "seq_len": 16,
        "mixture": {"math": 16384, "web": 49152},
        "exclude": {"web": [[0, 99]]},
        "fingerprints": {"math": CORPORA[2].fingerprint},
    }
    taken = take(loader, 710)
    server.plans.clear()
    resumed = of_plan(make_loader, state["plan"])
    assert resumed.plan_id == loader.plan_id
    resumed.load_state_dict(state)
    expect(take(resumed, 710), loader.plan)
    expect(taken, loader.plan)
    for plan_id in list(server.plans)[-20:]:  # the newest
        del server.plans[plan_id]
    num_posts = server.num_posts
    resumed.seek(690)
    expect(take(resumed, 5), loader.plan, 690)
    assert 1 <= server.num_posts - num_posts <= 4


def test_a_state_with_other_decisions_is_refused_by_the_first_that_differ(make_loader: MakeLoader) -> None:
    one, other = make_loader(**SMALL), make_loader(**SMALL)
    for step in (3, 6, 9):
        one.extend(mixture=mixture(step), at_step=step)
        if step < 9:
            other.extend(mixture=mixture(0 if step == 6 else step), at_step=step)
    with pytest.raises(
        errors.StateMismatch,
        match=r"number of decisions: the state has 3, this loader 2; decisions\[1\]: the state has '\[6,",
    ):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    "decisions", [3, "nonsense", "[1,\n2]", "7"], ids=["number", "no JSON", "broken line", "no stage"]
)
def test_decisions_that_are_none_are_refused(make_loader: MakeLoader, decisions: Any) -> None:
    plan = {**make_loader(**SMALL).plan, "decisions": decisions}
    with pytest.raises(errors.InvalidArgument, match="the plan's decisions must be lines of JSON"):
        of_plan(make_loader, plan)


def test_a_fork_of_any_decision_is_a_plan_with_fewer_lines(make_loader: MakeLoader) -> None:
    loader = make_loader(**SMALL)
    for number in range(10):
        loader.extend(mixture=mixture(number), at_step=4 * number + 4)
    taken = take(loader, 50)
    plan = loader.plan
    plan["decisions"] = "\n".join(plan["decisions"].splitlines()[:5])
    fork = of_plan(make_loader, plan)
    fork.extend(mixture={"math": 1}, at_step=24)
    forked = take(fork, 40)
    for (step, tokens), (_, others) in zip(forked[:24], taken, strict=False):
        assert (tokens == others).all(), step
    expect(forked, fork.plan)
    expect(taken, loader.plan)


@pytest.mark.filterwarnings("ignore")  # torch's own, of checkpoints in one process
def test_a_distributed_checkpoint_of_an_extended_run_is_whole(
    make_loader: MakeLoader, tmp_path: Path
) -> None:
    """It is loaded into the state of a loader that knows no decision yet."""
    loader = make_loader(**SMALL)
    take(loader, 5)
    loader.extend(mixture={"web": 3, "code": 1})
    expected = take(loader, 5)
    checkpoint.save({"data": loader.state_at(5)}, checkpoint_id=tmp_path, no_dist=True)
    saved = {"data": make_loader(**SMALL).state_dict()}
    checkpoint.load(saved, checkpoint_id=tmp_path, no_dist=True)
    assert saved["data"] == loader.state_at(5)
    resumed = of_plan(make_loader, saved["data"]["plan"])
    resumed.load_state_dict(saved["data"])
    for (step, tokens), (before, found) in zip(take(resumed, 5), expected, strict=True):
        assert step == before
        np.testing.assert_array_equal(tokens, found)
