"""Every route and every format of the running service, two worker processes behind one port."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
import xxhash

from corpus_server.plan.document import INLINE_PLAN, Plan, Stage
from corpus_server.plan.orders import ORDERS
from corpus_server.responses.tokens import BatchesQuery
from tests.conftest import DOCUMENTS, TEXT, ServedCorpus
from tests.plans import PLAIN_ORDERS
from tests.reference import batch, one_source, window_of_row
from tests.serving import Response, RunningServer

Corpora = dict[str, ServedCorpus]
WEB = {"corpus": "web", "seq_len": 16, "batch_size": 12, "seed": 7}
PLAN = one_source("web", 16, 12, seed=7)


def checksum(response: Response) -> str:
    return "xxh3-64=" + xxhash.xxh3_64(response.body).hexdigest()


def test_liveness_and_readiness(server: RunningServer) -> None:
    assert server.get("/healthz").json() == {"status": "alive"}
    ready = server.get("/readyz")
    assert ready.json() == {"status": "ready", "corpora": ["web", "mixed", "docs", "text", "words"]}
    assert ready.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("path", ["/v1/usage?step=4", "/v1/plans/usage?step=4", "/v1/plans/usage"])
def test_a_question_without_an_id_is_told_where_ids_are(server: RunningServer, path: str) -> None:
    said = server.get(path)
    assert said.status == 404
    assert said.json()["remedy"] == (
        "did you mean /v1/plans/{plan_id}/usage? GET /v1/plans lists what the braces stand for"
    )


def test_a_question_with_an_id_is_told_what_else_is_wrong(server: RunningServer) -> None:
    plan = server.post_plan(PLAN).json()["id"]
    assert server.get(f"/v1/plans/{plan}/usage").json()["detail"] == "step is missing"
    assert server.get("/v1/plans/0123456789ab").json()["type"] == "unknown-plan"


def test_corpora_are_described(server: RunningServer, corpora: Corpora) -> None:
    described = {corpus["name"]: corpus for corpus in server.get("/v1/corpora").json()["corpora"]}
    assert {name: corpus["num_tokens"] for name, corpus in described.items()} == {
        name: corpus.tokens.size for name, corpus in corpora.items()
    }
    assert server.get("/v1/corpora/docs").json() == described["docs"]
    assert described["docs"]["num_documents"] == 3
    assert described["web"]["num_documents"] is None
    assert [described[name]["tokenizer"] for name in ("web", "text", "words")] == [
        None,
        "bytes",
        "tokenizer.json",
    ]
    assert described["mixed"]["dtype"] == "uint32"
    assert [shard["name"] for shard in described["web"]["shards"]] == ["1.bin", "2.bin", "10.bin"]
    shard = described["mixed"]["shards"][0]
    path = corpora["mixed"].path / "0.bin"
    assert shard == {
        "name": "0.bin",
        "file": "0.bin",
        "format": "llm.c",
        "num_tokens": 700,
        "dtype": "uint16",
        "data_offset": 1024,
        "size_bytes": path.stat().st_size,
    }
    assert described["web"]["fingerprint"] == described["web"]["fingerprints"]["sampled"]


@pytest.mark.parametrize("name", ["web", "mixed", "docs", "text"])
def test_a_raw_range_over_the_borders_of_shards(server: RunningServer, corpora: Corpora, name: str) -> None:
    tokens = corpora[name].tokens
    response = server.get(f"/v1/corpora/{name}/tokens", start=1, count=tokens.size - 1)
    assert response.status == 200
    assert response.body == tokens[1:].tobytes()
    assert (response.array() == tokens[1:]).all()
    assert response.headers["Corpus-Range"] == f"1-{tokens.size}"
    assert response.headers["Corpus-Checksum"] == checksum(response)


def test_a_range_without_bounds_shows_the_beginning(server: RunningServer, corpora: Corpora) -> None:
    assert (server.get("/v1/corpora/web/tokens").array() == corpora["web"].tokens[:256]).all()
    assert server.get("/v1/corpora/docs/tokens").array().size == 11
    assert server.get("/v1/corpora/docs/tokens", start=9).array().tolist() == [33, 99]


@pytest.mark.parametrize("chosen", ["raw", "npy", "json", "text"])
def test_an_empty_range_is_a_response(server: RunningServer, chosen: str) -> None:
    response = server.get("/v1/corpora/text/tokens", start=5, count=0, format=chosen)
    assert response.status == 200
    if chosen in ("raw", "npy"):
        assert (response.headers["Corpus-Shape"], response.headers["Corpus-Checksum"]) == (
            "0",
            checksum(response),
        )
    if chosen == "npy":
        assert np.load(io.BytesIO(response.body)).shape == (0,)
    if chosen == "json":
        assert response.json()["tokens"] == []


def test_a_range_as_json_and_text(server: RunningServer) -> None:
    assert server.get("/v1/corpora/docs/tokens", start=4, count=2, format="json").json() == {
        "corpus": "docs",
        "start": 4,
        "stop": 6,
        "dtype": "uint16",
        "tokens": [20, 99],
    }
    response = server.get("/v1/corpora/text/tokens", count=100, format="text")
    assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert response.body.decode() == TEXT.encode()[:100].decode(errors="replace")


def test_documents(server: RunningServer) -> None:
    first = 0
    for number, tokens in enumerate(DOCUMENTS):
        assert server.get(f"/v1/corpora/docs/documents/{number}").json() == {
            "corpus": "docs",
            "document": number,
            "start": first,
            "stop": first + len(tokens),
            "dtype": "uint16",
            "tokens": tokens,
        }
        raw = server.get(f"/v1/corpora/docs/documents/{number}", format="raw")
        assert raw.array().tolist() == tokens
        assert raw.headers["Corpus-Range"] == f"{first}-{first + len(tokens)}"
        first += len(tokens)


@pytest.mark.parametrize("name", ["web", "mixed"])
@pytest.mark.parametrize("order", PLAIN_ORDERS)
def test_batches_are_the_reference_s(server: RunningServer, corpora: Corpora, name: str, order: str) -> None:
    """Catalogue row 1, server half: raw and npy, inline and by id, from whichever worker."""
    plan = one_source(name, 16, 12, seed=7, order=order)
    inline = {"corpus": name, "seq_len": 16, "batch_size": 12, "seed": 7, "order": order}
    plan_id = server.post_plan(plan).json()["id"]
    for step, count, rank, world_size in ((0, 1, 0, 1), (48, 5, 1, 3), (10**9, 2, 11, 12)):
        expected = batch(
            plan, corpora[name].shards, step, count=count, rank=rank, world_size=world_size
        ).astype(corpora[name].tokens.dtype)
        query: dict[str, Any] = {"step": step, "count": count, "rank": rank, "world_size": world_size}
        by_id = server.get("/v1/batches", plan=plan_id, **query)
        assert by_id.body == expected.tobytes()
        assert by_id.headers["Corpus-Shape"] == ",".join(map(str, expected.shape))
        assert by_id.headers["Corpus-Dtype"] == expected.dtype.name
        assert by_id.headers["Corpus-Plan"] == plan_id
        assert by_id.headers["Corpus-Checksum"] == checksum(by_id)
        spelled = server.get("/v1/batches", **inline, **query)
        assert (spelled.body, spelled.headers["ETag"]) == (by_id.body, by_id.headers["ETag"])
        npy = server.get("/v1/batches", plan=plan_id, format="npy", **query)
        loaded = np.load(io.BytesIO(npy.body))
        assert loaded.dtype == expected.dtype
        assert (loaded == expected).all()
        assert npy.headers["Corpus-Checksum"] == checksum(npy)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_the_ranks_of_a_step_join_to_the_global_batch(server: RunningServer, world_size: int) -> None:
    """Catalogue row 2."""
    whole = server.get("/v1/batches", **WEB, step=3, count=4).array()
    parts = [
        server.get("/v1/batches", **WEB, step=3, count=4, rank=rank, world_size=world_size).array()
        for rank in range(world_size)
    ]
    assert (np.concatenate(parts, axis=1) == whole).all()


def test_batches_as_json(server: RunningServer, corpora: Corpora) -> None:
    response = server.get("/v1/batches", **WEB, step=2, rank=1, world_size=4, format="json").json()
    expected = batch(PLAN, corpora["web"].shards, 2, rank=1, world_size=4)
    assert response["tokens"] == expected.tolist()
    assert {name: response[name] for name in ("step", "count", "rank", "world_size", "dtype")} == {
        "step": 2,
        "count": 1,
        "rank": 1,
        "world_size": 4,
        "dtype": "uint16",
    }


@pytest.mark.parametrize("name", ["text", "words"])
def test_batches_as_text_show_what_the_step_saw(server: RunningServer, corpora: Corpora, name: str) -> None:
    response = server.get(
        "/v1/batches", corpus=name, seq_len=20, batch_size=4, step=1, rank=1, world_size=2, format="text"
    )
    plan = one_source(name, 20, 4)
    shard = corpora[name].shards[0]
    lines = response.body.decode().split("=== step 1 ")[1:]
    assert len(lines) == 2
    for row, text in zip((2, 3), lines, strict=True):
        _, start = window_of_row(plan, [shard.size], 1, row)
        head, body = text.split(" ===\n", 1)
        path = corpora[name].path
        file = "0.bin" if path.is_dir() else path.name
        assert head == f"row {row}: corpus {name}, shard {file}, tokens [{start}, {start + 21})"
        if name == "text":
            assert body == shard[start : start + 21].tobytes().decode(errors="replace") + "\n"
        else:
            assert body.strip("\N{REPLACEMENT CHARACTER}\n") in TEXT


def test_indices(server: RunningServer, corpora: Corpora) -> None:
    query = {**WEB, "step": 9, "count": 2, "rank": 1, "world_size": 3}
    lengths = [shard.size for shard in corpora["web"].shards]
    expected = [[list(window_of_row(PLAN, lengths, step, row)) for row in range(4, 8)] for step in (9, 10)]
    response = server.get("/v1/indices", **query).json()
    assert response.pop("indices") == expected
    assert response == {
        "plan": server.post_plan(PLAN).json()["id"],
        "step": 9,
        "count": 2,
        "rank": 1,
        "world_size": 3,
        "shards": [{"corpus": "web", "name": name} for name in ("1.bin", "2.bin", "10.bin")],
    }
    raw = server.get("/v1/indices", **query, format="raw")
    assert (raw.headers["Corpus-Dtype"], raw.headers["Corpus-Shape"]) == ("int64", "2,4,2")
    assert raw.array().tolist() == expected
    assert raw.headers["Corpus-Checksum"] == checksum(raw)
    npy = server.get("/v1/indices", **query, format="npy")
    assert np.load(io.BytesIO(npy.body)).tolist() == expected


def test_the_openapi_document_describes_the_parameters(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    paths = document["paths"]
    listed = {p["name"]: p for p in paths["/v1/batches"]["get"]["parameters"]}
    assert set(listed) == {*BatchesQuery.model_json_schema()["properties"], *INLINE_PLAN}
    assert listed["step"]["required"]
    count = listed["count"]
    assert (count["description"], count["required"]) == ("Consecutive steps.", False)
    assert {name: count["schema"][name] for name in ("type", "minimum", "maximum", "default")} == {
        "type": "integer",
        "minimum": 1,
        "maximum": 4096,
        "default": 1,
    }
    references = [part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]]
    assert set(references) <= set(document["components"]["schemas"])


def test_the_openapi_document_names_every_field_of_a_plan(server: RunningServer) -> None:
    """A generated client could not send a field that the description leaves out."""
    body = server.get("/openapi.json").json()["paths"]["/v1/plans"]["post"]["requestBody"]
    whole, draft, continued = body["content"]["application/json"]["schema"]["anyOf"]
    assert set(continued["properties"]) >= {"parent", "stages"}
    assert set(draft["properties"]) == {*whole["properties"], "max_epochs", "num_steps"}
    stage = draft["properties"]["stages"]["items"]["properties"]
    assert set(stage) == {*Stage.properties(), "epochs", "tokens", "until"}
    plan = whole["properties"]
    described = {Plan: plan, Stage: plan["stages"]["items"]["properties"]}
    for kind, spelled in zip(ORDERS, plan["order"]["anyOf"], strict=True):
        if kind.properties():
            described[kind] = spelled["properties"][kind.name]["properties"]
        else:
            assert spelled == {"const": kind.name}
    for kind, properties in described.items():
        assert set(properties) == set(kind.properties()), kind


def test_the_openapi_document_names_every_field_of_a_description(server: RunningServer) -> None:
    """A generated client drops what the description leaves out, or refuses it."""
    document = server.get("/openapi.json").json()
    stages = [{"global_batch_size": 4, "mixture": {"web": 1}}]
    posted = server.post_plan({"seq_len": 16, "stages": stages})
    responses = {path: server.get(path).json() for path in ("/v1/corpora", "/v1/plans")}
    responses["/v1/corpora/{name}"] = server.get("/v1/corpora/web").json()
    responses["/v1/plans/{plan_id}"] = posted.json()

    def check(value: Any, schema: dict[str, Any]) -> None:
        schema = schema.get("anyOf", [schema])[0]
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        if isinstance(value, list):
            for each in value:
                check(each, schema["items"])
        elif isinstance(value, dict) and "properties" in schema:
            assert set(value) <= set(schema["properties"]), schema["title"]
            for name, each in value.items():
                check(each, schema["properties"][name])

    for path, response in responses.items():
        described = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        check(response, described["schema"])


def test_operation_ids_are_unique(server: RunningServer) -> None:
    """Generators of clients refuse a description in which two operations have one name."""
    paths = server.get("/openapi.json").json()["paths"]
    ids = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(ids) == len(set(ids))


def test_the_pages_of_the_api(server: RunningServer) -> None:
    assert "swagger" in server.get("/docs").body.decode()
