"""Both halves over a plan in Megatron's order: the rows that Megatron-Core made, to the end of the run."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from corpus_client import ArrayLoader, CorpusLoader
from corpus_client.errors import StateMismatch
from tests.contract.conftest import make_loader, take
from tests.megatron import CASES, THREE, document, names, specs
from tests.megatron_rows import digest
from tests.serving import RunningServer, check_problem

PLAN = document(THREE, 8)
NUM_STEPS = THREE.num_samples // 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora")


@pytest.fixture(scope="module")
def running(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    found = specs(THREE, folder)
    with RunningServer({each.name: each.path for each in found}, tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def plan_id(running: RunningServer) -> str:
    return str(running.post_plan(PLAN).json()["id"])


@pytest.fixture(scope="module")
def rows(running: RunningServer) -> np.ndarray:
    """All rows of the run."""
    with ArrayLoader(running.url, plan=PLAN, rank=0, world_size=1) as loader:
        return np.concatenate([each.tokens.copy() for each in loader])


def of_plan(server: RunningServer, **changes: Any) -> CorpusLoader:
    unset = {"corpus": None, "seq_len": None, "global_batch_size": None, "seed": 0}
    return make_loader(server.url, **{**unset, "plan": PLAN, "dtype": None, **changes})


def test_arrays_are_the_rows_that_megatron_core_made(rows: np.ndarray) -> None:
    assert digest(rows) == CASES["three paths, two epochs"]["sha256"]


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_loader_yields_them_and_ends_with_the_run(
    running: RunningServer, rows: np.ndarray, world_size: int
) -> None:
    share = 8 // world_size
    for rank in range(world_size):
        with of_plan(running, rank=rank, world_size=world_size) as loader:
            taken = take(loader, NUM_STEPS + 1)
        assert [step for step, _ in taken] == list(range(NUM_STEPS))
        for step, tokens in taken:
            first = 8 * step + share * rank
            np.testing.assert_array_equal(tokens, rows[first : first + share])


def test_a_state_resumes_and_a_new_stage_goes_on(running: RunningServer, rows: np.ndarray) -> None:
    with of_plan(running) as loader:
        take(loader, 7)
        state = loader.state_dict()
    assert state["plan"]["order"]["megatron"]["documents"]
    with of_plan(running, plan=state["plan"]) as loader:
        loader.load_state_dict(state)
        loader.extend({"mixture": PLAN["stages"][0]["mixture"], "global_batch_size": 20})
        taken = take(loader, 100)
    assert taken[0][0] == 7
    assert len(taken) == (THREE.num_samples - 7 * 8) // 20
    np.testing.assert_array_equal(np.concatenate([tokens for _, tokens in taken]), rows[56:396])
    other = {**PLAN, "order": {"megatron": {**PLAN["order"]["megatron"], "num_samples": 300}}}
    with of_plan(running, plan=other) as loader, pytest.raises(StateMismatch, match="order"):
        loader.load_state_dict(state)


def test_questions_are_answered(running: RunningServer, plan_id: str, rows: np.ndarray) -> None:
    said = running.get(f"/v1/plans/{plan_id}").json()
    assert said["num_steps"] == NUM_STEPS
    found = running.get(f"/v1/plans/{plan_id}/receipt?step=3").json()
    assert found["digest"] == f"xxh3-64={xxhash.xxh3_64(rows[24:32].tobytes()).hexdigest()}"
    token = int(rows[30, 5])
    source = next(n for n in range(3) if token in THREE.tokens(n))
    name, local = names(THREE)[source], token - int(THREE.tokens(source)[0])
    held = running.get(f"/v1/lookup?plan={plan_id}&corpus={name}&token={local}&epochs=9").json()["rows"]
    assert (3, 6) in [(row["step"], row["row"]) for row in held]
    used = running.get(f"/v1/plans/{plan_id}/usage?step={NUM_STEPS}").json()["sources"]
    assert sum(each["rows"] for each in used.values()) == THREE.num_samples
    shards = running.get(f"/v1/plans/{plan_id}/shards?step=0&count=5").json()["shards"]
    assert {each["corpus"] for each in shards} == set(names(THREE))
    shown = running.get(f"/v1/plans/{plan_id}/rows?step=3&first=6&count=1").json()["rows"]
    assert [token for span in shown[0]["spans"] for token in span["tokens"]] == rows[30].tolist()


@pytest.mark.parametrize(("count", "rank", "world_size"), [(1, 0, 1), (5, 1, 4)])
def test_indices_name_the_pieces_of_each_row(
    running: RunningServer, plan_id: str, rows: np.ndarray, count: int, rank: int, world_size: int
) -> None:
    """The same numbers in every format; a loop over them makes the rows."""
    asked = f"/v1/indices?plan={plan_id}&step=3&count={count}&rank={rank}&world_size={world_size}"
    said = running.get(asked).json()
    raw, npy = (running.get(f"{asked}&format={name}") for name in ("raw", "npy"))
    assert raw.headers["corpus-shape"] == f"{len(said['indices'])},4"
    assert raw.array().tolist() == said["indices"]
    assert np.load(io.BytesIO(npy.body)).tolist() == said["indices"]
    tokens = {name: THREE.tokens(number) for number, name in enumerate(names(THREE))}
    share = 8 // world_size
    found: list[list[int]] = [[] for _ in range(count * share)]
    for row, shard, start, size in said["indices"]:
        found[row] += tokens[said["shards"][shard]["corpus"]][start : start + size].tolist()
    expected = rows[24 : 24 + 8 * count].reshape(count, 8, -1)[:, rank * share : (rank + 1) * share]
    assert found == expected.reshape(count * share, -1).tolist()


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_local_copy_gives_the_same_rows(
    running: RunningServer, rows: np.ndarray, folder: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the end of the run, in responses of some rows each, and only indices travel."""
    monkeypatch.setattr("corpus_client.staging.local.REQUEST_ROWS", 20)
    share, roots = 8 // world_size, dict.fromkeys(names(THREE), folder)
    for rank in range(0, world_size, 3):
        options = {"rank": rank, "world_size": world_size, "prefetch_bytes": 1 << 14, "local_root": roots}
        with of_plan(running, **options) as loader:
            taken = take(loader, NUM_STEPS + 1)
        own = rows[: NUM_STEPS * 8].reshape(NUM_STEPS, 8, -1)[:, rank * share : (rank + 1) * share]
        np.testing.assert_array_equal(np.stack([tokens for _, tokens in taken]), own)


def test_what_a_plan_cannot_give_is_refused_by_name(running: RunningServer, plan_id: str) -> None:
    found = running.get(f"/v1/batches?plan={plan_id}&step={NUM_STEPS - 1}&count=2")
    assert f"make {NUM_STEPS} steps" in check_problem(found, 422, "invalid-parameter")["detail"]
