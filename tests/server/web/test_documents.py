"""Rows of documents, asked for over HTTP: what is trained on, said, found, refused and kept.

A token's value says where it lies: `1 + position` in `web`, and from 10,001 on in `code`. 0 ends documents.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from corpus_server.corpus.index import index
from tests.corpora import spec, write_megatron, write_raw
from tests.serving import RunningServer, check_problem

SEQ_LEN = 16
FIRST = {"web": 1, "code": 10_001}


def some_documents(seed: int, first: int, sizes: tuple[int, ...]) -> list[list[int]]:
    """Documents of 1 to 60 tokens, shard after shard of so many; each ends with 0."""
    draw = np.random.default_rng(seed)
    shards = []
    for size in sizes:
        tokens: list[int] = []
        for length in draw.geometric(0.08, size).clip(1, 60).tolist():
            tokens += [*range(first + len(tokens), first + len(tokens) + length - 1), 0]
        shards.append(tokens)
        first += len(tokens)
    return shards


SHARDS = {"web": some_documents(1, 1, (120, 1, 70)), "code": some_documents(2, 10_001, (90,))}


def documents_of(name: str) -> list[list[int]]:
    """The documents of a corpus: their tokens."""
    found: list[list[int]] = [[]]
    for token in (token for shard in SHARDS[name] for token in shard):
        found[-1].append(token)
        if not token:
            found.append([])
    return found[:-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    for name, shards in SHARDS.items():
        (folder / name).mkdir()
        for number, tokens in enumerate(shards):
            write_raw(folder / name / f"{number}.bin", tokens)
            if name == "code":
                np.save(
                    folder / name / f"{number}.bin.mask.npy", np.array([token % 3 > 0 for token in tokens])
                )
        index(spec(folder / name, eot=0))
    write_raw(folder / "bare.bin", [1, 2, 0, 3, 4, 0])
    write_raw(folder / "cut.bin", [1, 2, 0, 3, 4, 5])
    index(spec(folder / "cut.bin", eot=0))
    write_megatron(folder / "sentences", [[1, 2, 0], [3, 4], [5, 0]])
    write_megatron(folder / "unknown", [[1, 2, 0], [3, 0]])
    return folder


def start(folder: Path, at: Path) -> RunningServer:
    paths = {name: folder / name for name in SHARDS}
    files = {"bare": "bare.bin,eot=0", "cut": "cut.bin", "sentences": "sentences.bin,eot=0"}
    others = {name: f"{folder}/{file}" for name, file in {**files, "unknown": "unknown.bin"}.items()}
    return RunningServer({**paths, **others}, at, workers=2)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with start(folder, tmp_path_factory.mktemp("server")) as running:
        yield running


def document(mixture: dict[str, float] | None = None, batch_size: int = 6, **fields: Any) -> dict[str, Any]:
    stage = {"global_batch_size": batch_size, "mixture": mixture or {"web": 1}}
    rows = {"documents": {"block_documents": 50}}
    return {"seq_len": SEQ_LEN, "seed": 7, "rows": rows, "stages": [stage], **fields}


def post(server: RunningServer, plan: dict[str, Any]) -> dict[str, Any]:
    response = server.post_plan(plan)
    assert response.status == 200, response.body
    described: dict[str, Any] = response.json()
    return described


def batch(server: RunningServer, plan_id: str, step: int, **asked: Any) -> np.ndarray:
    return server.get("/v1/batches", plan=plan_id, step=step, **asked).array()


@pytest.mark.parametrize(
    "order",
    ["shuffle", "sequential", {"shuffle": {"block_windows": 20, "group_blocks": 2}}],
    ids=["shuffle", "sequential", "bounded"],
)
def test_each_token_but_the_last_of_a_document_is_an_input_once_an_epoch(
    server: RunningServer, order: Any
) -> None:
    """Its target is the next token of its document; the unused end of a row is end of text alone."""
    described = post(server, document(order=order, batch_size=1))
    source = described["sources"]["web"]
    expected = sorted(token for each in documents_of("web") for token in each if token)
    following = {a: b for each in documents_of("web") for a, b in pairwise(each)}
    num_rows, epochs = source["num_windows"], []
    for epoch in range(2):
        rows = batch(server, described["id"], epoch * num_rows, count=num_rows).reshape(num_rows, -1)
        assert rows.shape == (num_rows, SEQ_LEN + 1)
        inputs, targets = rows[:, :-1].ravel().tolist(), rows[:, 1:].ravel().tolist()
        assert sorted(token for token in inputs if token) == expected
        assert all(following[a] == b for a, b in zip(inputs, targets, strict=True) if a)
        epochs.append(rows)
    assert not np.array_equal(*epochs)
    pieces = sum(-(-(len(each) - 1) // SEQ_LEN) for each in documents_of("web"))
    used = len(expected) + pieces
    assert (source["num_pieces"], source["fill"]) == (pieces, used / (num_rows * (SEQ_LEN + 1)))
    assert source["steps_per_epoch"] == num_rows


def test_indices_say_what_the_rows_join(server: RunningServer) -> None:
    plan_id = post(server, document({"web": 1, "code": 1}))["id"]
    response = server.get("/v1/indices", plan=plan_id, step=3, count=4).json()
    shards = [SHARDS[each["corpus"]][int(each["name"].partition(".")[0])] for each in response["shards"]]
    rows: list[list[int]] = [[] for _ in range(4 * 6)]
    for row, shard, begin, count in response["indices"]:
        rows[row] += [begin] * count if shard == -1 else shards[shard][begin : begin + count]
    assert rows == batch(server, plan_id, 3, count=4).reshape(24, -1).tolist()


def test_sources_and_loss_masks_come_beside_the_rows(server: RunningServer) -> None:
    """Of a corpus without masks everything counts; an unused end, as an end of text here, does not."""
    described = post(server, document({"web": 1, "code": 1}))
    response = server.get(
        "/v1/batches", plan=described["id"], step=2, count=4, format="json", **{"with": "sources,loss_mask"}
    ).json()
    tokens, masks = (np.array(response[name]).reshape(24, -1) for name in ("tokens", "loss_mask"))
    names = list(described["sources"])
    for row, mask, source in zip(tokens, masks, np.ravel(response["sources"]).tolist(), strict=True):
        assert {names[source]} == {"code" if token > 10_000 else "web" for token in row.tolist() if token}
        used = int(np.flatnonzero(row)[-1]) + 2  # the end of text after the last token belongs to it
        expected = (row % 3 > 0) if names[source] == "code" else np.ones(row.size, dtype=bool)
        assert mask[:used].tolist() == expected[:used].tolist()
        assert not mask[used:].any()


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_ranks_and_a_mixture_share_the_rows(server: RunningServer, world_size: int) -> None:
    plan_id = post(server, document({"web": 3, "code": 1}))["id"]
    whole = batch(server, plan_id, 5, count=3)
    parts = [
        batch(server, plan_id, 5, count=3, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    assert np.array_equal(batch(server, plan_id, 6)[0], whole[1])
    assert {bool((row > 10_000).any()) for row in whole.reshape(18, -1)} == {True, False}


def test_balanced_ranks_say_which_rows_they_hold(server: RunningServer) -> None:
    """In each format, for several steps, and as the page shows them; the global batch is the plain plan's."""
    mixture = {"web": 3, "code": 1}
    rows = {"documents": {"block_documents": 50, "balance_ranks": True}}
    plain, plan = (post(server, document(mixture, **more))["id"] for more in ({}, {"rows": rows}))
    digests = [server.get(f"/v1/plans/{each}/receipt", step=5).json()["digest"] for each in (plain, plan)]
    assert digests[0] == digests[1]
    whole, held = batch(server, plain, 5, count=3), []
    for rank in range(3):
        asked: dict[str, Any] = {"plan": plan, "step": 5, "count": 3, "rank": rank, "world_size": 3}
        response = server.get("/v1/batches", format="json", **asked).json()
        numbers = np.array(response["rows"])
        assert np.array_equal(response["tokens"], np.take_along_axis(whole, numbers[:, :, None], axis=1))
        assert np.array_equal(server.get("/v1/batches", **asked).array(), response["tokens"])
        assert server.get("/v1/indices", **asked).json()["rows"] == response["rows"]
        raw = server.get("/v1/batches", **asked, **{"with": "rows"}).body
        assert np.array_equal(np.frombuffer(raw[-24:], "<u4").reshape(3, 2), numbers)
        held.append(numbers)
        shown = server.get(f"/v1/plans/{plan}/rows", step=6, first=rank * 2, count=2, world_size=3).json()
        assert [each["row"] for each in shown["rows"]] == numbers[1].tolist()
    assert np.array_equal(np.sort(np.hstack(held)), np.tile(np.arange(6), (3, 1)))
    assert not np.array_equal(np.hstack(held), np.tile(np.arange(6), (3, 1)))
    response = server.get(
        "/v1/batches", plan=plain, step=5, rank=1, world_size=3, format="json", **{"with": "rows"}
    )
    assert response.json()["rows"] == [[2, 3]]


@pytest.mark.parametrize("number", range(0, 190, 9))
def test_a_document_is_found_in_the_rows_that_hold_it(server: RunningServer, number: int) -> None:
    plan_id = post(server, document({"web": 3, "code": 1}))["id"]
    tokens = documents_of("web")[number]
    found = server.get("/v1/lookup", plan=plan_id, corpus="web", document=number, epochs=2).json()["rows"]
    for epoch in range(2):
        seen: list[int] = []
        for row in sorted((row for row in found if row["epoch"] == epoch), key=lambda row: row["offset"]):
            held = batch(server, plan_id, row["step"])[0, row["row"]].tolist()
            its = held[row["offset"] : row["offset"] + len(tokens)]
            assert its[0] in tokens
            seen += [token for token in held[:-1] if token in tokens and token]
        assert sorted(seen) == [token for token in tokens if token]


def test_what_is_said_of_steps(server: RunningServer) -> None:
    """Receipt, usage, shards and the page's rows."""
    described = post(server, document({"web": 3, "code": 1}))
    plan = f"/v1/plans/{described['id']}"
    rows = batch(server, described["id"], 2)[0]
    digest = f"xxh3-64={xxhash.xxh3_64_hexdigest(rows.tobytes())}"
    assert server.get(f"{plan}/receipt", step=2).json()["digest"] == digest
    used = server.get(f"{plan}/usage", step=20).json()["sources"]
    assert sum(each["rows"] for each in used.values()) == 120
    for name, each in used.items():
        assert each["epochs"] == each["rows"] / described["sources"][name]["num_windows"]
    shards = server.get(f"{plan}/shards", step=0, count=10).json()["shards"]
    assert sum(each["num_rows"] for each in shards) == 60
    shown = server.get(f"{plan}/rows", step=2).json()["rows"]
    for row, tokens in zip(shown, rows.tolist(), strict=True):
        assert [token for span in row["spans"] for token in span["tokens"]] + [0] * row["unused"] == tokens
        assert all(span["document"] is not None for span in row["spans"])
    text = server.get("/v1/batches", plan=described["id"], step=2, format="json").json()
    assert text["tokens"] == [rows.tolist()]


def test_an_excluded_document_is_replaced_and_nothing_else(server: RunningServer) -> None:
    one = post(server, document({"web": 3, "code": 1}))
    tokens = documents_of("web")[30]
    begin = tokens[0] - FIRST["web"]
    stages = [{**one["plan"]["stages"][0], "exclude": {"web": [[begin, begin + len(tokens)]]}}]
    other = post(server, document(stages=stages))
    assert other["stages"][0]["excluded_windows"]["web"] == -(-(len(tokens) - 1) // SEQ_LEN)
    steps = [server.get("/v1/lookup", plan=one["id"], corpus="web", document=30).json()["rows"][0]["step"]]
    response = server.get(f"/v1/plans/{one['id']}/diff", other=other["id"], steps=1).json()["rows"]
    assert response["first_step"] == steps[0]
    a, b = (batch(server, each["id"], 0, count=30).reshape(180, -1) for each in (one, other))
    differs = (a != b).any(axis=1)
    assert {bool(set(row) & set(tokens[:-1])) for row in a[differs].tolist()} == {True}
    assert not set(b.ravel().tolist()) & set(tokens[:-1])


@pytest.mark.parametrize(
    ("corpus", "status", "slug", "detail", "remedy"),
    [
        ("bare", 404, "unknown-document", "corpus 'bare' has no document index", "corpus-server index"),
        ("unknown", 422, "invalid-plan", "has no known end-of-text id", "eot=ID"),
        ("cut", 422, "invalid-plan", "nothing tells whether the documents of corpus 'cut' end or", "eot_at="),
        ("sentences", 422, "invalid-plan", "document 1 of corpus 'sentences' ends with token 4", "eot=ID"),
    ],
)
def test_a_corpus_whose_documents_cannot_be_told_is_refused(
    server: RunningServer, corpus: str, status: int, slug: str, detail: str, remedy: str
) -> None:
    problem = check_problem(server.post_plan(document({corpus: 1})), status, slug)
    assert detail in problem["detail"]
    assert remedy in problem["remedy"]


def test_a_query_spells_rows(server: RunningServer) -> None:
    spelled = {"corpus": "web", "seq_len": SEQ_LEN, "batch_size": 6, "seed": 7, "rows": "documents"}
    response = server.get("/v1/batches", **spelled, block_documents=50, step=4)
    assert response.headers["Corpus-Plan"] == post(server, document())["id"]
    check_problem(
        server.get("/v1/batches", **{**spelled, "rows": "windows"}, block_documents=50, step=4),
        422,
        "invalid-parameter",
        parameter="rows",
    )


@pytest.mark.parametrize("harm", ["other-numbers", "damage", "cut"])
def test_a_table_that_is_changed_under_a_server_is_built_again(
    folder: Path, tmp_path: Path, harm: str
) -> None:
    """The failure was: wrong rows with 200, or a 500 for ever, until a restart."""
    with start(folder, tmp_path) as server:
        plan = post(server, document({"web": 1, "code": 1}))["id"]
        expected = batch(server, plan, 0, count=8)
        for path in sorted((server.state_dir / "tables").rglob("*.npy")):
            about, content = path.stat(), bytearray(path.read_bytes())
            if harm == "cut":
                content = content[:-8]
            elif len(content) > 136:
                numbers = slice(128, None) if harm == "damage" else slice(128, 136)
                content[numbers] = bytes(b ^ (0xFF if harm == "damage" else 1) for b in content[numbers])
            with path.open("r+b") as file:
                file.write(content)
                file.truncate()
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        while (response := server.get("/v1/batches", plan=plan, step=0, count=8)).status != 200:
            check_problem(response, 503, "state-unavailable")
        assert np.array_equal(response.array(), expected)
        assert server.log().count("a damaged table is built again") >= 1
        assert "/v1/batches failed" not in server.log()


def test_tables_are_shared_kept_and_checked(folder: Path, tmp_path: Path) -> None:
    """By plans of other seeds and stages, by processes, and over a restart; not one of another corpus."""
    with start(folder, tmp_path) as server:
        tables = server.state_dir / "tables"
        first = post(server, document({"web": 1, "code": 1}))
        assert set(first["plan"]["rows"]["documents"]["lengths"]) == {"web", "code"}
        post(server, document({"web": 1, "code": 2}, seed=8))
        post(server, document({"code": 1}, batch_size=3))
        made = {path.name: (path / "table.json").stat().st_mtime_ns for path in tables.iterdir()}
        assert len(made) == 2
        expected = batch(server, first["id"], 0, count=8)
        server.stop()
        one, other = sorted(tables.iterdir())
        for path in other.iterdir():
            shutil.copy(path, one)
        (other / "document_token.npy").write_bytes((other / "document_token.npy").read_bytes()[:-8])
        server.start()
        assert np.array_equal(batch(server, first["id"], 0, count=8), expected)
        assert server.log().count("a damaged table is built again") == 2
        assert {path.name for path in tables.iterdir()} == set(made)
    changed = {**first["plan"], "rows": {"documents": {"block_documents": 50, "lengths": {"web": "a"}}}}
    with start(folder, tmp_path) as server:
        problem = check_problem(server.post_plan(changed), 409, "fingerprint-mismatch")
        assert problem["parameter"] == "rows.documents.lengths"
        changed["rows"]["documents"]["lengths"] = {"other": "a"}
        problem = check_problem(server.post_plan(changed), 422, "invalid-plan")
        assert "rows.documents.lengths names ['other']" in problem["detail"]
