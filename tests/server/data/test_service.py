"""The threads of a process and its event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from uvicorn.server import ServerState

from corpus_server.access import ANYONE
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.data import service as module
from corpus_server.data.door import Door
from corpus_server.data.service import Service
from corpus_server.settings import Settings
from tests.corpora import some_tokens, write_raw

LONG = 30.0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = write_raw(tmp_path / "web.bin", some_tokens(1000))
    settings = Settings(
        corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state", max_concurrent_answers=1
    )
    with Service.open(settings) as service:
        yield service


def begin_work(service: Service) -> tuple[threading.Thread, threading.Event]:
    """Start a thread that works for the service; the event says that it has begun."""
    begun = threading.Event()

    def work() -> None:
        with service.working():
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    return thread, begun


def refuse(service: Service) -> None:
    """Have the door refuse a request; must be called in an event loop."""
    door = Door(service, ServerState(), asyncio.Protocol)
    transport = Mock(**{"get_extra_info.return_value": None})  # knows neither peer nor TLS
    with patch("corpus_server.data.door.widen"):
        door.connection_made(transport)
    door.data_received(b"GET /v1/batches?corpus=web HTTP/1.1\r\nHost: x\r\n\r\n")
    head, _ = transport.writelines.call_args[0][0]
    assert head.startswith(b"HTTP/1.1 503 "), head
    door.connection_lost(None)


def test_threads_begin_nothing_before_the_loop_has_refused_what_came(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REFUSING_SECONDS", LONG)

    async def refuse_two() -> None:
        service.gate.admit(ANYONE)
        refuse(service)
        refuse(service)
        thread, begun = begin_work(service)
        assert not begun.wait(0.1)  # blocks the loop, as a burst of refusals does
        await asyncio.sleep(0)
        assert begun.wait(LONG)
        thread.join()

    asyncio.run(refuse_two())


def test_threads_go_on_however_long_the_loop_refuses(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REFUSING_SECONDS", 0.01)

    async def refuse_for_long() -> None:
        service.refusing()
        began = time.monotonic()
        thread, begun = begin_work(service)
        assert begun.wait(LONG)
        assert time.monotonic() - began >= 0.01
        thread.join()

    asyncio.run(refuse_for_long())
