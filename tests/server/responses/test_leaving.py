"""Whoever asks and leaves costs nothing any more: for each question the work ends with its caller."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from corpus_server.corpus.corpus import Corpus
from corpus_server.responses import questions  # noqa: F401 - registers them
from corpus_server.responses.question import QUESTIONS
from corpus_server.tools.viewing.make import make_view
from tests.corpora import some_tokens, spec, write_megatron_lengths, write_raw
from tests.raw_http import RawConnection, get
from tests.recorded import Record, write_part
from tests.reference import one_source
from tests.reported import write_report
from tests.serving import RunningServer, wait_until

NUM_DOCUMENTS = 200_000
CALLERS = 4

AFTER_SECONDS = 0.25
"""Of the processor, after the callers left: the server waits 50 ms for one that only stopped sending, and
a turn takes 30. Each of these questions, asked four times, takes longer than that or is done at once."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("leaving")
    small = write_raw(folder / "small.bin", some_tokens(4_000_000))
    text = write_raw(folder / "text.bin", np.random.default_rng(0).integers(97, 123, 2_000_000))
    lengths = np.random.default_rng(1).integers(2, 48, NUM_DOCUMENTS)
    docs = f"{write_megatron_lengths(folder / 'docs', lengths, eot=9)},eot=9"
    with Corpus.open(spec(folder / "docs.bin", "docs", eot=9)) as corpus:
        make_view(corpus, np.full(NUM_DOCUMENTS, 100, dtype=np.uint16), folder / "often.view", made={})
    for number in range(4):
        records = [Record(step, row, "small", 1.0) for step in range(500) for row in range(40)]
        write_part(folder / "losses" / "run", records, number=number)
    corpora = {
        "small": small,
        "text": f"{text},tokenizer=bytes",
        "docs": docs,
        "often": f"docs?view={folder / 'often.view'}",
    }
    write_report(folder / "reports" / "found", num_items=400_000)
    arguments = ["--record-dir", str(folder / "losses"), "--max-response-bytes", str(2**34)]
    arguments += ["--report-dir", str(folder / "reports")]
    with RunningServer(corpora, folder, arguments=arguments) as running:
        yield running


def plan(server: RunningServer, corpus: str, size: int, seq_len: int = 64, **fields: Any) -> str:
    document = {**one_source(corpus, seq_len, size), **fields}
    response = server.post_plan(document)
    while response.status == 503:  # a table is being built
        time.sleep(0.1)
        response = server.post_plan(document)
    assert response.status == 200, response.body
    return str(response.json()["id"])


def diff(server: RunningServer) -> bytes:
    one, other = (plan(server, "small", 2**16, seed=seed) for seed in (1, 2))
    return get(f"/v1/plans/{one}/diff", other=other, steps=100)


PACKED = {"rows": {"documents": {}}}

ASKED: dict[str, Callable[[RunningServer], bytes]] = {
    "/v1/batches": lambda server: get(
        "/v1/batches", plan=plan(server, "small", 2**20, 1024), step=0, count=4, checksum="true"
    ),
    "/v1/indices": lambda server: get(
        "/v1/indices", plan=plan(server, "docs", 1024, 128, **PACKED), step=0, count=256, format="raw"
    ),
    "/v1/corpora/{name}/tokens": lambda server: get("/v1/corpora/often/tokens", count=200_000_000),
    "/v1/corpora/{name}/documents/{number}": lambda server: get("/v1/corpora/often/documents/19999999"),
    "/v1/corpora/{name}/documents": lambda server: get(
        "/v1/corpora/often/documents", where="num_tokens > 1", sort="num_tokens"
    ),
    "/v1/corpora/{name}/spans": lambda server: get("/v1/corpora/docs/spans", count=2**20),
    "/v1/corpora/{name}/statistics": lambda server: get("/v1/corpora/docs/statistics"),
    "/v1/corpora/{name}/search": lambda server: get("/v1/corpora/text/search", text="zzzzzzzz"),
    "/v1/plans/{plan_id}/file": lambda server: get(f"/v1/plans/{plan(server, 'small', 64)}/file"),
    "/v1/plans/{plan_id}/receipt": lambda server: get(
        f"/v1/plans/{plan(server, 'small', 2**19, 1000)}/receipt", step=0
    ),
    "/v1/plans/{plan_id}/shards": lambda server: get(
        f"/v1/plans/{plan(server, 'often', 64)}/shards", step=0, count=4096
    ),
    "/v1/plans/{plan_id}/usage": lambda server: get(
        f"/v1/plans/{plan(server, 'small', 64, skip_steps=[[3 * k, 3 * k + 1] for k in range(9000)])}/usage",
        step=30_000,
    ),
    "/v1/plans/{plan_id}/diff": diff,
    "/v1/plans/{plan_id}/rows": lambda server: get(
        f"/v1/plans/{plan(server, 'text', 4096, 254)}/rows", step=0, count=4096
    ),
    "/v1/plans/{plan_id}/members": lambda server: get(
        f"/v1/plans/{plan(server, 'docs', 64, family={'leave_out': 0.1, 'member': 0})}/members",
        document=100,
        count=65_536,
    ),
    "/v1/lookup": lambda server: get(
        "/v1/lookup",
        corpus="small",
        seq_len=64,
        batch_size=64,
        start=0,
        stop=12_000,
        epochs=10_000,
        limit=100_000,
    ),
    "/v1/recordings": lambda server: get("/v1/recordings"),
    "/v1/recordings/{name}/losses": lambda server: get("/v1/recordings/run/losses"),
    "/v1/recordings/{name}/spikes": lambda server: get("/v1/recordings/run/spikes", count=200),
    "/v1/reports": lambda server: get("/v1/reports"),
    "/v1/reports/{name}": lambda server: get("/v1/reports/found", first=2**40),
}


def cpu_seconds(server: RunningServer) -> float:
    return time.clock_gettime((~server.worker_pid << 3) | 2)  # its clock, see clock_getcpuclockid(3)


def test_every_question_is_asked_here() -> None:
    assert {each.path for each in QUESTIONS} == set(ASKED)


@pytest.mark.parametrize("path", ASKED)
def test_work_ends_with_its_callers(server: RunningServer, path: str) -> None:
    request = ASKED[path](server)
    server.wait_until_idle()
    before = cpu_seconds(server)
    with ExitStack() as opened:
        callers = [opened.enter_context(RawConnection(server)) for _ in range(CALLERS)]
        for each in callers:
            each.send(request)
        sockets = [each.socket for each in callers]
        wait_until(
            lambda: (
                cpu_seconds(server) - before > 0.15
                or len(select.select(sockets, [], [], 0)[0]) == CALLERS  # all are answered
            )
        )
    left = cpu_seconds(server)
    used = [left]
    while len(used) < 4 or used[-1] - used[-4] > 0.03:
        time.sleep(0.1)
        used.append(cpu_seconds(server))
    print(f"{path}: {left - before:.2f} s until they left, {used[-1] - left:.3f} s after")
    assert used[-4] - left < AFTER_SECONDS
