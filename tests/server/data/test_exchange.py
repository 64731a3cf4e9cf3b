"""A request and its response, without a whole server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from fastapi.testclient import TestClient
from uvicorn.server import ServerState

from corpus_server.access import ANYONE
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.data.door import Door
from corpus_server.data.gate import MAX_BYTES, SMALL_BYTES
from corpus_server.data.requests import Requests
from corpus_server.data.service import Service
from corpus_server.metrics import STAGES
from corpus_server.settings import Settings
from corpus_server.web.app import create_app
from tests.corpora import some_tokens, write_raw


async def ask(service: Service, rows: Sequence[int]) -> list[tuple[int, bytes]]:
    """Return status and body of responses on one connection, each of so many rows."""
    state, loop, answers = ServerState(), asyncio.get_running_loop(), []
    before = set(service.gate.slots)
    server = await loop.create_server(lambda: Door(service, state, asyncio.Protocol), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    for each in rows:
        target = f"/v1/batches?corpus=web&seq_len=1023&batch_size={each}&step=0"
        writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        (length,) = (line.split()[1] for line in head.splitlines() if line.startswith("content-length"))
        answers.append((int(head.split()[1]), await reader.readexactly(int(length))))
    writer.close()
    server.close()
    while service.gate.slots != before:  # a thread has sent the last byte before the loop gives the slot back
        await asyncio.sleep(0.001)
    return answers


def test_a_large_answer_is_refused_while_all_bytes_are_taken(tmp_path: Path) -> None:
    """Before anything of it is read. Its connection goes on, and a small one is not refused for its bytes."""
    path = write_raw(tmp_path / "web.bin", some_tokens(200_000))
    settings = Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state")
    most = SMALL_BYTES // 2048
    with Service.open(settings) as service:
        others = service.gate.admit(ANYONE)
        others.charge(MAX_BYTES)
        (refused, problem), (status, body) = asyncio.run(ask(service, (most + 1, most)))
        assert (service.gate.num_bytes, service.gate.slots) == (MAX_BYTES, {others})
        others.release()
        assert [each[0] for each in asyncio.run(ask(service, (most + 1,)))] == [200]
        assert service.gate.num_bytes == 0
    assert (refused, json.loads(problem)["type"]) == (503, "overloaded")
    assert (status, len(body)) == (200, SMALL_BYTES)


def test_the_stages_of_a_response_are_measured(tmp_path: Path) -> None:
    """A thread took the request from a queue: the wait, reading and sending are all within its seconds."""
    path = write_raw(tmp_path / "web.bin", some_tokens(200_000))
    settings = Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state")
    with Service.open(settings) as service, patch.object(Requests, "done") as done:
        assert asyncio.run(ask(service, (8,)))[0][0] == 200
    (answered,) = done.call_args.args
    assert len(answered.stages) == len(STAGES)
    assert all(seconds > 0 for seconds in answered.stages)
    assert sum(answered.stages) <= answered.seconds


def test_the_application_counts_bytes_as_the_door_does(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "web.bin", some_tokens(200_000))
    app = create_app(Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state"))
    query = {"corpus": "web", "seq_len": 1023, "batch_size": SMALL_BYTES // 2048 + 1, "step": 0}
    with TestClient(app) as client:
        gate = app.app.state.service.gate
        others = gate.admit(ANYONE)
        others.charge(MAX_BYTES)
        for route in ("/v1/batches", "/v1/corpora/web/tokens"):
            asked = (
                query
                if route.endswith("batches")
                else {"start": 0, "count": SMALL_BYTES // 2 + 1, "format": "npy"}
            )
            assert client.get(route, params=asked).json()["type"] == "overloaded"
        assert client.get("/v1/batches", params={**query, "batch_size": 8}).status_code == 200
        assert gate.num_bytes == MAX_BYTES
