"""The responses that hold tokens or say where they lie: headers, bytes, refusals and what is counted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import call, patch

import numpy as np
import pytest
import xxhash

from corpus_server import metrics
from corpus_server.admission.admission import Admission
from corpus_server.admission.request import ANYONE, RequestHead
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import (
    ResponseTooLarge,
)
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.responses.question import FormatQuery
from corpus_server.responses.questions.ranges import token_range
from corpus_server.responses.response import Response
from corpus_server.responses.service import Service
from corpus_server.responses.tokens import BatchesQuery, batches, indices
from corpus_server.settings import Settings
from corpus_server.work import Budget, Later
from tests.corpora import some_tokens, write_raw
from tests.megatron import THREE, document, specs
from tests.server.http.making import body
from tests.stores import WebServer

TEXT = "The quick brown fox jumps over the lazy dog; " * 20
LENGTHS = {"text": (500, 400), "web": (300, 200)}
SEQ_LEN, ROWS = 9, 6
DOCUMENT: dict[str, Any] = {
    "seq_len": SEQ_LEN,
    "seed": 5,
    "stages": [{"from_step": 0, "global_batch_size": ROWS, "mixture": {"text": 1, "web": 3}}],
    "skip_steps": [[4, 6]],
}
GET = RequestHead("GET", b"/", {})


def corpora(folder: Path) -> dict[str, np.ndarray]:
    """Write two corpora of two shards each and return their tokens."""
    tokens = {
        "text": np.frombuffer(TEXT.encode()[:900], np.uint8),
        "web": some_tokens(500),
    }
    for name, (first, _) in LENGTHS.items():
        (folder / name).mkdir()
        for number, part in enumerate(np.split(tokens[name], [first])):
            write_raw(folder / name / f"{number}.bin", part, dtype=part.dtype.name)
    return tokens


class World:
    """A process with two corpora and a plan over both."""

    def __init__(self, service: Service, tokens: dict[str, np.ndarray]) -> None:
        self.service, self.tokens = service, tokens
        self.text, self.web = (service.catalog.corpus(name) for name in ("text", "web"))
        self.bound: BoundPlan = service.plans.keep_document(json.dumps(DOCUMENT).encode(), ANYONE, Budget())[
            0
        ]

    def rows(self, step: int, count: int = 1) -> np.ndarray:
        """Where the global batches of some steps lie: `(count, rows, 2)`, by the sampler."""
        return np.concatenate([self.bound.sampler.locate(each) for each in range(step, step + count)])

    def batch(self, step: int, count: int = 1) -> np.ndarray:
        """The tokens of these rows, cut from the arrays."""
        shards = [
            shard for name in ("text", "web") for shard in np.split(self.tokens[name], [LENGTHS[name][0]])
        ]
        found = [
            shards[shard][start : start + SEQ_LEN + 1]
            for shard, start in self.rows(step, count).reshape(-1, 2)
        ]
        return np.stack(found).astype("uint16").reshape(count, ROWS, SEQ_LEN + 1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("tokens")
    tokens = corpora(folder)
    specs = (
        CorpusSpec(name="text", path=folder / "text", dtype="uint8"),
        CorpusSpec(name="web", path=folder / "web"),
    )
    with Service.open(Settings(corpora=specs, state_dir=folder / "state")) as service:
        yield World(service, tokens)


def charged(max_response_bytes: int = 2**40) -> tuple[Budget, list[int]]:
    """Return a budget, and the bytes of the response that it claims."""
    found: list[int] = []
    return Budget(claim=found.append, max_response_bytes=max_response_bytes), found


def query(world: World, **given: Any) -> BatchesQuery:
    return BatchesQuery.model_validate({"plan": world.bound.plan.id, "step": "3", **given})


def counted(response: Response) -> dict[tuple[str, ...], float]:
    """Return what a response counts when it was sent: tokens by corpus, and by plan and run."""
    kinds = metrics.TOKENS, metrics.PLAN_TOKENS
    before = [kind.numbers() for kind in kinds]
    response.sent()
    return {
        labels: number - old.get(labels, [0])[0]
        for kind, old in zip(kinds, before, strict=True)
        for labels, (number,) in kind.numbers().items()
        if [number] != old.get(labels)
    }


def naming(world: World) -> RequestHead:
    """A request whose URL names the plan by its whole id, so that its response is immutable."""
    return RequestHead("GET", f"/?plan={world.bound.plan.id}".encode(), {})


RANK = {"count": "2", "rank": "1", "world_size": "2"}
IMMUTABLE = "public, max-age=31536000, immutable"


def test_a_batch_is_sent_with_all_that_is_said_of_it(world: World) -> None:
    """Over a step that is skipped: training step 4 is step 6 of the plan."""
    budget, charges = charged()
    with patch.object(world.service.readers, "note", wraps=world.service.readers.note) as note:
        response = batches(world.service, query(world, **RANK, step="4"), naming(world), budget)
    right = world.batch(4, 2)[:, 3:]
    content = body(response)
    assert content == right.tobytes()
    assert charges == [len(content)]
    part = {"rank": 1, "world_size": 2, "run": "", "trained_step": None}
    assert note.call_args == call(world.bound, range(4, 6), reads_tokens=True, **part)
    plan_id = world.bound.plan.id
    assert response.headers == {
        "ETag": f'"{plan_id}.batches.4.2.1.2.raw"',
        "Cache-Control": IMMUTABLE,
        "Vary": "Accept",
        "Corpus-Plan": plan_id,
        "Corpus-Plan-Step": "6",
        "Corpus-Shape": "2,3,10",
        "Corpus-Dtype": "uint16",
        "Content-Length": "120",
        "Content-Type": "application/octet-stream",
        "Corpus-Checksum": f"xxh3-64={xxhash.xxh3_64_hexdigest(content)}",
    }
    assert counted(response) == {("text",): 15, ("web",): 45, (plan_id, ""): 60}
    assert response.reader is not None
    assert (response.num_steps, response.reader.last_step) == (2, 5)


def test_a_row_of_documents_that_are_joined_is_text_with_all_its_places(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in Megatron's order."""
    whole = world.service
    spelled = {"corpus": "text", "seq_len": "9", "batch_size": "1", "step": "0", "format": "text"}
    asked = BatchesQuery.model_validate(spelled)
    joined = np.array([(1, 3, 4), (0, 7, 5), (-1, 9, 1)]), np.array([0, 3])
    monkeypatch.setattr("corpus_server.read.reading.WindowReading.pieces", lambda _: iter([joined]))
    first = body(batches(whole, asked, GET, Budget())).decode().splitlines()[0]
    places = "shard 1.bin, tokens [3, 7); shard 0.bin, tokens [7, 12)"
    assert first == f"=== step 0 row 0: corpus text, {places} ==="


@pytest.mark.parametrize("chosen", ["raw", "npy", "json"])
def test_indices_say_where_the_rows_lie(world: World, monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    monkeypatch.setattr("corpus_server.read.reading.MAX_LOCATED_ROWS", 2)  # rows located at once
    budget, charges = charged()
    response = indices(world.service, query(world, **RANK, step="4", format=chosen), naming(world), budget)
    right = world.rows(4, 2).reshape(2, ROWS, 2)[:, 3:]
    plan_id = world.bound.plan.id
    content = body(response)
    assert charges == [6 * 16]
    if chosen == "json":
        assert json.loads(content) == {
            "plan": plan_id,
            "step": 4,
            "count": 2,
            "plan_step": 6,
            "rank": 1,
            "world_size": 2,
            "shards": [
                {"corpus": name, "name": f"{number}.bin"} for name in ("text", "web") for number in (0, 1)
            ],
            "indices": right.tolist(),
        }
    else:
        assert content[-96:] == right.astype("<i8").tobytes()
        assert (len(content) == 96) == (chosen == "raw")
        assert response.headers["Corpus-Shape"] == "2,3,2"
        assert response.headers["Corpus-Dtype"] == "int64"
        assert response.headers["Corpus-Checksum"] == f"xxh3-64={xxhash.xxh3_64_hexdigest(content)}"
    assert {name: response.headers[name] for name in ("ETag", "Cache-Control", "Corpus-Plan-Step")} == {
        "ETag": f'"{plan_id}.indices.4.2.1.2.{chosen}"',
        "Cache-Control": IMMUTABLE,
        "Corpus-Plan-Step": "6",
    }
    assert counted(response) == {}
    if chosen == "json":
        assert response.reader is None  # it is for people
    else:
        assert response.reader is not None
        assert (response.num_steps, response.reader.last_step) == (2, 5)


@pytest.mark.parametrize("most_rows", [2, 4096])
@pytest.mark.parametrize("checksum", ["true", "tail", "false"])
@pytest.mark.parametrize("function", [batches, indices])
def test_the_sources_of_the_rows_follow_in_the_same_body(
    world: World, monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], checksum: str, most_rows: int
) -> None:
    """They begin at a multiple of 8 bytes: the 60 of the tokens are followed by four zeros."""
    monkeypatch.setattr("corpus_server.read.reading.MAX_LOCATED_ROWS", most_rows)
    budget, charges = charged()
    part = {"rank": "1", "world_size": "2", "format": "raw", "checksum": checksum}
    response = function(world.service, query(world, **part, **{"with": "sources"}), GET, budget)
    located = world.rows(3).reshape(1, ROWS, 2)[:, 3:]
    first = world.batch(3)[:, 3:].tobytes() if function is batches else located.astype("<i8").tobytes()
    content = first + bytes(-len(first) % 8) + (located[:, :, 0] >= 2).astype("<u2").tobytes()
    tail = xxhash.xxh3_64_digest(content) if checksum == "tail" else b""
    assert body(response) == content + tail
    assert charges == [len(content)]
    assert response.headers["Corpus-Arrays"] == "sources uint16 1,3"
    assert response.headers["Content-Length"] == str(len(content + tail))
    form = "raw+tail" if checksum == "tail" else "raw"
    assert response.headers["ETag"].endswith(f'.3.1.1.2.{form}+sources"')
    if checksum == "true":
        assert response.headers["Corpus-Checksum"] == f"xxh3-64={xxhash.xxh3_64_hexdigest(content)}"
    assert sum(counted(response).values()) == (60 if function is batches else 0)  # by corpus and by plan


@pytest.mark.parametrize("function", [batches, indices])
def test_the_sources_are_a_field_of_json(world: World, function: Callable[..., Any]) -> None:
    asked = {"format": "json", "count": "2"}
    plain, beside = (
        json.loads(body(function(world.service, query(world, **asked, **more), GET, Budget())))
        for more in ({}, {"with": "sources"})
    )
    shards = world.rows(3, 2).reshape(2, ROWS, 2)[:, :, 0]
    assert beside == {**plain, "sources": (shards >= 2).astype(int).tolist()}


def range_of(world: World, name: str, start: int, stop: int, budget: Budget, **given: str) -> Response:
    asked = FormatQuery.model_validate(given)
    return token_range(
        world.service,
        world.service.catalog.corpus(name),
        start,
        stop,
        asked,
        GET,
        budget,
        default="json",
        fields={"document": 7},
    )


def test_a_range_is_sent_with_all_that_is_said_of_it(world: World) -> None:
    budget, charges = charged()
    response = range_of(world, "web", 290, 310, budget, format="raw")
    content = world.tokens["web"][290:310].tobytes()
    assert (body(response), charges) == (content, [40])
    assert response.headers == {
        "ETag": f'"{world.web.fingerprint}.290.310.raw"',
        "Cache-Control": "public, no-cache",
        "Corpus-Range": "290-310",
        "Corpus-Shape": "20",
        "Corpus-Dtype": "uint16",
        "Content-Length": "40",
        "Content-Type": "application/octet-stream",
        "Corpus-Checksum": f"xxh3-64={xxhash.xxh3_64_hexdigest(content)}",
    }
    assert counted(response) == {("web",): 20}


def test_the_pieces_of_rows_are_counted_and_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many there are is known once the rows are located, here three at a time."""
    monkeypatch.setattr("corpus_server.read.reading.MAX_LOCATED_ROWS", 3)
    settings = Settings(corpora=tuple(specs(THREE, tmp_path)), state_dir=tmp_path / "state")
    with Service.open(settings) as service:
        bound = service.plans.keep_document(json.dumps(document(THREE, 8)).encode(), ANYONE, Budget())[0]

        def ask(chosen: str, **limits: int) -> tuple[bytes, list[int]]:
            limited = Admission(replace(settings, **limits), service.access)
            monkeypatch.setattr(service, "admission", limited)
            budget, charges = charged(limited.settings.max_response_bytes)
            asked = {"plan": bound.plan.id, "step": "4", "count": "2", "format": chosen}
            return body(indices(service, BatchesQuery.model_validate(asked), GET, budget)), charges

        pieces, borders = bound.sampler.pieces(4, range(8), count=2)
        rows = np.repeat(np.arange(16), np.diff(borders))
        right = np.column_stack((rows, pieces)).astype("<i8")
        assert len(right) > 16
        assert ask("raw", max_response_bytes=right.nbytes) == (right.tobytes(), [right.nbytes])
        content, charges = ask("json", max_text_tokens=right.size)
        assert (json.loads(content)["indices"], charges) == (right.tolist(), [right.nbytes])
        for least in (right.nbytes, 16 * 32):
            with pytest.raises(ResponseTooLarge):
                ask("raw", max_response_bytes=least - 1)
        for least in (right.size, 16 * 4):
            with pytest.raises(ResponseTooLarge):
                ask("json", max_text_tokens=least - 1)


NUM_STAGED = 3000


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Service, WebServer, np.ndarray]]:
    """A process whose corpus lies on another machine."""
    tokens = some_tokens(NUM_STAGED)
    with WebServer({"/far.bin": tokens.tobytes()}) as store:
        specs = (CorpusSpec.parse(f"far={store.url}/far.bin"),)
        settings = Settings(
            corpora=specs, state_dir=tmp_path / "state", cache_dir=tmp_path / "cache", cache_bytes=10**6
        )
        with Service.open(settings) as service:
            yield service, store, tokens


def waited(ask: Callable[[Budget], Response]) -> tuple[Response, int]:
    """Ask as a gather thread does: again whenever what it waits for is done; return how often that was."""
    budget, waits = Budget(blocks=False), 0
    while True:
        try:
            return ask(budget), waits
        except Later as later:
            later.future.result(60)
            waits += 1


def test_rows_of_a_corpus_elsewhere_wait_for_their_shards(
    far: tuple[Service, WebServer, np.ndarray],
) -> None:
    service, _, tokens = far
    spelled = {"corpus": "far", "seq_len": "9", "batch_size": "4", "step": "2", "order": "sequential"}
    asked = BatchesQuery.model_validate({**spelled, "count": "2", "rank": "1", "world_size": "2"})
    response, waits = waited(lambda budget: batches(service, asked, GET, budget))
    assert waits == 1
    starts = [(4 * step + row) * 9 for step in (2, 3) for row in (2, 3)]
    assert body(response) == b"".join(tokens[start : start + 10].tobytes() for start in starts)
    _, waits = waited(lambda budget: batches(service, asked, GET, budget))
    assert waits == 0


def test_a_range_of_a_corpus_elsewhere_waits_for_its_shard(
    far: tuple[Service, WebServer, np.ndarray],
) -> None:
    service, _, tokens = far
    corpus = service.catalog.corpus("far")
    response, waits = waited(
        lambda budget: token_range(
            service, corpus, 2000, NUM_STAGED, FormatQuery(), GET, budget, default="raw", fields={}
        )
    )
    assert (waits, body(response)) == (1, tokens[2000:].tobytes())
