"""docs/http.md is true: its worked example, its table of errors, its limits."""

from __future__ import annotations

import re

import numpy as np
import pytest
import xxhash

from corpus_server.admission import admission, load, request
from corpus_server.http import connection
from corpus_server.responses.question import LIMITS
from corpus_server.responses.response import HEADERS
from corpus_server.responses.tokens import TOKEN_LIMITS
from corpus_server.settings import Settings
from corpus_server.web.routes import plans
from tests.corpora import write_raw
from tests.serving import ROOT, Response, RunningServer
from tests.tables import described

PAGE = (ROOT / "docs" / "http.md").read_text()


def blocks(heading: str) -> list[list[str]]:
    """Return the indented blocks of a chapter, each as its lines."""
    _, _, chapter = PAGE.partition(f"\n{heading}\n")
    chapter = re.split(r"^#+ ", chapter, maxsplit=1, flags=re.MULTILINE)[0]
    found = re.findall(r"(?:^    .*\n)+", chapter, re.MULTILINE)
    return [[line.strip() for line in block.splitlines()] for block in found]


def rows(heading: str) -> list[list[str]]:
    """Return the cells of a chapter's table, without its head."""
    _, _, chapter = PAGE.partition(f"\n{heading}\n")
    chapter = re.split(r"^#+ ", chapter, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in chapter.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def response(tmp_path_factory: pytest.TempPathFactory) -> Response:
    """What a server answers to the example's request."""
    folder = tmp_path_factory.mktemp("http")
    path = write_raw(folder / "web.bin", np.arange(60_000))
    request = re.search(r'localhost:8000(/v1/batches\?[^"]*)"', "\n".join(blocks("### A worked checksum")[0]))
    assert request is not None
    with RunningServer({"web": path}, folder) as server:
        return server.get(request[1])


def test_the_worked_head_is_what_comes(response: Response) -> None:
    lines = blocks("### A worked checksum")[1]
    assert lines[0] == f"HTTP/1.1 {response.status} OK"
    shown = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines[1:])}
    came = {name.lower(): value for name, value in response.headers.items()}
    assert came.keys() - shown.keys() == {"date", "server-timing", "x-request-id"}
    assert came | shown == came
    assert came.keys() - {name.lower() for name in HEADERS} == {"date", "content-length", "content-type"}


def test_the_worked_body_is_what_comes(response: Response) -> None:
    lines = blocks("### A worked checksum")[2]
    shown = bytes.fromhex("".join(re.split(r" {3,}", line)[0] for line in lines))
    assert shown == response.body
    tokens = [int(number) for line in lines[:2] for number in line.partition(": ")[2].split()]
    assert np.frombuffer(shown[:-8], "<u2").tolist() == tokens


def test_the_worked_digest_is_big_endian(response: Response) -> None:
    digest = xxhash.xxh3_64(response.body[:-8], seed=0)
    assert int.from_bytes(response.body[-8:], "big") == digest.intdigest()
    assert f"0x{digest.hexdigest()}" in blocks("### A worked checksum")[2][2]
    assert f"`Corpus-Checksum: xxh3-64={digest.hexdigest()}`" in PAGE


def test_the_limits_are_those_of_the_code() -> None:
    shown = {what: limit for what, limit, _ in rows("## Limits")}
    defaults = Settings.__dataclass_fields__
    numbers = {
        "URL": admission.MAX_URL_BYTES,
        "head": request.MAX_HEAD_BYTES,
        "body of a posted": load.MAX_BODY_BYTES,
        "body of any": load.SMALL_BODY_BYTES,
        "bodies over 64 KiB": load.MAX_BODY_BYTES,
        "time from": int(defaults["head_timeout_seconds"].default),
        "time until": int(defaults["body_timeout_seconds"].default),
        "connections of": defaults["max_connections"].default,
        "connections from": defaults["max_connections_per_address"].default,
        "descriptions": defaults["max_concurrent_responses"].default,
        "rows": TOKEN_LIMITS.rows,
        "bytes": defaults["max_response_bytes"].default // 2**20,
        "numbers": defaults["max_text_tokens"].default,
        "global batch": LIMITS.num_bytes,
        "plan documents": plans.MAX_LIST_BYTES // 2**20,
        "token responses": defaults["max_concurrent_responses"].default,
        "questions": load.MAX_QUESTIONS,
        "streams": load.MAX_FOLLOWERS,
        "token bytes": load.MAX_BYTES,
        "pipelined": connection.MAX_WAITING_BYTES,
    }
    assert len(shown) == len(numbers)
    for beginning, number in numbers.items():
        (limit,) = (limit for what, limit in shown.items() if what.startswith(beginning))
        assert re.search(rf"(?<![\d,]){number:,}\b", limit), (beginning, number, limit)


def test_the_page_names_every_route() -> None:
    paths = described()["paths"]
    formats = {"application/octet-stream", "application/x-npy", "application/json"}  # indices have no text
    assert paths["/v1/indices"]["get"]["responses"]["200"]["content"].keys() == formats
    chapter = PAGE.partition("## Parameters")[0]
    for route in paths:
        assert f"`{route.replace('plan_id', 'id')}`" in chapter, route
