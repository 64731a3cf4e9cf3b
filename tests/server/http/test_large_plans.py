"""Nothing that one request asks for keeps the other requests of its process waiting."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.corpora import some_tokens, write_raw
from tests.raw_http import RawConnection, get
from tests.serving import RunningServer, check_problem

LONGEST_SECONDS = 0.5
"""Of a small request. In the server's own process, parsing the document takes 0.85 s on a free core."""

ATTEMPTS = 12
"""A loaded machine may keep a small request waiting, too, but not each time."""


@pytest.fixture(scope="module")
def large() -> bytes:
    """A plan of 13 MB."""
    ranges = [[1_000_000 + 2 * k, 1_000_001 + 2 * k] for k in range(700_000)]
    stage = {"global_batch_size": 8, "mixture": {"a": 1.0}, "exclude": {"a": ranges}}
    return json.dumps({"seq_len": 16, "stages": [stage]}).encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("large")
    corpus = write_raw(folder / "a.bin", some_tokens(2_500_000))
    with RunningServer({"a": corpus}, folder) as running:
        yield running


def longest_beside(server: RunningServer, work: Callable[[], object]) -> float:
    """Return the seconds of the slowest small request while some work is done."""
    found, done = [0.0], threading.Event()

    def ask() -> None:
        with RawConnection(server) as connection:
            for step in range(1_000_000):
                began = time.monotonic()
                connection.send(get("/v1/batches", corpus="a", seq_len=16, batch_size=8, step=step))
                assert connection.read().status == 200
                found.append(time.monotonic() - began)
                if done.wait(0.005):
                    break

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        work()
    finally:
        done.set()
        asking.join()
    return max(found)


def test_a_large_plan_keeps_nobody_waiting(server: RunningServer, large: bytes) -> None:
    """Posted, refused, and read from the store by a process that does not know it; catalogue row 31."""

    def post() -> None:
        response = server.get("/v1/plans", method="POST", body=large)
        assert response.status == 200, response.body[:300]
        ids.append(response.json()["id"])

    def refuse() -> None:
        response = server.get("/v1/plans", method="POST", body=wrong)
        check_problem(response, 422, "invalid-plan", parameter="stages[0].exclude.a")

    def read() -> None:
        assert server.get("/v1/batches", plan=ids[0], step=0).status == 200

    def list_them() -> None:
        assert server.get("/v1/plans").json()["plans"][0]["id"] == ids[0]

    wrong = large.replace(b"]]}", b"], [7, 7]]}")
    ids: list[str] = []
    for work in (post, refuse, list_them, read):
        found = []
        for _ in range(ATTEMPTS):
            if work is read:
                server.restart()
            found.append(longest_beside(server, work))
            if found[-1] < LONGEST_SECONDS:
                break
        assert min(found) < LONGEST_SECONDS, (work.__name__, found)


def test_a_large_plan_is_the_same_plan(server: RunningServer, large: bytes) -> None:
    """Parsed elsewhere, it has the same id and the same document; no process is left behind."""
    posted = server.get("/v1/plans", method="POST", body=large).json()
    small = server.get("/v1/plans", method="POST", body=json.dumps({**posted["plan"], "seed": 1}).encode())
    assert posted["plan"]["stages"][0]["exclude"] == json.loads(large)["stages"][0]["exclude"]
    again = server.get(
        "/v1/plans", method="POST", body=json.dumps({**small.json()["plan"], "seed": 0}).encode()
    )
    assert again.json() == posted
