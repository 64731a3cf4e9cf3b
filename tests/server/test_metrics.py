"""Metrics that are right over several workers, one of which was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from corpus_server import metrics
from corpus_server.metrics import shared
from corpus_server.metrics.kinds import METRICS, CorpusColumn, Counter
from corpus_server.read.bound_plan import Source
from corpus_server.responses.requests import count_tokens
from tests.conftest import ServedCorpus
from tests.server.http.test_requests import ask
from tests.serving import RunningServer

ASKED = "corpus_requests_total", "/v1/corpora/{name}", "200", "application"
BATCH = {"corpus": "web", "seq_len": 16, "batch_size": 12, "step": 5}


def samples(server: RunningServer) -> dict[tuple[str, ...], float]:
    """Return values by (name, label values in the order of their names)."""
    response = server.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.body.decode())
        for sample in family.samples
    }


def test_requests_and_bytes_are_counted_over_all_workers(server: RunningServer) -> None:
    before = samples(server)
    sent = refusals = 0
    for _ in range(20):
        sent += len(server.get("/v1/batches", **BATCH).body)
        assert server.get("/v1/batches", **BATCH, method="HEAD").status == 200
        assert server.get("/v1/batches", **BATCH, method="HEAD", format="json").status == 200
        assert server.get("/v1/batches", **BATCH, stepp=1).status == 422
        server.get("/v1/corpora/web/tokens")
        server.get("/v1/corpora/docs/tokens")
        server.get("/v1/nothing/here")
        refusals += len(server.get("/v1/batches?" + "x" * 9000).body)
        refusals += len(ask(server, b"no HTTP\r\n\r\n").body)
    server.wait_until_idle()
    after = samples(server)

    def grown(*key: str) -> float:
        return after.get(key, 0) - before.get(key, 0)

    problem = len(server.get("/v1/batches", **BATCH, stepp=1).body)
    assert grown("corpus_requests_total", "/v1/batches", "200", "fast-path") == 20
    assert grown("corpus_requests_total", "/v1/batches", "200", "application") == 40
    assert grown("corpus_requests_total", "/v1/batches", "422", "fast-path") == 20
    assert grown("corpus_requests_total", "/v1/corpora/{name}/tokens", "200", "application") == 40
    assert grown("corpus_requests_total", "unknown", "404", "application") == 20
    assert grown("corpus_sent_bytes_total", "/v1/batches") == sent + 20 * problem
    assert grown("corpus_requests_total", "refused", "414", "fast-path") == 20
    assert grown("corpus_requests_total", "refused", "400", "fast-path") == 20
    assert grown("corpus_sent_bytes_total", "refused") == refusals > 0
    assert grown("corpus_request_seconds_count", "/v1/batches") == 80
    ranges = {
        name: server.get(f"/v1/corpora/{name}/tokens", format="json").json() for name in ("web", "docs")
    }
    num_tokens = {name: each["stop"] - each["start"] for name, each in ranges.items()}
    assert grown("corpus_tokens_total", "web") == 20 * (12 * 17 + num_tokens["web"])
    assert grown("corpus_tokens_total", "docs") == 20 * num_tokens["docs"]
    assert grown("corpus_request_seconds_bucket", "+Inf", "/v1/batches") == 80


def test_a_document_counts_when_it_was_sent_as_a_whole(server: RunningServer) -> None:
    """Not for a HEAD, a 304 or an error; whatever its format, and a range of tokens is none."""
    path = "/v1/corpora/docs/documents/1"
    server.wait_until_idle()
    before = samples(server)
    for form in ("json", "raw", "npy"):
        response = server.get(path, format=form)
        assert response.status == 200
        given = {"If-None-Match": response.headers["ETag"]}
        assert server.get(path, format=form, headers=given).status == 304
        assert server.get(path, format=form, method="HEAD").status == 200
    assert server.get("/v1/corpora/docs/documents/2").status == 200
    assert server.get("/v1/corpora/docs/documents/99").status == 404
    assert server.get("/v1/corpora/web/documents/0").status == 404
    for corpus in ("docs", "web"):
        assert server.get(f"/v1/corpora/{corpus}/tokens").status == 200
    server.wait_until_idle()
    after = samples(server)
    key = "corpus_documents_total", "docs"
    assert after[key] - before.get(key, 0) == 4
    assert (key[0], "web") not in after  # it has no documents


def test_no_counter_falls_from_one_scrape_to_the_next(
    corpora: dict[str, ServedCorpus], tmp_path: Path
) -> None:
    """Whichever worker answers, and whatever it is writing for the others at that moment."""

    def scrapes(_: int) -> list[float]:
        return [samples(server).get(ASKED, 0) for _ in range(150)]

    with RunningServer({"web": corpora["web"].path}, tmp_path, workers=2) as server:
        with ThreadPoolExecutor(5) as threads:
            seen = threads.map(scrapes, range(4))
            for _ in range(600):
                server.get("/v1/corpora/web")
            every = list(seen)
        server.wait_until_idle()
        assert samples(server)[ASKED] == 600
    assert all(row == sorted(row) for row in every)


def test_a_killed_worker_leaves_counts_and_no_ghost(corpora: dict[str, ServedCorpus], tmp_path: Path) -> None:
    with RunningServer({"web": corpora["web"].path}, tmp_path, workers=2) as server:
        for _ in range(10):
            server.get("/v1/corpora/web")
        # A worker tells the others what it has counted every second, and that goes lost which it has not.
        deadline = time.monotonic() + 30
        while samples(server).get(ASKED) != 10:
            assert time.monotonic() < deadline, "not all were counted"
            time.sleep(0.05)
        killed = server.worker_pids()[0]
        os.kill(killed, signal.SIGKILL)
        while len(server.worker_pids()) < 2 or killed in server.worker_pids():
            assert time.monotonic() < deadline, "the worker was not replaced"
            time.sleep(0.05)
        assert samples(server)[ASKED] == 10
        while samples(server)["corpus_workers",] != 2:  # the killed one counts no more, its successor does
            assert time.monotonic() < deadline, "the workers are not two"
            time.sleep(0.05)
        server.wait_until_idle()
        folder = next((tmp_path / "state" / "metrics").iterdir())
        assert not list(folder.glob(f"{killed}[.-]*"))


def test_a_killed_server_leaves_a_folder_that_the_next_one_removes(
    corpora: dict[str, ServedCorpus], tmp_path: Path
) -> None:
    """Catalogue row 12."""
    with RunningServer({"web": corpora["web"].path}, tmp_path) as server:
        first = server.pid
        server.restart()
        assert [folder.name for folder in (tmp_path / "state" / "metrics").iterdir()] == [str(server.pid)]
        assert server.pid != first


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"[1, 2]",
        b'{"corpus_tokens": 5}',
        b'{"corpus_tokens": [[["web"], [null]]]}',
        b'{"corpus_tokens": [[["web"], [1e999]]]}',
        b'{"corpus_tokens": [[[5], [1.0]]]}',
        b'{"corpus_tokens": [[["web", "more"], [1.0]]]}',
        b'{"corpus_tokens": [[["web"], [1.0, 2.0]]]}',
        b'{"corpus_request_seconds": [[["/v1/batches"], [1.0]]]}',
        b'{"corpus_of_tomorrow": [[["web"], [1.0]], [["web"], [1.0, 2.0]]], "ranks": [[["a"], [1.0]]]}',
        b"\xff" * 100,
        None,
    ],
    ids=lambda content: "a FIFO" if content is None else repr(content[:60]),
)
def test_a_file_that_no_worker_of_this_release_wrote_hides_no_counts(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left by a worker that was killed: it is passed over, here and when it is added to the past."""
    monkeypatch.setattr(shared, "_folder", tmp_path)
    (tmp_path / "99999999-1.ended").write_text('{"corpus_plan_tokens": [[["abc", "a"], [7.0]]]}')
    for name in ("99999998-1.ended", "99999998.json", "past.json"):
        if content is None:
            os.mkfifo(tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content)
    counted = b'corpus_plan_tokens_total{plan="abc",run="a"} 7.0'
    for _ in range(2):
        assert counted in shared.render()
    assert {each.name for each in tmp_path.iterdir() if each.suffix} == {
        *("past.json", "99999998.json", f"{os.getpid()}.json")
    }


def test_what_a_worker_of_a_later_release_counts_is_kept_for_its_successor(tmp_path: Path) -> None:
    for pid in (99999998, 99999999):
        (tmp_path / f"{pid}-1.ended").write_text('{"corpus_of_tomorrow": [[["web"], [1.0, 2.0]]]}')
        shared.totals(tmp_path, {})
    past = json.loads((tmp_path / "past.json").read_text())
    assert past["corpus_of_tomorrow"] == [[["web"], [2.0, 4.0]]]


def test_a_metric_shown_by_corpus_has_that_label_alone() -> None:
    with pytest.raises(ValueError, match="its only label must be corpus"):
        Counter("corpus_wrong", "wrong", "route", live=[CorpusColumn("wrong")])
    assert "corpus_wrong" not in METRICS
    with pytest.raises(ValueError, match="two metrics with the name corpus_tokens"):
        Counter("corpus_tokens", "twice", "corpus")


def test_tokens_of_many_stages_and_corpora_are_summed_by_corpus() -> None:
    """More stages than are counted apart, over two lists of corpora."""
    before = metrics.TOKENS.numbers()
    for number in range(200):
        names = ("sum-a", "sum-b") if number % 2 else ("sum-a", "sum-c", "sum-d")
        shares = dict.fromkeys(names, 1 / len(names))
        count_tokens(Source.of("", shares), 6, "")
        count_tokens(Source.of("", {"sum-a": 1.0}), 1, "")
    found = {labels: number for labels, (number,) in metrics.TOKENS.numbers().items() if labels not in before}
    assert found == {
        ("sum-a",): pytest.approx(100 * 3 + 100 * 2 + 200),
        ("sum-b",): pytest.approx(300),
        ("sum-c",): pytest.approx(200),
        ("sum-d",): pytest.approx(200),
    }
    assert metrics.TOKENS.numbers()[("sum-a",)] == [found[("sum-a",)]]
