"""Episodes of the fuzzer: one connection each, from its random requests to its random end."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter

from tests.raw_http import Ended, RawConnection, RawResponse, check_raw_problem, get, post
from tests.server.http.asking import (
    Part,
    Request,
    as_json,
    as_text,
    conditional,
    head,
    indices,
    inline,
    npy,
    raw,
)
from tests.server.responses.world import INTACT, STEPS, World

LARGE_COUNT = 60
"""Steps in one large response: 31 MB."""

MAX_RESPONSE_SECONDS = 60.0
"""A response that takes longer has been forgotten; generous, for a loaded machine."""

WAYS_OUT = ("read", "leave", "reset", "read", "close", "half", "read", "nonsense", "leave", "reset")
"""How episodes end, by turns: in any ten of them each way occurs, whatever chance and the scheduler do."""

NONSENSE = [b"NONSENSE\r\n\r\n", b"\0\1\2", b"GET /healthz HTTP/1.1\r\nNo colon\r\n\r\n"]


def random_part(world: World, draw: random.Random) -> Part:
    """Return a few steps of some small source."""
    of = draw.random()
    if of < 0.4:
        source = draw.choice(world.intact)
    elif of < 0.9:
        source = draw.choice(world.changed)
    else:
        source = draw.choice([world.text, *world.replaced])
    world_size = draw.choice([1, 1, 1, 2, 4])
    count = draw.choice([1, 1, 1, 2, 7])
    step = draw.randrange(STEPS - count)
    return Part(source, step, count, draw.randrange(world_size), world_size)


def token_request(world: World, draw: random.Random) -> Request:
    """Return a GET of /v1/batches or /v1/indices, good or bad."""
    part, kind = random_part(world, draw), draw.random()
    if kind < 0.5:
        lines = [f"X-Padding: {'x' * draw.randrange(3000)}"] if draw.random() < 0.05 else []
        return raw(part, draw.choice(["tail", "tail", "true", "false"]), *lines)
    if kind < 0.56:
        return indices(part, draw.choice(["true", "tail"]))
    if kind < 0.62:
        return npy(part, draw.choice(["batches", "indices"]))
    if kind < 0.68:
        return as_json(part, draw.choice(["batches", "indices"]))
    if kind < 0.70:
        return as_text(Part(world.text, draw.randrange(STEPS)))
    if kind < 0.78:
        other = draw.choice([part, dataclasses.replace(part, step=(part.step + 1) % 64)])
        return conditional(part, other)
    if kind < 0.82:
        return inline(Part(world.intact[0], draw.randrange(STEPS)))
    if kind < 0.84:
        return raw(Part(world.large, draw.randrange(60), draw.choice([1, 4])), "tail")
    return bad_request(part, draw)


def bad_request(part: Part, draw: random.Random) -> Request:
    """Return a request that must be refused whatever else happens."""
    query = {**part.query(), "format": "raw", "checksum": "tail"}
    invalid = (422, "invalid-parameter")
    changes: list[tuple[dict[str, object], tuple[int, str]]] = [
        ({"plan": "0" * 64}, (404, "unknown-plan")),
        ({"step": 2**41}, invalid),
        ({"step": -1}, invalid),
        ({"world_size": 7, "rank": 0}, invalid),
        ({"rank": 99}, invalid),
        ({"sttep": 1}, invalid),
        ({"checksum": "maybe"}, invalid),
        ({"corpus": "one"}, invalid),
        ({"count": 0}, invalid),
    ]
    more, refused = draw.choice(changes)
    return Request(get("/v1/batches", **{**query, **more}), refused=refused, admitted=True)


def other_request(world: World, draw: random.Random) -> Request:
    """Return a request that the application answers."""

    def alive(response: RawResponse) -> None:
        assert response.json() == {"status": "alive"}

    def described(response: RawResponse) -> None:
        assert response.json()["name"] == "one"

    def posted(response: RawResponse) -> None:
        assert response.json()["id"] == world.text.plan_id

    document = repr(world.text.plan).replace("'", '"').encode()
    chunked = get("/v1/plans", "Transfer-Encoding: chunked", method="POST")
    for at in range(0, len(document), 100):
        part = document[at : at + 100]
        chunked += b"%x\r\n%b\r\n" % (len(part), part)
    return draw.choice(
        [
            Request(get("/healthz"), alive),
            Request(get("/v1/corpora/one"), described),
            Request(post("/v1/plans", document), posted, admitted=True),
            Request(chunked + b"0\r\n\r\n", posted, admitted=True),
            Request(post("/v1/plans", b"{}"), refused=(422, "invalid-plan"), admitted=True),
            Request(get("/nowhere"), refused=(404, "not-found")),
            Request(get("/v1/batches", method="DELETE"), refused=(405, "method-not-allowed")),
            head(random_part(world, draw)),
            with_body(raw(random_part(world, draw), "tail"), draw),
        ]
    )


def with_body(request: Request, draw: random.Random) -> Request:
    """Return a request whose body, of either framing, nobody reads."""
    content = b"GET /healthz HTTP/1.1\r\n\r\n" * draw.randint(1, 20)
    chunked = draw.random() < 0.5
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content) if chunked else content
    line = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(content)
    data = request.data[:-2] + line + b"\r\n\r\n" + body
    return dataclasses.replace(request, data=data, has_unread_body=True)


def random_requests(world: World, draw: random.Random) -> list[Request]:
    """Return the requests of an episode."""
    kind = draw.random()
    if kind < 0.55:  # as a training loop asks: step after step of one plan
        part, checksum = random_part(world, draw), draw.choice(["tail", "tail", "false"])
        last = STEPS - part.count
        steps = [(part.step + k * part.count) % last for k in range(draw.randint(20, 150))]
        return [raw(dataclasses.replace(part, step=step), checksum) for step in steps]
    requests = [token_request(world, draw) for _ in range(draw.randint(1, 40))]
    if kind < 0.60:
        large = Part(world.large, draw.randrange(60), draw.choice([20, LARGE_COUNT]))
        requests.insert(draw.randrange(len(requests) + 1), raw(large, draw.choice(["tail", "false", "true"])))
    elif kind < 0.80:
        for _ in range(draw.randint(1, 5)):
            requests.insert(draw.randrange(len(requests) + 1), other_request(world, draw))
    return requests


def random_pieces(data: bytes, draw: random.Random) -> list[int]:
    """Return the ends of the pieces in which data is sent."""
    way = draw.random()
    if way < 0.4:
        cuts: set[int] = set()
    elif way < 0.7:
        cuts = {draw.randrange(len(data)) for _ in range(draw.randint(1, 6))}
    elif way < 0.9:
        cuts = set(range(0, len(data), draw.choice([50, 200, 1000, 5000])))
    else:
        start = draw.randrange(len(data))
        cuts = set(range(start, min(start + 300, len(data))))
    return sorted({*cuts, len(data)} - {0})


class Episode:
    """One connection.

    Args:
        world: where it takes place.
        way_out: one of `WAYS_OUT`.
        draw: everything that chance decides.
    """

    def __init__(self, world: World, way_out: str, draw: random.Random) -> None:
        self._world = world
        self.way_out = way_out
        self._draw = draw
        self.requests = random_requests(world, draw)
        self.counts: Counter[str] = Counter()
        self.num_read = 0

    def run(self) -> None:
        """Talk to the server and check what it says.

        Raises:
            AssertionError, Ended, TimeoutError: it is wrong.
        """
        draw, rest = self._draw, b""
        if self.way_out == "close":
            last, line = self.requests[-1], b"HTTP/1.1\r\nConnection: close\r\n"
            if b"chunked" not in last.data and draw.random() < 0.5:  # HTTP/1.0 knows no chunks
                line = b"HTTP/1.0\r\n"
            self.requests[-1] = dataclasses.replace(last, data=last.data.replace(b"HTTP/1.1\r\n", line, 1))
        elif self.way_out == "half":
            rest = self.requests[0].data[: draw.randrange(1, len(self.requests[0].data))]
        elif self.way_out == "nonsense":
            rest = draw.choice(NONSENSE)
        is_slow = draw.random() < 0.1
        with RawConnection(
            self._world.server,
            timeout=MAX_RESPONSE_SECONDS,
            # With one of 4 KiB the kernel may send 2 kB every 200 ms: a large response would take an hour.
            receive_buffer=65536 if is_slow else None,
        ) as connection:
            stop = draw.randrange(len(self.requests) + 1) if self.way_out in ("leave", "reset") else None
            if self._talk(connection, rest, stop, is_slow):
                self._end(connection)

    def _talk(self, connection: RawConnection, rest: bytes, stop: int | None, is_slow: bool) -> bool:
        """Send pieces and read responses in turns of any length; return whether the server read on.

        Args:
            rest: to be sent behind the requests.
            stop: the request whose response is not read any more; None: read all.
            is_slow: whether to read in sips.
        """
        draw, sent, data = self._draw, 0, b"".join(each.data for each in self.requests) + rest
        pieces = random_pieces(data, draw)
        eager = draw.choice([0.0, 0.5, 0.95])
        ends = list(itertools.accumulate(len(each.data) for each in self.requests))
        phases: list[int] = []
        # Small sips need no pause: with one, a large response would take seconds.
        pause, part = draw.choice([(0.0, 4096), (0.0005, 65536)]) if is_slow else (0.0, 2**18)
        for k, request in enumerate(self.requests):
            while pieces and (sent < ends[k] or draw.random() < eager):
                piece = pieces.pop(0)
                # A request that begins in this piece was not sent before now.
                while len(phases) < len(ends) and (ends[len(phases) - 1] if phases else 0) < piece:
                    asked = self.requests[len(phases)].part
                    phases.append(INTACT if asked is None else asked.source.phase)
                connection.send(data[sent:piece])
                sent = piece
            if k == stop:
                connection.await_some(draw.choice([1, 100, 100_000]))
                return True
            try:
                response = connection.read(bodiless=request.bodiless, pause_seconds=pause, part=part)
            except Ended as ended:
                # A client that the machine kept waiting looks like one that has stalled.
                if "its slot was needed" not in self._world.server.log():
                    request.verify_cut(ended)
                self.counts["cut"] += 1
                return False
            self.counts[request.verify(response, phases[k])] += 1
            self.num_read += 1
            if request.has_unread_body and response.headers.get("connection") == "close":
                assert connection.ended(), "nothing may follow the last response"
                self.counts["closed over a body"] += 1
                return False
        connection.send(data[sent:])
        return True

    def _end(self, connection: RawConnection) -> None:
        if self.way_out == "reset":
            connection.reset()
        elif self.way_out == "close":
            assert connection.ended(), "nothing may follow the last response"
        elif self.way_out == "nonsense":
            refusal = connection.read_or_end()
            if isinstance(refusal, RawResponse):
                check_raw_problem(refusal, 400)
                self.counts["nonsense refused"] += 1
            assert connection.ended(), "nothing may follow a refused request"
