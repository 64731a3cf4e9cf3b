"""What questions cost over HTTP: builders for nobody, tables of inline plans, plans of megabytes."""

from __future__ import annotations

import inspect
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from corpus_server.responses import questions  # noqa: F401 - registers them
from corpus_server.responses.question import QUESTIONS, Question
from corpus_server.work import Budget
from tests.corpora import write_megatron_lengths
from tests.raw_http import RawConnection, get, post
from tests.reference import one_source
from tests.serving import RunningServer, check_problem, wait_until

NUM_DOCUMENTS = 600_000  # above what is built in the server's process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("budgets")
    corpora = {}
    for name, number in (("many", NUM_DOCUMENTS), ("few", 2000)):
        lengths = np.random.default_rng(0).integers(2, 12, number)
        corpora[name] = f"{write_megatron_lengths(folder / name, lengths, eot=9)},eot=9"
    with RunningServer(corpora, folder) as running:
        yield running


def packed(corpus: str, seq_len: int) -> bytes:
    return get("/v1/batches", corpus=corpus, seq_len=seq_len, batch_size=4, step=0, rows="documents")


def builders(server: RunningServer) -> list[psutil.Process]:
    return psutil.Process(server.worker_pid).children(recursive=True)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.path)
def test_every_question_takes_a_budget(question: Question) -> None:
    parameter = inspect.signature(question.make).parameters["budget"]
    assert parameter.annotation in (Budget, "Budget")
    assert not inspect.isgeneratorfunction(question.make)
    assert question.limits.rows <= 2**27
    assert question.limits.num_bytes <= 2**32 or question.is_token_path  # which `max_response_bytes` bounds


def test_builders_for_callers_who_left_end_and_keep_no_small_table_waiting(server: RunningServer) -> None:
    """Each of four asks for another table of a large corpus, and leaves."""
    callers = [RawConnection(server).__enter__() for _ in range(4)]
    for number, each in enumerate(callers):
        each.send(packed("many", 20 + number))
    wait_until(lambda: builders(server), "a builder")
    with RawConnection(server) as other:
        other.send(packed("few", 33))
        assert other.read().status == 200
    assert builders(server)
    for each in callers:
        each.__exit__(None, None, None)
    wait_until(lambda: not builders(server), "the end of the builders", seconds=10)
    tables = server.state_dir / "tables"
    assert not tables.exists() or not list(tables.iterdir())


def test_a_table_that_only_an_inline_plan_wants_is_not_kept_on_disk(server: RunningServer) -> None:
    with RawConnection(server) as connection:
        connection.send(packed("few", 44))
        inline = connection.read()
        assert inline.status == 200
        tables = server.state_dir / "tables"
        assert not tables.exists() or not list(tables.iterdir())
        plan = {**one_source("few", 44, 4), "rows": {"documents": {}}}
        posted = server.post_plan(plan).json()["id"]
        assert len(list(tables.iterdir())) == 1
        connection.send(get("/v1/batches", plan=posted, step=0))
        assert connection.read().body == inline.body


def test_ranks_that_ask_for_a_plan_of_megabytes_keep_no_batch_waiting(server: RunningServer) -> None:
    """It is known on disk alone, as after a restart; eight ask for it, and it is read once."""
    count = 1_130_000
    skipped = ",".join(f"[{2 * k + 10},{2 * k + 11}]" for k in range(count))
    head = json.dumps(one_source("few", 8, 8))[:-1]
    with RawConnection(server, timeout=100) as connection:
        connection.send(post("/v1/plans", f'{head}, "skip_steps": [{skipped}]}}'.encode()))
        plan_id = connection.read().json()["id"]
    server.restart()
    served: list[int] = []

    def ask(rank: int) -> int:
        """Ask until there is more to say than that the plan is still being read: the machine may be busy."""
        with RawConnection(server, timeout=100) as connection:
            status = 503
            while status == 503:
                connection.send(get("/v1/batches", plan=plan_id, step=0, rank=rank, world_size=8))
                status = connection.read().status
        return status

    def others() -> None:
        with RawConnection(server, timeout=100) as connection:
            while not done.is_set():
                connection.send(get("/v1/batches", corpus="few", seq_len=8, batch_size=4, step=len(served)))
                served.append(connection.read().status)

    done = threading.Event()
    asking = threading.Thread(target=others)
    with ThreadPoolExecutor(8) as pool:
        ranks = [pool.submit(ask, rank) for rank in range(8)]
        wait_until(lambda: builders(server), "the process that reads the plan")
        (builder,) = builders(server)
        builder.suspend()  # it has no end while batches of another plan come
        try:
            asking.start()
            wait_until(lambda: len(served) >= 20, "batches of another plan")
            assert not any(each.done() for each in ranks)
        finally:
            builder.resume()
            done.set()
        assert {each.result(100) for each in ranks} == {200}
    asking.join()
    assert set(served) == {200}


def test_a_changed_corpus_is_one_line_of_the_log_that_names_it_first(tmp_path: Path) -> None:
    path = write_megatron_lengths(tmp_path / "web", np.full(100, 10), eot=9)
    with RunningServer({"web": f"{path},eot=9"}, tmp_path) as server:
        asked = {"corpus": "web", "seq_len": 8, "batch_size": 4}
        assert server.get("/v1/batches", **asked, step=0).status == 200
        with path.open("r+b") as file:
            file.write(b"\x01\x02")
        for step in range(50):
            problem = check_problem(server.get("/v1/batches", **asked, step=step), 503, "corpus-changed")
            assert problem["detail"].startswith("corpus 'web': web.bin: ")
        lines = re.findall(r".*corpus-changed: corpus 'web': web\.bin: .*", server.log())
        assert 1 <= len(lines) <= 3


def test_an_end_of_the_server_leaves_nothing_of_a_table_that_was_being_built(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(2, 12, NUM_DOCUMENTS)
    path = write_megatron_lengths(tmp_path / "many", lengths, eot=9)
    with RunningServer({"many": f"{path},eot=9"}, tmp_path) as server:
        plan = json.dumps({**one_source("many", 21, 4), "rows": {"documents": {}}}).encode()
        with RawConnection(server) as connection:
            connection.send(post("/v1/plans", plan))
            wait_until(lambda: builders(server), "a builder")
            began = builders(server)
            server.stop()
        wait_until(lambda: not any(each.is_running() for each in began), "the end of the builder")
        # It may have been finished in the time that the server has to end.
        assert not [each for each in (server.state_dir / "tables").iterdir() if each.name.startswith(".")]


def test_the_bound_of_a_response_holds_for_json_of_every_kind(tmp_path: Path) -> None:
    """A difference of two plans once had 39 MB where 1 MB was allowed."""
    path = write_megatron_lengths(tmp_path / "web", np.full(400, 10), eot=9)
    bound = 1800
    arguments = ["--max-response-bytes", str(bound)]
    with RunningServer({"web": f"{path},eot=9"}, tmp_path, arguments=arguments) as server:
        plans = []
        for seed in range(1, 5):
            document = one_source("web", 8, 32, seed=seed)
            document["skip_steps"] = [[5 * k + seed, 5 * k + seed + 1] for k in range(20)]
            plans.append(server.post_plan(document).json()["id"])
        one, other, *_ = plans
        span = {"start": 0, "stop": 2000}
        asked: dict[str, dict[str, object]] = {
            f"/v1/plans/{one}/diff": {"other": other, "steps": 100},
            "/v1/lookup": {"plan": one, **span},
            "/v1/corpora/web/spans": {"count": 2000},
            "/v1/corpora/web/statistics": {},
            f"/v1/plans/{one}/rows": {"step": 0, "count": 32},
            "/v1/corpora/web/tokens": {"count": 1000, "format": "json"},
            "/v1/plans": {},
        }
        for target, query in asked.items():
            problem = check_problem(server.get(target, **query), 422, "response-too-large")
            assert "--max-response-bytes" in problem["remedy"], target
        found = [
            server.get("/v1/lookup", plan=one, token=0),
            server.get(f"/v1/plans/{one}"),
            server.get("/v1/corpora"),
            server.get("/v1/corpora/web"),
            server.get("/v1/corpora/web/tokens", count=100, format="json"),
        ]
        assert {each.status for each in found} == {200}
        assert max(len(each.body) for each in found) <= bound
