"""The last hour over HTTP: the same from every worker, and as a stream of events that ends as it should."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corpus_server.admission.load import MAX_FOLLOWERS
from tests.corpora import some_tokens, write_raw
from tests.reference import one_source
from tests.serving import RunningServer, ask, check_problem, wait_until
from tests.tokens import Tokens

SECONDS = 60.0
PLAN = one_source("web", 16, 12, seed=99)


@contextlib.contextmanager
def followed(
    server: RunningServer, headers: dict[str, str] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """Follow the last hour over a connection of its own."""
    with contextlib.closing(server.connect(timeout=SECONDS)) as connection:
        connection.request("GET", "/v1/live?follow=true", headers=headers or {})
        yield connection.getresponse()


def event(response: http.client.HTTPResponse) -> Any:
    """Return the next event."""
    line = response.readline()
    assert line.startswith(b"data: ")
    assert response.readline() == b"\n"
    return json.loads(line.removeprefix(b"data: "))


def ranks_of(response: Any, plan: str) -> list[tuple[int, int, int]]:
    """Return world size, rank and last step of a plan's ranks."""
    return [
        (rank["world_size"], rank["rank"], rank["step"])
        for each in response["plans"]
        if each["plan"] == plan
        for rank in each["ranks"]
    ]


def test_every_worker_shows_the_ranks_of_all_and_a_follower_what_is_new(server: RunningServer) -> None:
    plan = server.post_plan(PLAN).json()["id"]
    expected = [(1, 0, 9), *((4, rank, 8) for rank in range(4))]
    with followed(server) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        before = event(response)
        for rank in range(4):
            for step in (6, 7):
                query = {"plan": plan, "step": step, "count": 2, "rank": rank, "world_size": 4}
                assert server.get("/v1/batches", **query).status == 200
        with contextlib.closing(server.connect()) as connection:  # one worker answers both
            assert ask(connection, f"/v1/indices?plan={plan}&step=9&format=raw").status == 200
            # A HEAD takes no step, and people who read JSON are no rank.
            assert ask(connection, f"/v1/batches?plan={plan}&step=50", method="HEAD").status == 200
            assert ask(connection, f"/v1/batches?plan={plan}&step=51&format=json").status == 200
            assert ask(connection, f"/v1/indices?plan={plan}&step=52").status == 200
        server.get("/v1/batches", plan=plan, stepp=1)
        deadline = time.monotonic() + SECONDS
        while True:
            newest = event(response)
            assert newest.keys() == before.keys()
            times = [before["unix_seconds"], *newest["samples"]["unix_seconds"]]  # mostly one more sample
            assert times == sorted(set(times))
            assert newest["unix_seconds"] == times[-1] > before["unix_seconds"]
            before = newest
            if ranks_of(newest, plan) == expected:
                break
            assert time.monotonic() < deadline, ranks_of(newest, plan)
        server.wait_until_idle()  # a follower is no request under way
    # Over connections of their own, so that both workers are asked; samples may be taken in between.
    responses = [server.get("/v1/live") for _ in range(8)]
    assert len({each.body for each in responses}) == len({each.json()["unix_seconds"] for each in responses})
    response = responses[-1].json()
    assert responses[-1].headers["Cache-Control"] == "no-store"
    assert ranks_of(response, plan) == expected
    assert response["num_workers"] == 2
    assert response["refusals"]["invalid-parameter"] >= 1


def test_a_request_that_is_read_after_the_end_of_its_loader_does_not_undo_it(server: RunningServer) -> None:
    """A worker that got no processor reads it late. The failure was: the run was shown as silent."""
    plan = server.post_plan(PLAN).json()["id"]

    def ask_for(step: int, method: str = "GET", trained: int | None = None) -> None:
        headers = {"Corpus-Run": "late"} | ({} if trained is None else {"Corpus-Trained-Step": str(trained)})
        assert server.get("/v1/batches", plan=plan, step=step, method=method, headers=headers).status == 200

    def rank() -> Any:
        shown = [each["ranks"] for each in server.get("/v1/live").json()["plans"] if each["run"] == "late"]
        return shown[0][0] if shown else {"step": -1}

    ask_for(5)
    ask_for(3, "HEAD", trained=3)
    for step in range(6, 14):  # of both workers
        ask_for(step, trained=2)
    wait_until(lambda: rank()["step"] == 13, rank)
    assert (rank()["has_ended"], rank()["trained_step"]) == (True, 3)
    ask_for(0)  # another loader, which goes on from a checkpoint
    ask_for(1, trained=0)
    wait_until(lambda: not rank()["has_ended"], rank)


def test_a_head_of_the_stream_ends(server: RunningServer) -> None:
    response = server.get("/v1/live", method="HEAD", follow="true")
    assert (response.status, response.headers["Content-Type"]) == (200, "text/event-stream")
    check_problem(server.get("/v1/live", follow="yes"), 422, "invalid-parameter", parameter="follow")


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    tokens = Tokens(tmp_path / "tokens.toml")
    tokens.add("watcher", "metrics")
    tokens.add("leaver", "metrics")
    return tokens


def test_streams_end_with_their_token_and_with_the_server(tokens: Tokens, tmp_path: Path) -> None:
    """A drain waits for no follower, and cuts none."""
    web = write_raw(tmp_path / "web.bin", some_tokens(500))
    watcher, leaver = tokens.header("watcher"), tokens.header("leaver")
    with (
        RunningServer({"web": web}, tmp_path, arguments=["--tokens", str(tokens.path)]) as server,
        contextlib.ExitStack() as stack,
    ):
        left = stack.enter_context(followed(server, leaver))
        event(left)
        tokens.remove("leaver")
        while left.readline():  # to the end of the last chunk: a connection that is cut raises
            pass
        responses = [stack.enter_context(followed(server, watcher)) for _ in range(MAX_FOLLOWERS)]
        for response in responses:
            event(response)
        refused = server.get("/v1/live", follow="true", headers=watcher)
        check_problem(refused, 503, "overloaded")
        assert server.get("/v1/live", headers=watcher).status == 200
        assert server.stop() == 0
        for response in responses:
            while response.readline():
                pass
        # Who watches for long is no slow request; what a busy machine held up for a second is one.
        assert len(re.findall("route=/v1/live .*status=200", server.log())) < MAX_FOLLOWERS
