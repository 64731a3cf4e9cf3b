"""Both halves over plans in other trainers' own orders: the rows that those made, to the end of the run."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from corpus_client import ArrayLoader, CorpusLoader
from corpus_client.errors import StateMismatch
from corpus_server.corpus_spec import CorpusSpec
from tests import megatron, neox, olmo
from tests.contract.conftest import make_loader, take
from tests.megatron_rows import Case, digest
from tests.serving import RunningServer, check_problem

THREE, NEOX = megatron.THREE, Case(**neox.CASES["three paths"]["case"])
OLMO_NAME = "three epochs over two ranks"
OLMO = olmo.case_of(OLMO_NAME)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run of another trainer, as a plan.

    Args:
        specs: writes its corpora to a folder.
        tokens: of each corpus, by name.
        arranged: the served rows `(steps, rows, tokens)`, in the order of the trainer's own golden digest.
        most_ranks: a world size that divides its batch.
    """

    plan: dict[str, Any]
    specs: Callable[[Path], Sequence[CorpusSpec]]
    tokens: dict[str, np.ndarray]
    arranged: Callable[[np.ndarray], np.ndarray]
    sha256: str
    num_steps: int
    most_ranks: int = 4

    @property
    def batch_size(self) -> int:
        return int(self.plan["stages"][0]["global_batch_size"])


def of_megatron(case: Case, plan: dict[str, Any], sha256: str) -> Run:
    return Run(
        plan=plan,
        specs=lambda folder: megatron.specs(case, folder),
        tokens={name: case.tokens(number) for number, name in enumerate(megatron.names(case))},
        arranged=lambda rows: rows.reshape(-1, rows.shape[-1]),
        sha256=sha256,
        num_steps=case.num_samples // plan["stages"][0]["global_batch_size"],
    )


RUNS = {
    "megatron": of_megatron(
        THREE, megatron.document(THREE, 8), megatron.CASES["three paths, two epochs"]["sha256"]
    ),
    "neox": of_megatron(NEOX, neox.document(NEOX, 40), neox.CASES["three paths"]["sha256"]),
    "olmo": Run(
        plan=olmo.document(OLMO),
        specs=lambda folder: olmo.specs(OLMO, folder),
        tokens={"web": np.arange(sum(OLMO.lengths))},
        arranged=lambda rows: np.stack([rows[:, rank::2] for rank in range(2)]),
        sha256=olmo.CASES[OLMO_NAME]["sha256"],
        num_steps=39,
        most_ranks=3,
    ),
}


class Served:
    """A run whose corpora a server has."""

    def __init__(self, run: Run, folder: Path, server: RunningServer) -> None:
        self.run, self.folder, self.server = run, folder, server
        self.plan_id = str(server.post_plan(run.plan).json()["id"])
        with ArrayLoader(server.url, plan=run.plan, rank=0, world_size=1) as loader:
            self.rows = np.stack([each.tokens.copy() for each in loader])

    def get(self, question: str, **query: Any) -> Any:
        return self.server.get(f"/v1/plans/{self.plan_id}{question}", **query).json()

    def loader(self, **changes: Any) -> CorpusLoader:
        unset = {"corpus": None, "seq_len": None, "global_batch_size": None, "seed": 0, "dtype": None}
        return make_loader(self.server.url, **{**unset, "plan": self.run.plan, **changes})


@pytest.fixture(scope="module", params=RUNS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    run, folder = RUNS[request.param], tmp_path_factory.mktemp("corpora")
    found = run.specs(folder)
    with RunningServer({each.name: each.path for each in found}, tmp_path_factory.mktemp("server")) as server:
        yield Served(run, folder, server)


only = {name: pytest.mark.parametrize("served", [name], indirect=True, scope="module") for name in RUNS}


def test_arrays_are_the_rows_that_the_trainer_made(served: Served) -> None:
    assert digest(served.run.arranged(served.rows)) == served.run.sha256


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_loader_yields_them_and_ends_with_the_run(
    served: Served, is_alone: bool, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a local copy in responses of some rows each, and only indices travel."""
    monkeypatch.setattr("corpus_client.staging.local.REQUEST_ROWS", 20)
    run, world_size = served.run, 1 if is_alone else served.run.most_ranks
    options: dict[str, Any] = {}
    if is_local:
        roots = {
            each.name: each.path if each.path.is_dir() else each.path.parent
            for each in run.specs(served.folder)
        }
        options = {"prefetch_bytes": 1 << 14, "local_root": roots}
    share = run.batch_size // world_size
    for rank in {0, world_size - 1}:
        with served.loader(rank=rank, world_size=world_size, **options) as loader:
            taken = take(loader, run.num_steps + 1)
        assert [step for step, _ in taken] == list(range(run.num_steps))
        own = served.rows[:, rank * share : (rank + 1) * share]
        np.testing.assert_array_equal(np.stack([tokens for _, tokens in taken]), own)


def test_a_state_resumes(served: Served) -> None:
    with served.loader() as loader:
        take(loader, 7)
        state = loader.state_dict()
    with served.loader() as resumed:
        resumed.load_state_dict(state)
        taken = take(resumed, 3)
    assert [step for step, _ in taken] == [7, 8, 9]
    np.testing.assert_array_equal(taken[0][1], served.rows[7])


@only["megatron"]
def test_a_new_stage_goes_on_in_batches_of_another_size(served: Served) -> None:
    rows, plan = served.run.arranged(served.rows), served.run.plan
    with served.loader() as loader:
        take(loader, 7)
        state = loader.state_dict()
    assert state["plan"]["order"]["megatron"]["documents"]
    with served.loader(plan=state["plan"]) as loader:
        loader.load_state_dict(state)
        loader.extend({"mixture": plan["stages"][0]["mixture"], "global_batch_size": 20})
        taken = take(loader, 100)
    assert taken[0][0] == 7
    assert len(taken) == (THREE.num_samples - 7 * 8) // 20
    np.testing.assert_array_equal(np.concatenate([tokens for _, tokens in taken]), rows[56:396])
    other = {**plan, "order": {"megatron": {**plan["order"]["megatron"], "num_samples": 300}}}
    with served.loader(plan=other) as loader, pytest.raises(StateMismatch, match="order"):
        loader.load_state_dict(state)


def test_questions_are_answered(served: Served) -> None:
    rows, step, row = served.rows, 20, 4
    assert served.get("")["num_steps"] == served.run.num_steps
    found = served.get("/receipt", step=step)["digest"]
    assert found == f"xxh3-64={xxhash.xxh3_64(rows[step].tobytes()).hexdigest()}"
    token = int(rows[step, row, 1])
    name = next(name for name, tokens in served.run.tokens.items() if token in tokens)
    at = token - int(served.run.tokens[name][0])
    held = served.server.get("/v1/lookup", plan=served.plan_id, corpus=name, token=at, epochs=99).json()[
        "rows"
    ]
    assert (step, row, 1) in [(each["step"], each["row"], each["offset"]) for each in held]
    used = served.get("/usage", step=served.run.num_steps)["sources"]
    assert sum(each["rows"] for each in used.values()) == served.run.num_steps * served.run.batch_size
    shown = served.get("/rows", step=step, first=row, count=1)["rows"]
    assert [token for span in shown[0]["spans"] for token in span["tokens"]] == rows[step, row].tolist()
    shards = served.get("/shards", step=0, count=5)["shards"]
    assert {each["corpus"] for each in shards} == set(served.run.tokens)


@pytest.mark.parametrize("count", [1, 5])
@only["megatron"]
def test_indices_name_the_pieces_of_each_row(served: Served, count: int) -> None:
    """The same numbers in every format; a loop over them makes the rows."""
    rank, world_size = (0, 1) if count == 1 else (1, 4)
    part = {"step": 3, "count": count, "rank": rank, "world_size": world_size}
    said, raw, npy = (
        served.server.get("/v1/indices", plan=served.plan_id, **part, format=name)
        for name in ("json", "raw", "npy")
    )
    indices = said.json()["indices"]
    assert raw.headers["corpus-shape"] == f"{len(indices)},4"
    assert raw.array().tolist() == np.load(io.BytesIO(npy.body)).tolist() == indices
    share = 8 // world_size
    found: list[list[int]] = [[] for _ in range(count * share)]
    for row, shard, start, size in indices:
        corpus = said.json()["shards"][shard]["corpus"]
        found[row] += served.run.tokens[corpus][start : start + size].tolist()
    expected = served.rows[3 : 3 + count, rank * share : (rank + 1) * share]
    assert found == expected.reshape(count * share, -1).tolist()


def test_steps_behind_the_end_are_refused(served: Served) -> None:
    last = served.run.num_steps - 1
    found = served.server.get("/v1/batches", plan=served.plan_id, step=last, count=2)
    assert f"ends after {last + 1} steps" in check_problem(found, 422, "invalid-parameter")["detail"]


@only["olmo"]
def test_a_longer_plan_of_whole_batches_has_the_same_steps(served: Served) -> None:
    server, stage = served.server, {"from_step": 30, "global_batch_size": 12, "mixture": {"web": 1}}
    found = server.post_plan({"parent": served.plan_id, "stages": [stage]})
    assert "must be 6 as in all of the plan" in check_problem(found, 422, "invalid-plan")["detail"]
    found = server.post_plan({"parent": served.plan_id, "stages": [{**stage, "global_batch_size": 6}]})
    assert found.status == 200
    for step in (29, 38):
        longer = server.get(f"/v1/plans/{found.json()['id']}/receipt", step=step).json()["digest"]
        assert longer == served.get("/receipt", step=step)["digest"]
