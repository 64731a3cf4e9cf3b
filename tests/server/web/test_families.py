"""Plans of families over HTTP and the command line: bound, served, described, asked about."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.corpus.index import index
from tests.corpora import spec, write_raw
from tests.metadata import write_metadata
from tests.reference import one_source
from tests.serving import RunningServer, check_problem, run_here
from tests.views import write_view

EOT = 0
LENGTHS = np.random.default_rng(0).integers(2, 30, 600).tolist()
SEQ_LEN = 16
SITES = [None if n % 9 == 4 else f"{n * n % 40}.org" for n in range(600)]
COLUMNS = {"site": SITES, "year": [n % 30 for n in range(600)], "score": [n / 7 for n in range(600)]}
FAMILY = {"seed": 7, "leave_out": 0.1, "member": 3}


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of three shards, in which a token is one more than the number of its document."""
    folder = tmp_path_factory.mktemp("families") / "web"
    folder.mkdir()
    numbers = itertools.count(1)
    for shard in range(3):
        its = zip(LENGTHS[200 * shard : 200 * shard + 200], numbers, strict=False)
        tokens = [each for length, number in its for each in (*[number] * (length - 1), EOT)]
        write_raw(folder / f"{shard}.bin", tokens, dtype="uint32")
    index(spec(folder, eot=EOT, dtype="uint32"))
    write_metadata(folder / "documents", COLUMNS)
    return folder


@pytest.fixture(scope="module")
def server(web: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server")
    raw = write_raw(folder / "raw.bin", np.arange(2000))
    twice = write_view(web, [n % 3 for n in range(600)], folder / "twice.view")
    bare = write_raw(folder / "bare.bin", [1, 2, EOT] * 300)
    index(spec(bare, eot=EOT))
    arguments = [f"web={web},dtype=uint32", f"twice=web?view={twice}", f"raw={raw}", f"bare={bare}"]
    with RunningServer({}, folder, arguments=arguments) as running:
        yield running


def posted(server: RunningServer, corpus: str = "web", **fields: Any) -> dict[str, Any]:
    response = server.post_plan({**one_source(corpus, SEQ_LEN, 16), "family": FAMILY, **fields})
    assert response.status == 200, response.body
    found: dict[str, Any] = response.json()
    return found


def test_members_are_listed_among_plans(server: RunningServer) -> None:
    """`family` comes before `fingerprints` in the canonical document."""
    plan = posted(server)["id"]
    listed = server.get("/v1/plans")
    assert listed.status == 200, listed.body
    assert plan in [each["id"] for each in listed.json()["plans"]]


def documents_of_steps(server: RunningServer, plan: str, steps: range) -> list[set[int]]:
    """The documents of which each step holds a token that is no end of text."""
    found = []
    for step in steps:
        body = server.get("/v1/batches", plan=plan, step=step, format="raw").body
        found.append(set(np.frombuffer(body, "<u4").tolist()) - {EOT})
    return [{each - 1 for each in its} for its in found]


def sightings(server: RunningServer, plan: str, document: int, **query: Any) -> dict[str, Any]:
    response = server.get(f"/v1/plans/{plan}/members", document=document, **query)
    assert response.status == 200, response.body
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("corpus", ["web", "twice"])
@pytest.mark.parametrize("rows", ["windows", "documents"])
@pytest.mark.parametrize("order", ["shuffle", {"shuffle": {"block_windows": 32, "group_blocks": 4}}])
@pytest.mark.parametrize(
    "fields",
    [{}, {"leave_out": 0.2, "double": 0.2}, {"leave_out": 0.2, "double": 0.1, "by": "site"}],
    ids=["documents", "doubled", "sites"],
)
def test_what_members_see_is_what_their_batches_hold(
    server: RunningServer, corpus: str, rows: str, order: Any, fields: dict[str, Any]
) -> None:
    plans = {
        member: posted(server, corpus, rows=rows, order=order, family={**FAMILY, **fields, "member": member})[
            "id"
        ]
        for member in range(4)
    }
    num_steps = int(server.get(f"/v1/plans/{plans[0]}").json()["sources"][corpus]["num_windows"]) // 16
    steps = {member: documents_of_steps(server, plan, range(num_steps)) for member, plan in plans.items()}
    for document in (1, 2, 100, 301, 598):
        found = sightings(server, plans[2], document, count=4)
        assert [each["member"] for each in found["members"]] == [0, 1, 2, 3]
        for each in found["members"]:
            # An end of text alone, which tells no document, may be in a window, too.
            held = [step for step, its in enumerate(steps[each["member"]]) if document in its]
            assert set(held) <= {step for step in each["steps"] if step < num_steps}
            if each["leaves_out"]:
                assert not held
                assert (each["steps"], each["num_rows"]) == ([], 0)
            looked_up = server.get(
                "/v1/lookup", plan=plans[each["member"]], corpus=corpus, document=document
            ).json()
            assert sorted({row["step"] for row in looked_up["rows"]})[:10] == each["steps"]


def test_the_document_has_the_family_and_digests(server: RunningServer) -> None:
    plan = posted(server)
    family = plan["plan"]["family"]
    assert {name: family[name] for name in FAMILY} == FAMILY
    assert family["documents"]["web"].startswith("xxh3-")
    again = server.post_plan(plan["plan"])
    assert again.json()["id"] == plan["id"]
    assert 0.3 < plan["sources"]["web"]["kept"] < 0.9
    assert plan["stages"][0]["excluded_windows"] == {}
    other = posted(server, family={**FAMILY, "member": 4})
    assert other["id"] != plan["id"]


def test_a_doubled_document_is_seen_more_often(server: RunningServer) -> None:
    """Documents of one piece: those that are doubled come once or twice an epoch, others once or more."""
    family = {**FAMILY, "leave_out": 0.3, "double": 0.2}
    plan = posted(server, rows="documents", family=family)
    described = plan["sources"]["web"]
    assert described["doubled"] == pytest.approx(0.2, abs=0.06)
    assert described["kept"] == pytest.approx(0.7, abs=0.07)
    times = []
    for number in [n for n, length in enumerate(LENGTHS) if 4 < length <= SEQ_LEN][:40]:
        found = sightings(server, plan["id"], number, count=10)
        assert found["num_doubled"] == sum(each["doubles"] for each in found["members"])
        for each in found["members"]:
            assert not (each["leaves_out"] and each["doubles"])
            if each["doubles"]:
                times.append(each["num_rows"])
    assert set(times) == {1, 2}
    assert np.mean(times) > 1.6
    asked = ["plans", "members", plan["id"], str(number), server.url, "--count", "10"]
    said = run_here(*asked)
    assert f"{found['num_doubled']} double it" in said.stderr
    assert "(doubled)" in said.stdout


def test_other_documents_are_refused(server: RunningServer) -> None:
    document = posted(server)["plan"]
    document["family"]["documents"]["web"] = "xxh3-" + "0" * 32
    response = server.post_plan(document)
    assert response.status == 409
    assert response.json()["parameter"] == "family.documents"


def test_all_documents_of_a_site_are_left_out_together(server: RunningServer) -> None:
    plan = posted(server, family={**FAMILY, "by": "site"}, rows="documents")
    assert plan["plan"]["family"]["values"]["web"].startswith("xxh3-")
    assert server.post_plan(plan["plan"]).json()["id"] == plan["id"]
    for site in ("0.org", "1.org", "4.org"):
        its = [number for number, each in enumerate(SITES) if each == site][:5]
        found = [sightings(server, plan["id"], number, count=100)["members"] for number in its]
        out = [[each["leaves_out"] for each in members] for members in found]
        assert out[0].count(True) in range(2, 25)
        assert all(each == out[0] for each in out)
    missing = [number for number, each in enumerate(SITES) if each is None][:2]
    out = [[each["leaves_out"] for each in sightings(server, plan["id"], n)["members"]] for n in missing]
    assert out[0] != out[1]
    assert posted(server, family={**FAMILY, "by": "year"})["id"] != plan["id"]


def test_other_values_under_the_same_name_are_refused(
    web: Path, tmp_path: Path, server: RunningServer
) -> None:
    family = {**FAMILY, "by": "site"}
    made = posted(server, family=family)["plan"]
    other = shutil.copytree(web, tmp_path / "web")
    write_metadata(other / "documents", {**COLUMNS, "site": [*SITES[1:], SITES[0]]})
    state = tmp_path / "state"
    with RunningServer({}, state, arguments=[f"web={other},dtype=uint32"]) as running:
        refused = running.post_plan(made)
        assert (refused.status, refused.json()["parameter"]) == (409, "family.values")
        assert posted(running, family=family)["plan"]["family"]["values"] != made["family"]["values"]
    write_metadata(other / "documents", COLUMNS)
    with RunningServer({}, state, arguments=[f"web={other},dtype=uint32"]) as running:
        assert running.post_plan(made).status == 200


@pytest.mark.parametrize(
    ("corpus", "by", "message"),
    [
        ("web", "host", "family.by must be a column of the metadata: score, site, year"),
        ("web", "score", "family.by must be a column of text, whole numbers or booleans"),
        ("bare", "site", "has no metadata of its documents"),
    ],
)
def test_a_column_that_decides_nothing_is_refused(
    server: RunningServer, corpus: str, by: str, message: str
) -> None:
    response = server.post_plan({**one_source(corpus, SEQ_LEN, 16), "family": {**FAMILY, "by": by}})
    assert response.status == 422, response.body
    assert message in response.json()["detail"]


def test_metadata_that_cannot_be_read_is_refused_by_the_name_of_its_corpus(tmp_path: Path) -> None:
    """Where its files lie is for the log, and for nobody who asks."""
    folder = tmp_path / "web"
    folder.mkdir()
    index(spec(write_raw(folder / "0.bin", [1, 2, EOT] * 300), eot=EOT))
    write_metadata(folder / "documents", {"site": ["a"]})
    with RunningServer({"news": folder}, tmp_path) as running:
        response = running.post_plan({**one_source("news", SEQ_LEN, 16), "family": {**FAMILY, "by": "site"}})
        problem = check_problem(response, 503, "unreadable-corpus")
        assert problem["detail"].startswith("corpus 'news': documents: its metadata has 1 row")
        assert str(tmp_path) not in json.dumps(problem)
        assert f"unreadable-corpus: corpus 'news': {folder}/documents: its metadata" in running.log()


def test_a_corpus_without_documents_is_refused(server: RunningServer) -> None:
    response = server.post_plan({**one_source("raw", SEQ_LEN, 16), "family": FAMILY})
    assert response.status == 422
    assert "has no document index" in response.json()["detail"]
    assert "corpus-server index" in response.json()["remedy"]


def test_members_differ_in_one_field_and_in_rows(server: RunningServer) -> None:
    one, other = posted(server)["id"], posted(server, family={**FAMILY, "member": 4})["id"]
    found = server.get(f"/v1/plans/{one}/diff", other=other).json()
    assert [each["field"] for each in found["fields"]] == ["family.member"]
    assert found["rows"]["first_step"] == 0
    used = [server.get(f"/v1/plans/{each}/usage", step=9).json()["sources"] for each in (one, other)]
    assert used[0] == used[1]


def test_a_plan_of_a_family_may_say_epochs(server: RunningServer) -> None:
    stage = {"global_batch_size": 16, "epochs": {"web": 2}}
    response = server.post_plan({"seq_len": SEQ_LEN, "family": FAMILY, "stages": [stage]})
    assert response.status == 200, response.body
    assert response.json()["plan"]["family"]["member"] == 3


def test_a_plan_of_a_family_may_be_continued(server: RunningServer) -> None:
    plan = posted(server)["id"]
    stage = {"from_step": 5, "global_batch_size": 8, "mixture": {"web": 1}}
    link = server.post_plan({"parent": plan, "stages": [stage]}).json()["id"]
    out = {
        number
        for number in range(600)
        if sightings(server, link, number, first=3, count=1)["members"][0]["leaves_out"]
    }
    assert 30 < len(out) < 90
    for its in documents_of_steps(server, link, range(20)):
        assert not its & out
    for changes, message in (
        ({"mixture": {"twice": 1}}, "is a member of a family"),
        ({"exclude": {"web": [[0, 9]]}}, "not built together with family"),
    ):
        response = server.post_plan({"parent": plan, "stages": [{**stage, **changes}]})
        assert response.status == 422
        assert message in response.json()["detail"]


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ({"document": 600}, 404, "document must be in"),
        ({"document": 1, "count": 65_537}, 422, "count must be"),
        ({"document": 1, "first": 65_000, "count": 1000}, 422, "count must be at most 536 from there"),
        ({"document": 1, "corpus": "raw"}, 422, "corpus must name a source of the plan"),
        ({}, 422, "document"),
    ],
)
def test_a_wrong_question_is_refused(
    server: RunningServer, query: dict[str, Any], status: int, message: str
) -> None:
    response = server.get(f"/v1/plans/{posted(server)['id']}/members", **query)
    assert response.status == status, response.body
    assert message in response.json()["detail"]


def test_the_command_line_says_which_members_see_a_document(server: RunningServer) -> None:
    plan = posted(server)["id"]
    asked = ["plans", "members", plan, "100", server.url, "--count", "5"]
    found = sightings(server, plan, 100, count=5)
    assert json.loads(run_here(*asked, "--json").stdout) == found
    said = run_here(*asked)
    for each in found["members"]:
        assert "left out" in said.stdout if each["leaves_out"] else str(each["steps"][0]) in said.stdout
    assert f"{found['num_left_out']} of 5 members leave" in said.stderr
