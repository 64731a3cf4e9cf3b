"""A view over HTTP: served by the name of its corpus, described, looked up, and as tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.serving import RunningServer, check_problem
from tests.views import laid_out, write_corpus, write_view

SHARDS = [[3, 5, 2, 9], [4, 4, 1]]
COUNTS = [1, 0, 2, 1, 1, 0, 1]
STARTS = [0, 3, 8, 10, 19, 23, 27, 28]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("corpora")
    write_view(write_corpus(folder / "web", SHARDS), COUNTS, folder / "hq.view")
    config = '[corpora.web]\npath = "web"\ndtype = "uint32"\n[corpora.hq]\npath = "web"\nview = "hq.view"\n'
    write_view(folder / "web", [*COUNTS[:2], 1, *COUNTS[3:6], 0], folder / "less.view")
    config += '[corpora.less]\npath = "web"\nview = "less.view"\n'
    (folder / "corpus.toml").write_text(config)
    arguments = ["--config", str(folder / "corpus.toml")]
    with RunningServer({}, tmp_path_factory.mktemp("server"), arguments=arguments) as server:
        yield server


def tokens_of(document: int) -> list[int]:
    return [*range(STARTS[document] + 1, STARTS[document + 1]), 0]


def test_tokens_and_documents_have_the_views_numbers(server: RunningServer) -> None:
    documents = [each for its in laid_out(SHARDS, COUNTS) for each in its]
    whole = [token for each in documents for token in tokens_of(each)]
    assert server.get("/v1/corpora/hq/tokens").array().tolist() == whole
    assert server.get("/v1/corpora/hq/tokens", start=4, count=9).array().tolist() == whole[4:13]
    start = 0
    for number, document in enumerate(documents):
        response = server.get(f"/v1/corpora/hq/documents/{number}", format="json").json()
        assert response["tokens"] == tokens_of(document)
        assert (response["base_document"], response["start"]) == (document, start)
        start = response["stop"]
        first = server.get(f"/v1/corpora/hq/documents/{document}", format="json", base="true").json()
        assert (first["document"], first["base_document"]) == (documents.index(document), document)
    for left_out in sorted({*range(len(STARTS) + 1)} - {*documents}):
        gone = server.get(f"/v1/corpora/hq/documents/{left_out}", base="true")
        check_problem(gone, 404, "unknown-document")
    check_problem(server.get(f"/v1/corpora/hq/documents/{len(documents)}"), 404, "unknown-document")


def test_a_view_says_of_which_corpus_it_is(server: RunningServer) -> None:
    web, hq = (server.get(f"/v1/corpora/{name}").json() for name in ("web", "hq"))
    assert "view" not in web
    assert hq["view"]["fingerprint"] == web["fingerprint"] != hq["fingerprint"]
    assert (hq["num_tokens"], hq["num_documents"]) == (21, 6)
    assert hq["shards"] == web["shards"]


def test_batches_indices_and_look_ups_agree(server: RunningServer) -> None:
    stages = [{"global_batch_size": 2, "mixture": {"hq": 1}}]
    plan = server.post_plan({"seq_len": 2, "stride": 2, "stages": stages}).json()
    assert plan["indices"] == "pieces"
    web = np.array([token for document in range(7) for token in tokens_of(document)])
    first = dict(enumerate((0, 19)))
    rows: list[list[int]] = []
    for step in range(4):
        served = server.get("/v1/batches", plan=plan["id"], step=step).array()[0]
        located = server.get("/v1/indices", plan=plan["id"], step=step, format="raw").array()
        for row in range(2):
            its = [(first[shard] + at, n) for r, shard, at, n in located.tolist() if r == row]
            rows.append([each for at, n in its for each in range(at, at + n)])
            assert web[rows[-1]].tolist() == served[row].tolist()
    for document in range(7):
        response = server.get("/v1/lookup", plan=plan["id"], corpus="hq", document=document).json()
        start, stop = STARTS[document : document + 2]
        assert (response["start"], response["stop"]) == (start, stop)
        found = [2 * each["step"] + each["row"] for each in response["rows"] if each["step"] < 4]
        held = [n for n, row in enumerate(rows) if any(start <= each < stop for each in row)]
        assert found == held[: len(found)]
        assert set(held) - set(found) <= set(range(plan["sources"]["hq"]["num_windows"], 8))
    shown = server.get(f"/v1/plans/{plan['id']}/rows", step=0, count=2).json()["rows"]
    assert [row["start"] for row in shown] == [rows[0][0], rows[1][0]]
    assert [span["document"] for span in shown[0]["spans"]] == sorted(
        {next(n for n in range(7) if STARTS[n] <= each < STARTS[n + 1]) for each in rows[0]}
    )


def test_a_difference_names_the_documents(server: RunningServer) -> None:
    one, other, plain = (
        server.post_plan({"seq_len": 2, "stages": [{"global_batch_size": 2, "mixture": {name: 1}}]}).json()[
            "id"
        ]
        for name in ("hq", "less", "web")
    )
    response = server.get(f"/v1/plans/{one}/diff", other=other).json()
    changes = [{"document": 2, "a": 2, "b": 1}, {"document": 6, "a": 1, "b": 0}]
    counts = {"num_documents": 2, "num_taken_out": 1, "num_put_in": 0}
    assert response["views"] == [{"a": "hq", "b": "less", **counts, "documents": changes}]
    assert response["rows"]["first_step"] is not None
    (change,) = server.get(f"/v1/plans/{plain}/diff", other=one).json()["views"]
    numbers = [n for n, count in enumerate(COUNTS) if count != 1]
    assert [each["document"] for each in change["documents"]] == numbers
    assert server.get(f"/v1/plans/{one}/diff", other=one).json()["views"] == []
