"""Which rows saw a token, over HTTP: by token, range and document."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import DOCUMENTS, ServedCorpus
from tests.reference import ReferencePlan, Row, one_source
from tests.serving import RunningServer, check_problem

Corpora = dict[str, ServedCorpus]
PLAN: dict[str, Any] = {
    "seq_len": 4,
    "stride": 3,
    "seed": 1337,
    "stages": [
        {"from_step": 0, "global_batch_size": 2, "mixture": {"docs": 1, "text": 1}},
        {
            "from_step": 10,
            "global_batch_size": 3,
            "mixture": {"docs": 1},
            "exclude": {"docs": [[4, 5]]},
        },
    ],
    "skip_steps": [[3, 5], [11, 12]],
}


@pytest.fixture(scope="module")
def plan_id(server: RunningServer) -> str:
    return str(server.post_plan(PLAN).json()["id"])


def expected(corpora: Corpora, start: int, stop: int, epochs: int) -> list[dict[str, Any]]:
    reference = ReferencePlan(PLAN, {name: [s.size for s in corpora[name].shards] for name in corpora})
    rows = reference.lookup("docs", start, stop, epochs=epochs, plan_steps=200)

    def begins(row: Row) -> int:
        return sum(reference.sources[row.source].shard_tokens[: row.shard]) + row.start

    return [
        {
            "epoch": row.epoch,
            "step": row.step,
            "plan_step": row.plan_step,
            "row": row.row,
            "shard": reference.first_shard[row.source] + row.shard,
            "start": row.start,
            "offset": max(0, start - begins(row)),
            "held": min(stop, begins(row) + PLAN["seq_len"] + 1) - max(start, begins(row)),
            "held_at": max(start, begins(row)) - start,
            "substitute": row.substitute,
        }
        for row in rows
    ]


@pytest.mark.parametrize("epochs", [1, 40])
@pytest.mark.parametrize("document", range(3))
def test_a_document_is_found_in_every_row_that_held_it(
    server: RunningServer, corpora: Corpora, plan_id: str, document: int, epochs: int
) -> None:
    """Over stages and skips, substitutes too; skipped rows have no step."""
    start = sum(map(len, DOCUMENTS[:document]))
    stop = start + len(DOCUMENTS[document])
    rows = expected(corpora, start, stop, epochs)
    response = server.get("/v1/lookup", plan=plan_id, corpus="docs", document=document, epochs=epochs).json()
    assert response["rows"] == rows
    assert {name: response[name] for name in ("plan", "corpus", "start", "stop")} == {
        "plan": plan_id,
        "corpus": "docs",
        "start": start,
        "stop": stop,
    }
    assert (response["num_found"], response["truncated"]) == (len(rows), False)
    if epochs == 40:
        assert {row["step"] is None for row in rows} == {True, False}
        assert {row["substitute"] for row in rows} == ({True, False} if document == 2 else {False})


def test_the_rows_that_are_found_hold_the_tokens(
    server: RunningServer, corpora: Corpora, plan_id: str
) -> None:
    """Round trip over the wire: look up, then ask for that row."""
    found = server.get("/v1/lookup", plan=plan_id, corpus="docs", token=7, epochs=30).json()["rows"]
    assert found
    for row in found:
        if row["step"] is not None:
            indices = server.get("/v1/indices", plan=plan_id, step=row["step"]).json()["indices"][0]
            assert indices[row["row"]] == [row["shard"], row["start"]]
            assert row["start"] <= 7 <= row["start"] + 4


def test_a_plan_may_be_spelled_inline(server: RunningServer) -> None:
    inline = {"corpus": "docs", "seq_len": 4, "batch_size": 2, "seed": 9}
    plan_id = server.post_plan(one_source("docs", 4, 2, seed=9)).json()["id"]
    spelled = server.get("/v1/lookup", **inline, token=3, epochs=5)
    assert spelled.json() == server.get("/v1/lookup", plan=plan_id, token=3, epochs=5).json()
    assert spelled.json()["num_found"] > 0


@pytest.mark.parametrize(
    ("query", "status", "slug"),
    [
        ({"corpus": "docs"}, 422, "invalid-parameter"),
        ({"token": 1}, 422, "invalid-parameter"),
        ({"corpus": "web", "token": 1}, 422, "invalid-parameter"),
        ({"corpus": "docs", "token": 11}, 422, "invalid-parameter"),
        ({"corpus": "docs", "token": -1}, 422, "invalid-parameter"),
        ({"corpus": "docs", "token": 2**64}, 422, "invalid-parameter"),
        ({"corpus": "docs", "start": 3}, 422, "invalid-parameter"),
        ({"corpus": "docs", "start": 3, "stop": 3}, 422, "invalid-parameter"),
        ({"corpus": "docs", "start": 3, "stop": 12}, 422, "invalid-parameter"),
        ({"corpus": "docs", "token": 1, "document": 1}, 422, "invalid-parameter"),
        ({"corpus": "docs", "document": 3}, 404, "unknown-document"),
        ({"corpus": "text", "document": 0}, 404, "unknown-document"),
        ({"corpus": "docs", "token": 1, "epochs": 0}, 422, "invalid-parameter"),
        ({"corpus": "docs", "token": 1, "epochs": 2**40}, 422, "invalid-parameter"),
        ({"corpus": "docs", "token": 1, "limit": 0}, 422, "invalid-parameter"),
        ({"corpus": "docs", "tokens": 1}, 422, "invalid-parameter"),
    ],
    ids=str,
)
def test_bad_questions_are_refused(
    server: RunningServer, plan_id: str, query: dict[str, Any], status: int, slug: str
) -> None:
    check_problem(server.get("/v1/lookup", plan=plan_id, **query), status, slug)
