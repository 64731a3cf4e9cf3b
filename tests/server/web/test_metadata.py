"""Where documents came from, over HTTP: beside their tokens, in the rows of a step, in an export."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.metadata import write_metadata
from tests.serving import RunningServer, check_problem, run_here
from tests.tokens import Tokens, post
from tests.views import write_corpus, write_view

SIZES = [[6, 3, 9], [4, 8]]
NUM = 5
COLUMNS: dict[str, list[Any]] = {
    "id": [f"doc-{n}" for n in range(NUM)],
    "source": ["<b>a</b>", None, "c", "d", "e"],
    "url": [f"http://x/{n}" for n in range(NUM)],
    "when": [datetime.datetime(2020, 1, 1 + n, tzinfo=datetime.UTC) for n in range(NUM)],
    "raw": [bytes([n, 255]) for n in range(NUM)],
    "score": [0.5, float("nan"), None, 1.0, 2.0],
    "tags": [["x", n] if n else None for n in ("a", "b", None, "c", "d")],
    "long": ["y" * 5000, "", "short", "\u202e", "\x00"],
}
PLAN = {"seq_len": 7, "stages": [{"global_batch_size": 3, "mixture": {"web": 1}}]}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    tokens = Tokens(tmp_path_factory.mktemp("tokens") / "tokens.toml")
    tokens.add("all", "read:*", "plans", "inspect", "metrics")
    tokens.add("other", "read:bare", "plans")
    return tokens


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokens: Tokens) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("corpora")
    for name in ("web", "bare", "wrong"):
        write_corpus(folder / name, SIZES)
    write_metadata(folder / "web" / "documents", COLUMNS)
    write_metadata(folder / "wrong" / "documents", {"id": ["a"]})
    write_view(folder / "web", [0, 1, 0, 2, 1], folder / "hq.view")
    corpora: dict[str, Path | str] = {
        name: f"{folder / name},dtype=uint32" for name in ("web", "bare", "wrong")
    }
    corpora["hq"] = "web?view=" + str(folder / "hq.view")
    with RunningServer(corpora, folder, arguments=["--tokens", str(tokens.path)]) as server:
        yield server


def expected(number: int) -> dict[str, Any]:
    """The row of a document, as JSON shows it."""
    row = {name: values[number] for name, values in COLUMNS.items()}
    row["when"] = f"2020-01-0{1 + number}T00:00:00+00:00"
    row["raw"] = f"{number:02x}ff"
    row["score"] = "nan" if number == 1 else row["score"]
    row["long"] = f"{'y' * 2000}... (5,000 characters)" if number == 0 else row["long"]
    return row


def test_a_document_has_its_metadata(server: RunningServer, tokens: Tokens) -> None:
    headers = tokens.header("all")
    for number in range(NUM):
        response = server.get(f"/v1/corpora/web/documents/{number}", headers=headers).json()
        assert (response["metadata"], response["metadata_problem"]) == (expected(number), None)
        assert (
            response["stop"] - response["start"] == len(response["tokens"]) == [*SIZES[0], *SIZES[1]][number]
        )
    assert "metadata" not in server.get("/v1/corpora/bare/documents/0", headers=headers).json()
    described = {name: server.get(f"/v1/corpora/{name}", headers=headers).json() for name in ("web", "bare")}
    assert [each["has_metadata"] for each in described.values()] == [True, False]
    assert described["web"]["fingerprint"] == described["bare"]["fingerprint"]


def test_a_view_has_that_of_its_corpus(server: RunningServer, tokens: Tokens) -> None:
    for number, own in enumerate((1, 3, 4, 3)):
        response = server.get(f"/v1/corpora/hq/documents/{number}", headers=tokens.header("all")).json()
        assert (response["base_document"], response["metadata"]) == (own, expected(own))


@pytest.mark.parametrize("corpus", ["web", "hq"])
def test_rows_of_a_step_name_their_documents(server: RunningServer, tokens: Tokens, corpus: str) -> None:
    headers = tokens.header("all")
    document = {**PLAN, "stages": [{"global_batch_size": 3, "mixture": {corpus: 1}}]}
    plan = post(server, document, headers).json()["id"]
    for metadata in ("names", "all"):
        response = server.get(f"/v1/plans/{plan}/rows", step=0, metadata=metadata, headers=headers).json()
        assert response["problems"] == []
        for row in response["rows"]:
            numbers = list(dict.fromkeys(span["document"] for span in row["spans"]))
            assert [each["document"] for each in row["documents"]] == numbers
            for each in row["documents"]:
                its = expected(each["document"])
                assert (each["id"], each["source"]) == (its["id"], its["source"] or its["url"])
                assert each["metadata"] == (its if metadata == "all" else None)


def test_metadata_that_cannot_be_read_does_not_hide_tokens(server: RunningServer, tokens: Tokens) -> None:
    headers = tokens.header("all")
    said = "corpus 'wrong': documents: its metadata has 1 row, the corpus 5 documents"
    response = server.get("/v1/corpora/wrong/documents/1", headers=headers).json()
    assert (response["metadata"], said in response["metadata_problem"]) == (None, True)
    assert len(response["tokens"]) == 3
    plan = post(
        server, {"seq_len": 7, "stages": [{"global_batch_size": 3, "mixture": {"wrong": 1}}]}, headers
    )
    shown = server.get(f"/v1/plans/{plan.json()['id']}/rows", step=0, headers=headers).json()
    assert [row["documents"] for row in shown["rows"]] == [[], [], []]
    assert (len(shown["problems"]), said in shown["problems"][0]) == (1, True)


def test_only_who_may_read_the_tokens_sees_it(server: RunningServer, tokens: Tokens) -> None:
    plan = post(server, PLAN, tokens.header("all")).json()["id"]
    for path in ("/v1/corpora/web/documents/0", f"/v1/plans/{plan}/rows?step=0"):
        check_problem(server.get(path, headers=tokens.header("other")), 403, "forbidden")
        check_problem(server.get(path), 401, "unauthorized")


def test_a_cached_response_is_used_until_the_metadata_changes(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "web", SIZES)
    write_metadata(folder / "documents", {"id": list("abcde")})
    with RunningServer({"web": f"{folder},dtype=uint32"}, tmp_path) as server:
        path = "/v1/corpora/web/documents/1"
        first, raw = server.get(path), server.get(path, format="raw")
        tags = {"If-None-Match": first.headers["ETag"]}
        assert server.get(path, headers=tags).status == 304
        (folder / "documents" / "0.parquet").touch()
        changed = server.get(path, headers=tags)
        assert (changed.status, changed.json()["metadata"]) == (200, None)
        assert changed.headers["ETag"] != first.headers["ETag"]  # else the problem would be kept for the row
        write_metadata(folder / "documents", {"id": list("vwxyz")})
        server.restart()
        again = server.get(path, headers=tags)
        assert (again.status, again.json()["metadata"]) == (200, {"id": "w"})
        assert server.get(path, format="raw").headers["ETag"] == raw.headers["ETag"]


def test_export_prints_what_a_step_holds(server: RunningServer, tokens: Tokens, tmp_path: Path) -> None:
    headers = tokens.header("all")
    plan = post(server, PLAN, headers).json()["id"]
    web = np.concatenate([server.get("/v1/corpora/web/tokens", headers=headers).array()])
    secret = headers["Authorization"].removeprefix("Bearer ")
    arguments = ("--plan", plan[:20], "--step", "1", "--count", "2")
    done = run_here("export", server.url, *arguments, CORPUS_TOKEN=secret)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        assert line["tokens"] == web[line["start"] : line["stop"]].tolist()
        assert line["metadata"] == expected(line["document"])
        assert (line["corpus"], line["shard"]) == ("web", "0.bin" if line["document"] < 3 else "1.bin")
    for step in (1, 2):
        batch = server.get("/v1/batches", plan=plan, step=step, headers=headers).array()[0]
        for row, whole in enumerate(batch.tolist()):
            its = [line["tokens"] for line in lines if (line["step"], line["row"]) == (step, row)]
            assert [token for tokens_ in its for token in tokens_] == whole
    # The same of files: the plan from the server's state, or from its document.
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    corpus = f"web={server.folder / 'web'},dtype=uint32"
    for which in (arguments, ("--plan", str(tmp_path / "plan.json"), *arguments[2:])):
        of_files = run_here("export", corpus, *which, "--state-dir", server.state_dir)
        assert (of_files.returncode, of_files.stdout) == (0, done.stdout), of_files.stderr
    as_text = run_here("export", f"{corpus},tokenizer=bytes", "--plan", tmp_path / "plan.json", "--step", "0")
    texts = [json.loads(line) for line in as_text.stdout.splitlines()]
    assert {line["text"] for line in texts} >= {"".join(map(chr, range(7, 9)))}
    assert not any("tokens" in line for line in texts)


def test_export_of_a_row_of_many_documents_names_them_all(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path / "web", [[2] * 3000])
    write_metadata(folder / "documents", {"id": list(range(3000))}, row_group_size=100)
    (tmp_path / "plan.json").write_text(
        json.dumps(
            {
                "seq_len": 1500,
                "order": "sequential",
                "stages": [{"global_batch_size": 3, "mixture": {"web": 1}}],
            }
        )
    )
    done = run_here("export", f"{folder},dtype=uint32", "--plan", tmp_path / "plan.json", "--step", "0")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({line["row"] for line in lines}) == 3
    assert [line["metadata"]["id"] for line in lines] == [line["document"] for line in lines]
    assert {line["document"] for line in lines} == set(range(2251))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("{url}", "--plan", "0" * 64, "--step", "0"), "plan"),
        (("{url}", "web", "--plan", "0" * 64, "--step", "0"), "URL must be one server, or corpora"),
        (("{web}", "--plan", "abcabcab", "--step", "0"), "no plan here begins with 'abcabcab'"),
        (
            ("{url}", "--plan", "plam.json", "--step", "0"),
            "plan must be a file, or the beginning of a plan's id",
        ),
        (("wrong={web},dtype=uint32", "--plan", "{plan}", "--step", "0"), "wrong"),
    ],
)
def test_a_mistake_is_one_line(
    server: RunningServer, tokens: Tokens, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    secret = tokens.header("all")["Authorization"].removeprefix("Bearer ")
    values = {"url": server.url, "web": server.folder / "web", "plan": tmp_path / "plan.json"}
    filled = [each.format(**values) for each in arguments]
    done = run_here("export", *filled, "--state-dir", server.state_dir, CORPUS_TOKEN=secret)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr
