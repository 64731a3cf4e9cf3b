"""Recorded losses over HTTP and in the terminal: curves, the rows that lost most, and their documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.corpus.index import index
from tests.corpora import some_tokens, spec, write_raw
from tests.recorded import Record, write_part
from tests.serving import WITHOUT_PRIVILEGES, RunningServer, check_problem, run_here
from tests.tokens import Tokens

ROWS, NUM_STEPS = 16, 60
STAGE = {"from_step": 0, "global_batch_size": ROWS, "mixture": {"text": 0.75, "ids": 0.25}}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {"seq_len": 40, "stages": [STAGE]},
    "balanced": {"seq_len": 40, "stages": [STAGE], "rows": {"documents": {"balance_ranks": True}}},
}
SPIKES = {(30, 5): 9.0, (44, 11): 8.0}
"""Losses of two places; those of all others are about 2."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    corpora = {}
    for name, seed in (("text", 1), ("ids", 2)):
        tokens = some_tokens(60_000, vocabulary=30, seed=seed)
        tokens[-1] = 0
        path = write_raw(folder / f"{name}.bin", tokens)
        index(spec(path, eot=0))
        corpora[name] = path
    (folder / "losses").mkdir()
    with RunningServer(corpora, folder, arguments=["--record-dir", str(folder / "losses")]) as server:
        yield server


@pytest.fixture(scope="module", params=PLANS)
def recorded(request: pytest.FixtureRequest, server: RunningServer, folder: Path) -> tuple[str, str]:
    """Return the name of a recording of two ranks, and its plan."""
    name = request.param
    plan_id = str(server.post_plan(PLANS[name]).json()["id"])
    draw = np.random.default_rng(0)
    for rank in range(2):
        records = []
        for step in range(NUM_STEPS):
            response = server.get(f"/v1/plans/{plan_id}/rows", step=step, count=ROWS, world_size=2)
            for place, row in list(enumerate(response.json()["rows"]))[8 * rank : 8 * rank + 8]:
                loss = SPIKES.get((step, place), 2 + draw.normal() / 10)
                records.append(Record(step, place, row["corpus"], loss))
        write_part(folder / "losses" / name, records, rank=rank, world_size=2, plan=plan_id)
    return name, plan_id


def test_a_curve_is_the_mean_of_each_source(server: RunningServer, recorded: tuple[str, str]) -> None:
    name, plan_id = recorded
    response = server.get(f"/v1/recordings/{name}/losses", points=20)
    assert response.headers["Cache-Control"] == "no-store"
    curve = response.json()
    assert (curve["plans"], curve["width"], curve["steps"]) == ([plan_id], 3, list(range(0, 60, 3)))
    assert set(curve["losses"]) == {"text", "ids"}
    assert sum(map(sum, curve["rows"].values())) == curve["num_rows"] == ROWS * NUM_STEPS
    assert curve["all"][10] == pytest.approx(2 + 7 / 48, abs=0.1)
    totals = [a + b for a, b in zip(*curve["rows"].values(), strict=True)]
    assert totals == [3 * ROWS] * 20
    some = server.get(f"/v1/recordings/{name}/losses", start=50, stop=10**9).json()
    assert (some["start"], some["stop"], some["num_rows"]) == (50, 60, 10 * ROWS)
    empty = server.get(f"/v1/recordings/{name}/losses", start=99).json()
    for route in ("losses", "spikes"):
        turned = server.get(f"/v1/recordings/{name}/{route}", start=50, stop=49)
        check_problem(turned, 422, "invalid-parameter", parameter="stop")
    assert (empty["steps"], empty["num_rows"]) == ([], 0)


def test_spikes_name_their_rows_and_documents(server: RunningServer, recorded: tuple[str, str]) -> None:
    """As the route of rows shows them, also where a plan deals rows to ranks in another order."""
    name, plan_id = recorded
    found = server.get(f"/v1/recordings/{name}/spikes", count=2).json()
    spikes = sorted(found["rows"], key=lambda each: each["step"])
    assert [(each["step"], each["loss"]) for each in spikes] == [(30, 9.0), (44, 8.0)]
    documents: dict[tuple[str, int], list[int]] = {}
    for spike, place in zip(spikes, SPIKES, strict=True):
        query = {"step": place[0], "first": place[1], "count": 1, "world_size": 2}
        (row,) = server.get(f"/v1/plans/{plan_id}/rows", **query).json()["rows"]
        assert (spike["plan"], spike["row"], spike["source"]) == (plan_id, row["row"], row["corpus"])
        lengths: dict[int, int] = {}
        for span in row["spans"]:
            lengths[span["document"]] = lengths.get(span["document"], 0) + len(span["tokens"])
        assert spike["documents"] == [{"document": n, "num_tokens": k} for n, k in lengths.items()]
        assert 1.5 < spike["usual"] < 2.5
        for number in lengths:
            documents.setdefault((row["corpus"], number), []).append(spike["step"])
    listed = {(each["source"], each["document"]): each for each in found["documents"]}
    assert {place: each["num_rows"] for place, each in listed.items()} == {
        place: len(steps) for place, steps in documents.items()
    }
    assert all(each["step"] in documents[place] for place, each in listed.items())
    scores = [each["score"] for each in found["documents"]]
    assert scores == sorted(scores, reverse=True)
    assert sum(scores) == pytest.approx(sum(each["score"] for each in found["rows"]))
    assert found["unresolved"] == {}


def test_the_terminal_shows_the_same(server: RunningServer, recorded: tuple[str, str], folder: Path) -> None:
    name, plan_id = recorded
    path = folder / "losses" / name
    there = server.get(f"/v1/recordings/{name}/spikes", count=2).json()["rows"]
    told = run_here("spikes", path, server.url, "--count", "2", "--json")
    rows = json.loads(told.stdout)["rows"]
    keys = ("plan", "step", "row", "source", "loss")
    assert [[each[key] for key in keys] for each in rows] == [[each[key] for key in keys] for each in there]
    numbers = [[its["document"] for its in each["documents"]] for each in there]
    assert [each["documents"] for each in rows] == numbers
    alone = run_here("spikes", path, "--start", "40", "--count", "1")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert plan_id[:12] in alone.stdout
    assert "320 rows of steps 40 to 59 compared" in alone.stdout
    nowhere = run_here("spikes", folder / "nowhere")
    assert (nowhere.returncode, len(nowhere.stderr.splitlines())) == (2, 1)
    assert f"{folder / 'nowhere'} is no folder" in nowhere.stderr


def test_what_a_plan_or_a_server_does_not_know(server: RunningServer, folder: Path) -> None:
    """Rows are listed without their documents, with the reason."""
    records = [Record(0, row, "text", 9.0 if row == 99 else float(row % 2)) for row in range(100)]
    write_part(folder / "losses" / "unknown", records)
    plan_id = str(server.post_plan(PLANS["plain"]).json()["id"])
    write_part(folder / "losses" / "other", records, plan=plan_id)
    for name, why in (("unknown", "plan"), ("other", "row must be")):
        found = server.get(f"/v1/recordings/{name}/spikes", count=1).json()
        assert [(each["row"], each["documents"]) for each in found["rows"]] == [(99, None)]
        assert why in next(iter(found["unresolved"].values()))
        assert found["documents"] == []
    for path in ("losses", "spikes"):
        check_problem(server.get(f"/v1/recordings/nothing/{path}"), 404, "unknown-recording")
        check_problem(server.get(f"/v1/recordings/..%2Funknown/{path}"), 404, "not-found")
    check_problem(server.get("/v1/recordings/other/losses", points=0), 422, "invalid-parameter")
    (folder / "losses" / "damaged").mkdir()
    (folder / "losses" / "damaged" / "rank-00000-part-000000.parquet").write_bytes(b"PAR1")
    listed = {each["name"]: each for each in server.get("/v1/recordings").json()["recordings"]}
    assert listed["other"]["num_rows"] == 100
    assert list(listed["damaged"]["unreadable"]) == ["rank-00000-part-000000.parquet"]


def test_only_who_may_read_the_sources_sees_their_losses(folder: Path, tmp_path: Path) -> None:
    path = write_raw(tmp_path / "text.bin", some_tokens(1000))
    write_part(tmp_path / "losses", [Record(0, 0, "text", 1.0), Record(0, 1, "secret", 1.0)])
    damaged = tmp_path / "losses" / "damaged" / "rank-00000-part-000000.parquet"
    damaged.parent.mkdir()
    damaged.write_bytes(b"nobody knows its sources")
    tokens = Tokens(tmp_path / "tokens.toml")
    tokens.add("one", "read:text")
    tokens.add("all", "read:*")
    arguments = ["--record-dir", str(tmp_path / "losses"), "--tokens", str(tokens.path)]
    with RunningServer({"text": path}, tmp_path, arguments=arguments) as server:
        for name, status in (("one", 404), ("all", 200)):
            headers = tokens.header(name)
            listed = server.get("/v1/recordings", headers=headers).json()["recordings"]
            assert [each["name"] for each in listed] == (["losses", "damaged"] if status == 200 else [])
            for route in ("losses/losses", "losses/spikes", "damaged/losses"):
                assert server.get(f"/v1/recordings/{route}", headers=headers).status == status
        assert server.get("/v1/recordings").status == 401


def test_a_folder_that_cannot_be_entered_hides_no_other(tmp_path: Path) -> None:
    """Those of another user, or lost+found of a volume."""
    path = write_raw(tmp_path / "text.bin", some_tokens(1000))
    for name in ("mine", "theirs"):
        write_part(tmp_path / "losses" / name, [Record(0, 0, "text", 1.0)])
        done = run_here("find", path, "--tokens", "1", "-n", "1", "--out", tmp_path / "reports" / name)
        assert done.returncode == 0, done.stderr
    closed = [tmp_path / kind / "theirs" for kind in ("losses", "reports")]
    tokens = Tokens(tmp_path / "tokens.toml")
    tokens.add("one", "read:text")
    tokens.add("all", "read:*")
    arguments = ["--tokens", str(tokens.path)]
    for option, kind in (("--record-dir", "losses"), ("--report-dir", "reports")):
        arguments += [option, str(tmp_path / kind)]
    try:
        for each in closed:
            each.chmod(0)
        with RunningServer(
            {"text": path}, tmp_path, arguments=arguments, prelude=WITHOUT_PRIVILEGES
        ) as server:
            for kind, of_all in (("recordings", "unreadable"), ("reports", "problem")):
                for name, expected in (("one", ["mine"]), ("all", ["mine", "theirs"])):
                    listed = server.get(f"/v1/{kind}", headers=tokens.header(name)).json()[kind]
                    assert [each["name"] for each in listed] == expected
                assert "Permission denied" in str(listed[1][of_all])
            for route in ("recordings/theirs/losses", "reports/theirs"):
                assert server.get(f"/v1/{route}", headers=tokens.header("one")).status == 404
            assert server.get("/v1/recordings/mine/losses", headers=tokens.header("one")).status == 200
            assert server.get("/v1/reports/mine", headers=tokens.header("one")).status == 200
    finally:
        for each in closed:
            each.chmod(0o755)
