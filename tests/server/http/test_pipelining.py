"""Several requests on one connection: every response is framed, in order, and holds its own bytes."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash

from corpus_server.plan import Plan, Sampler
from tests.corpora import some_tokens, write_raw
from tests.raw_http import RawConnection, RawResponse, check_bytes, check_raw_problem, get, post
from tests.reference import one_source
from tests.serving import RunningServer

SMALL = {"seq_len": 64, "batch_size": 8, "order": "shuffle"}
LARGE = {"seq_len": 4095, "batch_size": 64, "order": "sequential"}
LARGE_STEPS = 110
"""Steps in one large response: 57.7 MB, far more than a socket holds."""

TOKENS = {"small": 200_000, "other": 200_000, "large": 30_000_000}
MAX_RESPONSES = 2


@dataclass(frozen=True)
class Source:
    """A corpus, the plan over it, and the right bytes of its steps."""

    path: Path
    tokens: np.ndarray
    plan_id: str
    sampler: Sampler
    seq_len: int

    def batch(self, step: int, count: int = 1) -> bytes:
        """Return the array of a response, computed from the tokens that were written."""
        located = self.sampler.locate(step, count=count)
        window = np.arange(self.seq_len + 1)
        return self.tokens[located[..., 1, None] + window].astype("<u2").tobytes()

    def request(self, step: int, count: int = 1, *lines: str, **more: object) -> bytes:
        """Return a request as the client sends it: all the same but for the step."""
        query = {"plan": self.plan_id, "step": step, "count": count, "format": "raw", "checksum": "tail"}
        return get("/v1/batches", *lines, **{**query, **more})

    def check(self, response: RawResponse, step: int, count: int = 1) -> None:
        """Check that a response is the one to `request` of the same arguments."""
        assert response.status == 200, response.body[:300]
        assert response.headers["etag"] == f'"{self.plan_id}.batches.{step}.{count}.0.1.raw+tail"'
        right = self.batch(step, count)
        check_bytes(response.body, right + xxhash.xxh3_64_digest(right))


@dataclass(frozen=True)
class Running:
    """A server and what it serves."""

    server: RunningServer
    small: Source
    other: Source
    large: Source

    def learn(self, connection: RawConnection) -> None:
        """Ask for both plans, so that later requests of theirs are known."""
        for source in (self.small, self.other, self.large):
            for step in (0, 1, 2):
                connection.send(source.request(step))
                source.check(connection.read(), step)
        connection.send(self.large.request(0, LARGE_STEPS))
        self.large.check(connection.read(), 0, LARGE_STEPS)


Start = Callable[..., Running]


@pytest.fixture(scope="module")
def large_tokens() -> np.ndarray:
    return some_tokens(TOKENS["large"], seed=7)


@pytest.fixture
def start(tmp_path: Path, large_tokens: np.ndarray) -> Iterator[Start]:
    """Start servers over fresh files, which a test may change."""
    with ExitStack() as started:

        def make(**settings: object) -> Running:
            folder = tmp_path / f"server-{len(list(tmp_path.iterdir()))}"
            folder.mkdir()
            tokens = {name: some_tokens(TOKENS[name], seed=1) for name in ("small", "other")}
            tokens["large"] = large_tokens
            paths = {name: write_raw(folder / f"{name}.bin", own) for name, own in tokens.items()}
            lines = [f"{name} = {value}" for name, value in settings.items()]
            server = started.enter_context(
                RunningServer(paths, folder, config="\n".join(["[server]", *lines]) + "\n")
            )
            sources = {}
            for name, own in tokens.items():
                shape = LARGE if name == "large" else SMALL
                document = one_source(name, shape["seq_len"], shape["batch_size"], order=shape["order"])
                response = server.post_plan(document).json()
                sampler = Sampler(Plan.from_json(response["plan"]), {name: [len(own)]})
                sources[name] = Source(paths[name], own, response["id"], sampler, shape["seq_len"])
            return Running(server, **sources)

        yield make


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, large_tokens: np.ndarray) -> Iterator[Running]:
    """A server for tests that change nothing."""
    generator = start.__wrapped__(tmp_path_factory.mktemp("shared"), large_tokens)  # type: ignore[attr-defined]
    yield next(generator)()
    generator.close()


def rewrite(path: Path) -> None:
    """Write other tokens into a file in place; the modification time moves for certain."""
    with path.open("r+b") as file:
        file.write(bytes(4096))
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize(("first_step", "num_small"), [(3, 1), (500, 5)])
def test_a_failing_request_before_a_large_one_keeps_the_order(
    start: Start, first_step: int, num_small: int
) -> None:
    """The first shard changed: 503, then the large response whole, then the small ones behind it."""
    running = start()
    with RawConnection(running.server) as connection:
        running.learn(connection)
        rewrite(running.small.path)
        connection.send(running.small.request(first_step), running.large.request(5, LARGE_STEPS))
        check_raw_problem(connection.read(), 503, "corpus-changed")
        for step in range(num_small):  # while the large response is under way
            connection.send(running.other.request(3 + step))
        time.sleep(0.05)
        running.large.check(connection.read(), 5, LARGE_STEPS)
        for step in range(num_small):
            running.other.check(connection.read(), 3 + step)
        connection.send(running.small.request(0), running.other.request(9))
        check_raw_problem(connection.read(), 503, "corpus-changed")
        running.other.check(connection.read(), 9)


def test_requests_over_the_limit_keep_the_order(start: Start) -> None:
    """Whoever is refused gets a 503 in its turn, whatever is pipelined around it."""
    running = start(max_concurrent_responses=MAX_RESPONSES)
    statuses: Counter[int] = Counter()

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        with RawConnection(running.server) as connection:
            for _ in range(40):
                wanted = []
                for _ in range(draw.randint(1, 8)):
                    source = draw.choice([running.small, running.other, running.large])
                    count = draw.choice([1, 1, 4]) if source is running.large else 1
                    wanted.append((source, draw.choice([draw.randrange(300), len(wanted)]), count))
                cut = draw.randrange(len(wanted) + 1)
                connection.send(*(source.request(*more) for source, *more in wanted[:cut]))
                for k, (source, step, count) in enumerate(wanted):
                    if k == max(cut - 1, 0):  # while the last response of these is under way
                        connection.send(*(each.request(*more) for each, *more in wanted[cut:]))
                    response = connection.read()
                    statuses[response.status] += 1
                    if response.status == 503:
                        check_raw_problem(response, 503, "overloaded")
                        assert int(response.headers["retry-after"]) >= 1
                    else:
                        source.check(response, step, count)

    with RawConnection(running.server) as connection:
        running.learn(connection)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(6)))
    assert statuses[503], "no request met the limit"
    assert statuses[200], "every request met the limit"


@pytest.mark.parametrize("num_unsent", [0, 1, 3])
def test_a_request_handed_to_the_application_waits_its_turn(shared: Running, num_unsent: int) -> None:
    """Routes of the application between known requests, behind a large response."""
    with RawConnection(shared.server, receive_buffer=65536) as connection:
        shared.learn(connection)
        others = [
            get("/healthz"),
            get("/v1/corpora/small"),
            post("/v1/plans", b'{"no": "plan"}'),
            get("/v1/batches", plan="0" * 64, step=3),
        ]
        connection.send(
            *(shared.small.request(step) for step in range(num_unsent)),
            shared.large.request(2, LARGE_STEPS),
            shared.small.request(7),
            *others,
            shared.other.request(8),
        )
        for step in range(num_unsent):
            shared.small.check(connection.read(), step)
        shared.large.check(connection.read(), 2, LARGE_STEPS)
        shared.small.check(connection.read(), 7)
        assert connection.read().json() == {"status": "alive"}
        assert connection.read().json()["name"] == "small"
        check_raw_problem(connection.read(), 422, "invalid-plan")
        check_raw_problem(connection.read(), 404, "unknown-plan")
        shared.other.check(connection.read(), 8)


def test_nonsense_in_a_body_never_comes_into_a_response_of_the_application(shared: Running) -> None:
    """The response is under way before the request has ended: it is too late for a 400."""
    query = {"start": 0, "count": TOKENS["large"], "format": "raw"}
    with RawConnection(shared.server, receive_buffer=65536) as connection:
        connection.send(get("/v1/corpora/large/tokens", "Transfer-Encoding: chunked", **query))
        connection.await_some(1)
        connection.send(b"no size of a chunk\r\n")
        head, _, body = connection.read_to_end().partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert shared.large.tokens.tobytes().startswith(body)


def test_connection_close_is_honoured_and_said(shared: Running) -> None:
    with RawConnection(shared.server) as connection:
        connection.send(
            shared.small.request(3), shared.small.request(4, 1, "Connection: close"), shared.small.request(5)
        )
        shared.small.check(connection.read(), 3)
        last = connection.read()
        shared.small.check(last, 4)
        assert last.headers["connection"].lower() == "close"
        assert connection.ended(), "nothing may follow the last response"


def test_a_thousand_short_responses_in_a_row(start: Start) -> None:
    """Requests that are answered at once, sent together: no depth of calls may grow with their number."""
    running = start(max_concurrent_responses=1, send_timeout_seconds=60)
    small, count = running.small, 1000
    tag = f'If-None-Match: "{small.plan_id}.batches.3.1.0.1.raw+tail"'
    for request, statuses, is_full in (
        (small.request(3, 1, sttep=1), {422, 503}, False),
        (small.request(3, 1, tag), {304, 503}, False),
        (small.request(3, 1, plan="0" * 64), {404, 503}, False),
        (small.request(3), {200, 503}, True),
    ):
        with ExitStack() as opened:
            if is_full:
                stalled = opened.enter_context(RawConnection(running.server, receive_buffer=4096))
                stalled.send(running.large.request(0, LARGE_STEPS))
                stalled.await_some(1)
            connection = opened.enter_context(RawConnection(running.server))
            connection.send(request * count)
            assert {connection.read().status for _ in range(count)} <= statuses
    assert "unexpected=" not in running.server.log()
