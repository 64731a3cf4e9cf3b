"""Requests of the fuzzer, each with what a right response to it is."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import xxhash

from tests.raw_http import Ended, RawResponse, check_bytes, check_raw_problem, get
from tests.server.responses.world import CHANGED, INTACT, Source


@dataclass(frozen=True)
class Part:
    """What a request asks for: steps and a rank of a source."""

    source: Source
    step: int
    count: int = 1
    rank: int = 0
    world_size: int = 1

    @property
    def _index(self) -> tuple[slice, slice]:
        rows = self.source.rows // self.world_size
        return slice(self.step, self.step + self.count), slice(self.rank * rows, (self.rank + 1) * rows)

    @property
    def tokens(self) -> np.ndarray:
        """The right tokens."""
        return self.source.tokens[self._index]

    @property
    def located(self) -> np.ndarray:
        """The right shards and starts."""
        return self.source.located[self._index]

    @property
    def reads_last_shard(self) -> bool:
        """Whether a row lies in the shard that may change."""
        return bool((self.located[..., 0] == len(self.source.paths) - 1).any())

    def query(self) -> dict[str, object]:
        """Return the parameters."""
        found: dict[str, object] = {"plan": self.source.plan_id, "step": self.step, "count": self.count}
        if self.world_size > 1:
            found |= {"rank": self.rank, "world_size": self.world_size}
        return found

    def tag(self, what: str, form: str) -> str:
        """Return the right ETag."""
        return f'"{self.source.plan_id}.{what}.{self.step}.{self.count}.{self.rank}.{self.world_size}.{form}"'


@dataclass(frozen=True)
class Request:
    """One request and what a right response to it is.

    Args:
        data: its bytes.
        check: raises AssertionError unless a response of status 200 or 304 is right.
        part: what it reads from files; None: nothing.
        body: the right body, of which a response that was cut must be a prefix.
        refused: (status, slug) of the only right response, if that is an error.
        admitted: whether it may be refused above the limit, be it good or bad.
        bodiless: whether the response has no body whatever its Content-Length says.
        has_unread_body: whether the request has a body that nobody reads: if all of it has not come when the
            response begins, that is the last one.
    """

    data: bytes
    check: Callable[[RawResponse], None] = lambda response: None
    part: Part | None = None
    body: Callable[[], bytes] = bytes
    refused: tuple[int, str] | None = None
    admitted: bool = False
    bodiless: bool = False
    has_unread_body: bool = False

    def verify(self, response: RawResponse, phase_before: int) -> str:
        """Check a response; return what it was, to be counted.

        Args:
            phase_before: of the source, when nothing of the request had been sent.
        """
        if response.status == 503:
            if self.bodiless:
                return "overloaded"
            slug = str(check_raw_problem(response, 503)["type"])
            if slug == "overloaded":
                assert self.admitted, "overloaded, but it needs no place"
                assert int(response.headers["retry-after"]) >= 1
                return slug
            assert self.refused is None, f"{slug}, but nothing is read for it"
            assert slug == "corpus-changed", response.body
            assert self.part is not None, "corpus-changed, but nothing is read for it"
            assert self.part.source.phase != INTACT, "corpus-changed, but nothing changed"
            assert self.part.reads_last_shard, "corpus-changed, but another shard did"
            return slug
        if self.refused is not None:
            check_raw_problem(response, *self.refused)
            return self.refused[1]
        assert response.status in (200, 304), (response.status, response.body[:300])
        if self.part is not None and phase_before == CHANGED:
            how = self.part.source.change
            assert not self.part.reads_last_shard, f"answered from a shard that has changed ({how})"
        self.check(response)
        return str(response.status)

    def verify_cut(self, ended: Ended) -> None:
        """Check a response that the server cut: only a file that changed meanwhile is a reason."""
        assert self.part is not None, f"cut without a reason: {ended}"
        assert self.part.source.phase != INTACT, f"cut without a reason: {ended}"
        assert self.part.reads_last_shard, f"cut without a reason: {ended}"
        check_bytes(ended.body, self.body()[: len(ended.body)])


def raw(part: Part, checksum: str, *lines: str, **more: object) -> Request:
    """Ask for raw tokens."""
    query = {**part.query(), "format": "raw", "checksum": checksum, **more}
    form = "raw+tail" if checksum == "tail" else "raw"

    def body() -> bytes:
        array = part.tokens.tobytes()
        return array + xxhash.xxh3_64_digest(array) if checksum == "tail" else array

    def check(response: RawResponse) -> None:
        assert response.headers["etag"] == part.tag("batches", form)
        _check_array(response, part.tokens, part, body())
        value = {"tail": "xxh3-64=tail", "false": None}.get(checksum, _digest(response.body))
        assert response.headers.get("corpus-checksum") == value

    return Request(get("/v1/batches", *lines, **query), check, part, body, admitted=True)


def npy(part: Part, what: str) -> Request:
    """Ask for tokens or indices as an NPY file."""
    array = part.tokens if what == "batches" else part.located

    def body() -> bytes:
        file = io.BytesIO()
        np.save(file, array)
        return file.getvalue()

    def check(response: RawResponse) -> None:
        assert response.headers["etag"] == part.tag(what, "npy")
        _check_array(response, array, part, body())
        assert response.headers["corpus-checksum"] == _digest(response.body)

    data = get(f"/v1/{what}", **part.query(), format="npy")
    return Request(data, check, part if what == "batches" else None, body, admitted=True)


def indices(part: Part, checksum: str) -> Request:
    """Ask for raw indices."""

    def check(response: RawResponse) -> None:
        array = part.located.tobytes()
        tail = xxhash.xxh3_64_digest(array) if checksum == "tail" else b""
        assert response.headers["etag"] == part.tag("indices", "raw+tail" if tail else "raw")
        _check_array(response, part.located, part, array + tail)

    data = get("/v1/indices", **part.query(), format="raw", checksum=checksum)
    return Request(data, check, admitted=True)


def as_json(part: Part, what: str) -> Request:
    """Ask for tokens or indices as JSON."""
    name, array = ("tokens", part.tokens) if what == "batches" else ("indices", part.located)

    def check(response: RawResponse) -> None:
        assert response.headers["etag"] == part.tag(what, "json")
        found = response.json()
        assert (found["plan"], found["step"]) == (part.source.plan_id, part.step)
        assert found[name] == array.tolist()

    data = get(f"/v1/{what}", **part.query(), format="json")
    return Request(data, check, part if what == "batches" else None, admitted=True)


def as_text(part: Part) -> Request:
    """Ask for tokens as text."""

    def check(response: RawResponse) -> None:
        lines = []
        for k, (rows, places) in enumerate(zip(part.tokens, part.located.tolist(), strict=True)):
            for row, (tokens, (shard, start)) in enumerate(zip(rows, places, strict=True)):
                corpus, name = part.source.shards[shard]
                lines.append(
                    f"=== step {part.step + k} row {part.rank * len(rows) + row}: corpus {corpus}, "
                    f"shard {name}, tokens [{start}, {start + len(tokens)}) ==="
                )
                lines.append(tokens.astype("uint8").tobytes().decode("ascii"))
        assert response.body.decode() == "\n".join(lines) + "\n"

    return Request(get("/v1/batches", **part.query(), format="text"), check, part, admitted=True)


def conditional(part: Part, other: Part) -> Request:
    """Ask with the tag of some part, which may be the one that is asked for."""
    unconditional = raw(part, "tail")
    tag = other.tag("batches", "raw+tail")

    def check(response: RawResponse) -> None:
        if other == part:
            assert (response.status, response.headers["etag"]) == (304, tag)
        else:
            unconditional.check(response)

    data = unconditional.data[:-2] + f"If-None-Match: {tag}\r\n\r\n".encode()
    if other == part:
        return Request(data, check, admitted=True)
    return Request(data, check, part, unconditional.body, admitted=True)


def head(part: Part) -> Request:
    """Ask for the headers alone."""

    def check(response: RawResponse) -> None:
        assert (response.status, int(response.headers["content-length"])) == (200, part.tokens.nbytes)
        assert response.headers["etag"] == part.tag("batches", "raw")

    data = get("/v1/batches", method="HEAD", **part.query(), format="raw")
    return Request(data, check, admitted=True, bodiless=True)


def inline(part: Part) -> Request:
    """Spell the plan in the request."""
    plan = part.source.plan
    spelled = {
        "corpus": part.source.name,
        "seq_len": plan["seq_len"],
        "batch_size": part.source.rows,
        "seed": plan["seed"],
        "order": plan["order"],
        "step": part.step,
        "count": part.count,
    }

    def check(response: RawResponse) -> None:
        assert response.headers["etag"] == part.tag("batches", "raw")
        _check_array(response, part.tokens, part, part.tokens.tobytes())

    return Request(get("/v1/batches", **spelled), check, part, part.tokens.tobytes, admitted=True)


def _check_array(response: RawResponse, array: np.ndarray, part: Part, right: bytes) -> None:
    assert response.headers["corpus-shape"] == ",".join(map(str, array.shape))
    assert response.headers["corpus-dtype"] == array.dtype.name
    assert response.headers["corpus-plan"] == part.source.plan_id
    plan_step = part.source.sampler.timeline.plan_step(part.step)
    assert response.headers.get("corpus-plan-step", str(part.step)) == str(plan_step)
    check_bytes(response.body, right)


def _digest(body: bytes) -> str:
    return f"xxh3-64={xxhash.xxh3_64_hexdigest(body)}"
