"""`plans successor`: from documents that must go to the plan that goes on without them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_client import CorpusLoader, Placement
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.index import index
from tests.corpora import some_tokens, spec, write_raw
from tests.serving import RunningServer, run_here

EOT = 0
PLAN: dict[str, Any] = {
    "seq_len": 16,
    "seed": 3,
    "stages": [{"from_step": 0, "global_batch_size": 4, "mixture": {"web": 1}}],
}
MIXED = [{"from_step": 0, "global_batch_size": 4, "mixture": {"web": 0.5, "code": 0.5}}]


def documents(folder: Path, seed: int) -> Path:
    """Write a corpus of 100 documents of 40 tokens."""
    folder.mkdir()
    tokens = some_tokens(4000, seed=seed) % 30_000 + 1
    tokens[39::40] = EOT
    write_raw(folder / "0.bin", tokens)
    index(spec(folder, eot=EOT))
    return folder


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return {name: documents(folder / name, seed) for seed, name in enumerate(("web", "code"), 1)}


@pytest.fixture(scope="module")
def server(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(paths, tmp_path_factory.mktemp("server")) as running:
        yield running


def successor(*words: object) -> subprocess.CompletedProcess[str]:
    return run_here("plans", "successor", *words)


def posted(server: RunningServer, **fields: Any) -> str:
    return str(server.post_plan({**PLAN, **fields}).json()["id"])


def held(server: RunningServer, plan: str, document: int) -> set[int]:
    """Return the steps of two epochs of `web` that hold a token of a document."""
    found = server.get("/v1/lookup", plan=plan, corpus="web", document=document, epochs=2, limit=1000).json()
    assert not found["truncated"]
    return {each["step"] for each in found["rows"]}


def rows(server: RunningServer, plan: str, step: int) -> bytes:
    return server.get(f"/v1/batches?plan={plan}&step={step}").body


def test_from_a_benchmark_to_a_run_that_goes_on_without_it(
    server: RunningServer, paths: dict[str, Path], tmp_path: Path
) -> None:
    plan = posted(server)
    with Corpus.open(spec(paths["web"])) as corpus:
        edges = [corpus.document_range(number) for number in (7, 50)]
        texts = [",".join(map(str, tokens_of(paths["web"])[start + 5 : start + 25])) for start, _ in edges]
    given = [word for text in texts for word in ("--tokens", text)]
    corpora = [f"{name}={path}" for name, path in paths.items()]
    run = ("--plan", plan, "--before-step", 60, "--server", server.url, "--out", tmp_path / "report")
    found = run_here("find", *corpora, *given, *map(str, run))
    assert found.returncode == 0, found.stderr
    assert json.loads((tmp_path / "report/report.json").read_text())["exclude"]["web"] == [
        [*each] for each in edges
    ]
    done = successor(plan[:12], server.url, "--report", tmp_path / "report", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    first = min(step for document in (7, 50) for step in held(server, plan, document) if step >= 60)
    assert (made["at_step"], made["first_step"]) == (60, first)
    assert held(server, plan, 7) & {*range(60)}, "the run saw it"
    for document in (7, 50):
        assert max(held(server, made["id"], document), default=-1) < 60
    differ = [step for step in range(first + 1) if rows(server, plan, step) != rows(server, made["id"], step)]
    assert differ == [first]
    # A loader that extends at this step comes to the same plan.
    with CorpusLoader(
        server.url, plan=PLAN, placement=Placement(rank=0, world_size=1), device="cpu"
    ) as loader:
        loader.seek(60)
        assert loader.extend(exclude={"web": [[*each] for each in edges]}) == made["id"]
    said = successor(plan, server.url, "--report", tmp_path / "report/report.json", "--at-step", 60)
    assert f"successor {made['id']}" in said.stdout
    assert f"The first step that differs is {first}." in " ".join(said.stdout.split())
    assert "draws anew" not in said.stdout


def test_of_a_mixture_it_is_said_that_other_rows_move(
    server: RunningServer, paths: dict[str, Path], tmp_path: Path
) -> None:
    plan = posted(server, stages=MIXED)
    (tmp_path / "deny.txt").write_text("7\n")
    asked = (plan, server.url, "--at-step", 30, "--corpus", f"web={paths['web']}", "--without")
    done = successor(*asked, tmp_path / "deny.txt")
    assert done.returncode == 0, done.stderr
    assert "A stage draws anew which source each row has" in done.stdout


def tokens_of(folder: Path) -> list[int]:
    return np.fromfile(folder / "0.bin", "<u2").tolist()


def test_a_list_and_a_view_come_to_the_plan_of_a_report(
    server: RunningServer, paths: dict[str, Path], tmp_path: Path
) -> None:
    plan, web = posted(server), paths["web"]
    (tmp_path / "deny.txt").write_text("50\n7\n8\n")
    view = tmp_path / "clean.view"
    made = run_here("view", "create", web, "--without", tmp_path / "deny.txt", "--out", view)
    assert made.returncode == 0, made.stderr
    asked = (plan, server.url, "--at-step", 30, "--json", "--corpus")
    by_list = successor(*asked, f"web={web}", "--without", tmp_path / "deny.txt")
    by_view = successor(*asked, f"web={web}?view={view}")
    assert by_list.returncode == by_view.returncode == 0, by_list.stderr + by_view.stderr
    assert json.loads(by_list.stdout) == json.loads(by_view.stdout)
    told = json.loads(by_list.stdout)
    assert told["exclude"] == {"web": [[7 * 40, 9 * 40], [50 * 40, 51 * 40]]}
    document = server.get(f"/v1/plans/{told['id']}").json()["plan"]
    assert (document["parent"], document["stages"][0]["exclude"]) == (plan, told["exclude"])


def test_stages_that_come_later_leave_them_out_too(
    server: RunningServer, paths: dict[str, Path], tmp_path: Path
) -> None:
    """Training steps are given, and the plan skips two; the stage that begins there is no other one."""
    later = {"from_step": 40, "global_batch_size": 8, "mixture": {"web": 1}, "exclude": {"web": [[0, 5]]}}
    plan = posted(server, stages=[*PLAN["stages"], later], skip_steps=[[3, 5]])
    (tmp_path / "deny.txt").write_text("7\n")
    asked = ("--corpus", f"web={paths['web']}", "--without", tmp_path / "deny.txt", "--json", "--at-step")
    for at, starts in ((30, [0, 32, 40]), (38, [0, 40]), (60, None)):
        done = successor(plan, server.url, *asked, at)
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)["id"]
        document = server.get(f"/v1/plans/{made}").json()["plan"]
        if starts is None:
            assert document["parent"] == plan
        else:
            assert [stage["from_step"] for stage in document["stages"]] == starts
            excluding = {stage["from_step"]: stage["exclude"]["web"] for stage in document["stages"][1:]}
            assert [280, 320] in excluding[starts[1]]
            assert excluding[40][0] == [0, 5]
        assert max(held(server, made, 7), default=-1) < at
        assert all(rows(server, plan, step) == rows(server, made, step) for step in (0, 4, at - 1))
    chain = made
    done = successor(chain, server.url, *asked, 50)
    assert done.returncode == 2
    assert "has a stage from step 62 on, and continues another plan" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--report", "{report}"], "--at-step"),
        (["--report", "{report}", "--without", "{deny}", "--at-step", "5"], "--without needs --corpus"),
        (["--at-step", "5"], "name --report, or a --corpus"),
        (["--at-step", "5", "--corpus", "web={web}"], "needs --without FILE, or a view"),
        (["--at-step", "5", "--corpus", "other={web}", "--without", "{deny}"], "reads no corpus 'other'"),
        (["--at-step", "5", "--corpus", "web={code}", "--without", "{deny}"], "has another content"),
        (["--at-step", "5", "--corpus", "web={web}", "--without", "{nowhere}"], "nowhere.txt"),
        (["--at-step", "5", "--report", "{deny}"], "is no report of corpus-server find"),
        (["--at-step", "5", "--report", "{other}"], "has another content"),
    ],
)
def test_refusals_are_one_line(
    server: RunningServer, paths: dict[str, Path], tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "deny.txt").write_text("7\n")
    corpora = [{"corpus": "web", "fingerprint": "xxh3-1"}]
    (tmp_path / "other.json").write_text(json.dumps({"corpora": corpora, "exclude": {"web": [[0, 5]]}}))
    with Corpus.open(spec(paths["web"])) as corpus:
        corpora[0]["fingerprint"] = corpus.fingerprint
    (tmp_path / "report.json").write_text(json.dumps({"corpora": corpora, "exclude": {"web": [[0, 5]]}}))
    known = {**paths, "deny": tmp_path / "deny.txt", "nowhere": tmp_path / "nowhere.txt"}
    known |= {"report": tmp_path / "report.json", "other": tmp_path / "other.json"}
    done = successor(posted(server), server.url, *(word.format(**known) for word in words))
    assert (done.returncode, said in " ".join(done.stderr.split())) == (2, True), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_nothing_to_leave_out_is_said(server: RunningServer, paths: dict[str, Path], tmp_path: Path) -> None:
    plan = posted(server)
    corpora = [f"{name}={path}" for name, path in paths.items()]
    found = run_here(
        "find", *corpora, "--tokens", "9,9,9,9,9,9,9,9,9,9,9,9,9,9", "--out", tmp_path / "report"
    )
    assert found.returncode == 0, found.stderr
    done = successor(plan, server.url, "--at-step", 5, "--report", tmp_path / "report")
    assert done.returncode == 0, done.stderr
    assert "nothing is left out" in done.stdout + done.stderr
