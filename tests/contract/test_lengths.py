"""Both halves over a curriculum of lengths: every response and every batch has the rows of its stage."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash

from corpus_client import ArrayLoader, CorpusLoader
from tests.conftest import ServedCorpus
from tests.contract.conftest import make_loader, take
from tests.reference import ReferencePlan, batch
from tests.serving import RunningServer

STAGES: list[dict[str, Any]] = [
    {"from_step": 0, "global_batch_size": 48, "mixture": {"web": 1.0}, "seq_len": 4},
    {"from_step": 20, "global_batch_size": 48, "mixture": {"web": 0.6, "mixed": 0.4}, "seq_len": 8},
    {"from_step": 35, "global_batch_size": 12, "mixture": {"web": 1.0}, "exclude": {"web": [[100, 3000]]}},
]
PLAN: dict[str, Any] = {"seq_len": 16, "seed": 7, "stages": STAGES, "skip_steps": [[10, 13]]}
NUM_STEPS, FIRST_OF_8, FIRST_OF_16 = 45, 17, 32

Corpora = dict[str, ServedCorpus]


@pytest.fixture(scope="module")
def plan_id(server: RunningServer) -> str:
    return str(server.post_plan(PLAN).json()["id"])


def expected(corpora: Corpora, step: int, **part: int) -> np.ndarray:
    """Return the tokens of a step by the slow reference."""
    return batch(PLAN, {name: corpora[name].shards for name in ("web", "mixed")}, step, **part)[0]


def of_plan(urls: str | list[str], **changes: Any) -> CorpusLoader:
    unset = {"corpus": None, "seq_len": None, "global_batch_size": None, "seed": 0}
    return make_loader(urls, **{**unset, "plan": PLAN, "num_steps": NUM_STEPS, **changes})


@pytest.mark.parametrize("source", ["batches", "indices"])
@pytest.mark.parametrize("world_size", [1, 4])
def test_a_loader_yields_the_rows_of_each_stage(
    corpora: Corpora, server: RunningServer, source: str, world_size: int
) -> None:
    """Also with a ring that holds a few steps, and where the tokens come from a local copy."""
    local = {"local_root": {name: corpora[name].path for name in ("web", "mixed")}}
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "dtype": None, "prefetch_bytes": 1 << 16}
        with of_plan(server.url, **options, **(local if source == "indices" else {})) as loader:
            taken = take(loader, NUM_STEPS + 1)
        assert [step for step, _ in taken] == list(range(NUM_STEPS))
        for step, tokens in taken:
            wanted = expected(corpora, step, rank=rank, world_size=world_size)
            np.testing.assert_array_equal(tokens, wanted, err_msg=f"step {step}")


def test_arrays_have_the_rows_of_each_stage(corpora: Corpora, server: RunningServer) -> None:
    with ArrayLoader(server.url, plan=PLAN, rank=0, world_size=1, num_steps=NUM_STEPS) as loader:
        for each in loader:
            np.testing.assert_array_equal(each.tokens, expected(corpora, each.step))


@pytest.mark.parametrize("at", [FIRST_OF_8 - 1, FIRST_OF_8, FIRST_OF_16 - 1, 40])
def test_a_state_resumes_in_any_stage_on_other_ranks(
    corpora: Corpora, server: RunningServer, at: int
) -> None:
    with of_plan(server.url) as loader:
        take(loader, at)
        state = loader.state_dict()
    with of_plan(server.url, rank=1, world_size=3, dtype=None) as resumed:
        resumed.load_state_dict(state)
        for step, tokens in take(resumed, 4):
            np.testing.assert_array_equal(tokens, expected(corpora, step, rank=1, world_size=3))


def test_a_stage_that_is_added_keeps_the_length_or_changes_it(server: RunningServer) -> None:
    plan = {**PLAN, "stages": STAGES[:1]}
    with of_plan(server.url, plan=plan, num_steps=60) as loader:
        take(loader, 5)
        loader.extend({"mixture": {"web": 1.0}})
        assert {tokens.shape for _, tokens in take(loader, 5)} == {(48, 5)}
        loader.extend({"mixture": {"web": 1.0}, "seq_len": 16, "global_batch_size": 12})
        assert {tokens.shape for _, tokens in take(loader, 5)} == {(12, 17)}


@pytest.mark.parametrize(("step", "shape"), [(0, (48, 5)), (FIRST_OF_8, (48, 9)), (FIRST_OF_16, (12, 17))])
def test_responses_have_the_shape_of_the_stage(
    corpora: Corpora, server: RunningServer, plan_id: str, step: int, shape: tuple[int, int]
) -> None:
    response = server.get("/v1/batches", plan=plan_id, step=step, count=3)
    wanted = np.stack([expected(corpora, each) for each in range(step, step + 3)])
    assert response.headers["Corpus-Shape"] == f"3,{shape[0]},{shape[1]}"
    assert response.body == wanted.astype(response.headers["Corpus-Dtype"]).tobytes()
    indices = server.get("/v1/indices", plan=plan_id, step=step).json()["indices"]
    reference = ReferencePlan(PLAN, {n: [s.size for s in corpora[n].shards] for n in ("web", "mixed")})
    assert indices == [[reference.located(step, row) for row in range(shape[0])]]
    receipt = server.get(f"/v1/plans/{plan_id}/receipt", step=step).json()
    whole = server.get("/v1/batches", plan=plan_id, step=step).body
    assert receipt["digest"] == f"xxh3-64={xxhash.xxh3_64_hexdigest(whole)}"
    assert receipt["global_batch_size"] == shape[0]


def test_a_plan_says_the_length_of_each_stage_and_usage_counts_its_rows(
    server: RunningServer, plan_id: str
) -> None:
    described = server.get(f"/v1/plans/{plan_id}").json()
    assert [stage["seq_len"] for stage in described["stages"]] == [4, 8, 16]
    used = server.get(f"/v1/plans/{plan_id}/usage", step=FIRST_OF_8).json()["sources"]["web"]
    assert (used["rows"], used["tokens"]) == (48 * 17, 48 * 17 * 4)


def test_a_look_up_names_the_part_that_holds_the_token(server: RunningServer, plan_id: str) -> None:
    found = server.get("/v1/lookup", plan=plan_id, corpus="web", start=40, stop=60).json()
    assert found["num_found"] == len(found["rows"])
    for row in found["rows"]:
        if row["step"] is not None:
            located = server.get("/v1/indices", plan=plan_id, step=row["step"]).json()["indices"]
            assert located[0][row["row"]] == [row["shard"], row["start"]]
