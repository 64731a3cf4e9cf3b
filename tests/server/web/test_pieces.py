"""Responses that are whole in memory are sent in pieces, between which other connections have their turn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
from starlette.types import ASGIApp

from corpus_server.corpus_spec import CorpusSpec
from corpus_server.settings import Settings
from corpus_server.web.app import create_app
from corpus_server.web.responses import PIECE_BYTES
from tests.corpora import write_raw
from tests.reference import one_source


async def answered(app: ASGIApp, method: str, path: str, body: bytes) -> list[MutableMapping[str, Any]]:
    """Return the messages of a response."""
    messages = list[MutableMapping[str, Any]]()
    bodies = [body]

    async def receive() -> MutableMapping[str, Any]:
        if not bodies:
            await asyncio.Event().wait()  # the client stays
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        messages.append(message)

    about = {"http_version": "1.1", "method": method, "scheme": "http", "path": path, "query_string": b""}
    await app(
        {"type": "http", "asgi": {"version": "3.0"}, **about, "headers": [(b"host", b"web")]}, receive, send
    )
    return messages


def test_a_large_description_is_sent_in_pieces(tmp_path: Path) -> None:
    """At once, the event loop joins and writes several megabytes, and all connections wait for it."""
    web = CorpusSpec(name="web", path=write_raw(tmp_path / "web.bin", np.arange(1_010_000) % 50_000))
    document = one_source("web", 16, 4)
    document["stages"][0]["exclude"] = {"web": [[50 * k, 50 * k + 1] for k in range(20_000)]}

    async def run() -> list[MutableMapping[str, Any]]:
        gateway = create_app(Settings(corpora=(web,), state_dir=tmp_path / "state"))
        async with gateway.app.router.lifespan_context(gateway.app):
            await answered(gateway, "POST", "/v1/plans", json.dumps(document).encode())
            return await answered(gateway, "GET", "/v1/plans", b"")

    start, *parts = asyncio.run(run())
    sizes = [len(part["body"]) for part in parts]
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-length"] == str(sum(sizes)).encode()
    assert sum(sizes) > PIECE_BYTES >= max(sizes)
    assert len(json.loads(b"".join(part["body"] for part in parts))["plans"]) == 1
