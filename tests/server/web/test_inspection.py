"""What people look at: rows and ranges as text, samples of a corpus, two plans beside each other."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from corpus_server.corpus.index import index
from tests.conftest import word_tokens
from tests.corpora import some_tokens, spec, write_raw
from tests.reference import one_source
from tests.serving import RunningServer, check_problem

WORDS = ["alpha", "beta", "gamma", "d\u00e9lta", "<b>bold</b>", "\u202eturned", "one\ttwo"]
EOT = 0
LARGE = np.full(2_000_000, ord("-"), np.uint8)
PLAN: dict[str, Any] = {
    "seq_len": 24,
    "seed": 5,
    "stages": [{"from_step": 0, "global_batch_size": 6, "mixture": {"text": 0.5, "ids": 0.5}}],
    "skip_steps": [[4, 6]],
}


def documents() -> list[bytes]:
    draw = np.random.default_rng(1)
    return [
        " ".join(draw.choice(WORDS, size=draw.integers(1, 30))).encode() + bytes([EOT]) for _ in range(300)
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("inspected")
    texts = documents()
    (folder / "text").mkdir()
    for number, part in enumerate((texts[:100], texts[100:])):
        path = write_raw(
            folder / "text" / f"{number}.bin", np.frombuffer(b"".join(part), np.uint8), dtype="uint8"
        )
        index(spec(path, dtype="uint8", eot=EOT))
    corpora: dict[str, Path | str] = {
        "text": f"{folder / 'text'},dtype=uint8",
        "ids": write_raw(folder / "ids.bin", some_tokens(2_000_000)),
        "large": f"{write_raw(folder / 'large.bin', LARGE, dtype='uint8')},dtype=uint8",
        "holed": f"{folder / 'holed'}",
    }
    (folder / "holed").mkdir()
    word_tokens(folder / "holed" / "tokenizer.json")
    write_raw(folder / "holed" / "0.bin", some_tokens(9000))
    with RunningServer(corpora, folder) as server:
        yield server


@pytest.fixture(scope="module")
def plan_id(served: RunningServer) -> str:
    return str(served.post_plan(PLAN).json()["id"])


def joined(spans: list[dict[str, Any]]) -> list[int]:
    return [token for span in spans for token in span["tokens"]]


def test_rows_are_the_tokens_of_the_batch(served: RunningServer, plan_id: str) -> None:
    for step in (0, 3, 4, 7):
        tokens = served.get("/v1/batches", plan=plan_id, step=step, format="json").json()["tokens"][0]
        response = served.get(f"/v1/plans/{plan_id}/rows", step=step, first=1, count=100).json()
        assert [row["row"] for row in response["rows"]] == [1, 2, 3, 4, 5]
        assert [joined(row["spans"]) for row in response["rows"]] == tokens[1:]
        assert response["plan_step"] == step + (2 if step >= 4 else 0)
        for row in response["rows"]:
            there = served.get(
                f"/v1/corpora/{row['corpus']}/tokens", start=row["start"], count=25, format="json"
            )
            assert there.json()["tokens"] == joined(row["spans"])


def test_spans_are_cut_where_documents_end(served: RunningServer) -> None:
    texts = documents()
    whole = b"".join(texts)
    response = served.get("/v1/corpora/text/spans", start=7, count=len(whole)).json()
    assert (response["start"], response["stop"], response["num_tokens"]) == (7, len(whole), len(whole))
    assert bytes(joined(response["spans"])) == whole[7:]
    found: dict[int, bytes] = {}
    at = 7
    for span in response["spans"]:
        assert span["start"] == at
        assert span["is_eot"] == (span["tokens"] == [EOT])
        assert span["text"] == bytes(span["tokens"]).decode("utf-8", "replace")
        found[span["document"]] = found.get(span["document"], b"") + bytes(span["tokens"])
        at += len(span["tokens"])
    assert [found[number] for number in range(1, 300)] == texts[1:]


def test_a_search_says_first_how_much_it_searched(served: RunningServer) -> None:
    """Nothing found in a sample is not nothing in the corpus; a block without text was not searched."""
    response = served.get("/v1/corpora/large/search", text="needle")
    found = response.json()
    assert response.body.startswith(b'{"searched":"1,048,576 of 2,000,000 tokens (52 %)"')
    assert (found["complete"], found["found"]) == (False, [])
    assert served.get("/v1/corpora/text/search", text="needle").json()["complete"] is True
    unknown = served.get("/v1/corpora/holed/search", text="needle").json()
    assert (unknown["searched"], unknown["complete"]) == ("0 of 9,000 tokens (less than 1 %)", False)


def test_a_search_of_all_goes_on_from_response_to_response(served: RunningServer) -> None:
    """Each place comes once, in order, whatever the limit; the last response says that it is the last."""
    text = b"".join(documents()).decode()
    places = [match.start() for match in re.finditer("alpha", text)]
    for limit in (1, 7, 100):
        found, start, rounds = [], 0, 0
        while start is not None:
            response = served.get(
                "/v1/corpora/text/search", text="alpha", whole="true", start=start, limit=limit
            ).json()
            found += [each["token"] for each in response["found"]]
            start, rounds = response["next_start"], rounds + 1
            assert response["complete"] is (start is None)
        assert found == [len(text[:place].encode()) for place in places]
        assert rounds == len(places) // limit + 1
    whole = served.get("/v1/corpora/large/search", text="needle", whole="true").json()
    while whole["next_start"] is not None:
        whole = served.get(
            "/v1/corpora/large/search", text="needle", whole="true", start=whole["next_start"]
        ).json()
    assert (whole["complete"], whole["found"]) == (True, [])
    holed = served.get("/v1/corpora/holed/search", text="needle", whole="true").json()
    assert (holed["next_start"], holed["complete"]) == (None, False)
    check_problem(served.get("/v1/corpora/text/search", text="a", start=5), 422, "invalid-parameter")
    beyond = served.get("/v1/corpora/text/search", text="a", whole="true", start=10**9)
    check_problem(beyond, 422, "invalid-parameter")


def test_a_difference_is_said_by_field_and_by_row(served: RunningServer, plan_id: str) -> None:
    skipping = served.post_plan({**PLAN, "skip_steps": [[4, 6], [8, 9]]}).json()["id"]
    response = served.get(f"/v1/plans/{plan_id}/diff", other=skipping, steps=3).json()
    (field,) = response["fields"]
    assert field == {"field": "skip_steps", "a": [], "b": [[8, 9]], "num_a": 0, "num_b": 1}
    assert (response["rows"]["equal_steps"], response["rows"]["first_step"]) == (6, 6)
    same = served.get(f"/v1/plans/{plan_id}/diff", other=plan_id).json()
    assert (same["fields"], same["rows"]["equal_steps"]) == ([], None)


def test_a_plan_can_be_tried_without_being_kept(served: RunningServer) -> None:
    document = {**PLAN, "seed": 77}
    tried = served.get("/v1/plans?keep=false", method="POST", body=json.dumps(document).encode())
    assert tried.status == 200
    check_problem(served.get(f"/v1/plans/{tried.json()['id']}"), 404, "unknown-plan")
    kept = served.post_plan(document)
    assert kept.body == tried.body


@pytest.mark.parametrize(
    ("path", "query", "status", "slug", "parameter"),
    [
        ("plans/{plan}/rows", {"step": 0, "first": 6}, 422, "invalid-parameter", "first"),
        ("plans/{plan}/rows", {"step": 0, "count": 0}, 422, "invalid-parameter", "count"),
        ("plans/{plan}/rows", {}, 422, "invalid-parameter", "step"),
        ("corpora/text/spans", {"start": 10**9}, 422, "invalid-parameter", "start"),
        ("corpora/none/spans", {}, 404, "unknown-corpus", "corpus"),
        ("corpora/ids/search", {"text": "a"}, 422, "text-unavailable", "format"),
        ("corpora/text/search", {}, 422, "invalid-parameter", "text"),
        ("plans/{plan}/diff", {"other": "0" * 64}, 404, "unknown-plan", "plan"),
    ],
)
def test_what_cannot_be_shown_is_said(
    served: RunningServer,
    plan_id: str,
    path: str,
    query: dict[str, Any],
    status: int,
    slug: str,
    parameter: str,
) -> None:
    response = served.get("/v1/" + path.format(plan=plan_id), **query)
    check_problem(response, status, slug, parameter=parameter)


def test_shards_whose_names_are_not_utf8_are_described(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff.bin")
    (tmp_path / "odd").mkdir()
    write_raw(tmp_path / "odd" / name, some_tokens(2000))
    with RunningServer({"odd": tmp_path / "odd"}, tmp_path) as server:
        plan = server.post_plan(one_source("odd", 16, 4)).json()
        assert [shard["name"] for shard in plan["shards"]] == [name]
        (corpus,) = server.get("/v1/corpora").json()["corpora"]
        assert [shard["name"] for shard in corpus["shards"]] == [name]
        for route, listed in (("rows", "rows"), ("shards", "shards")):
            shown = server.get(f"/v1/plans/{plan['id']}/{route}", step=0).json()[listed]
            assert {each.get("shard", each.get("name")) for each in shown} == {name}
        pairs = server.get("/v1/indices", plan=plan["id"], step=0, format="json")
        assert pairs.status == 200
