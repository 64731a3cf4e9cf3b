"""A disk that does not answer one reader holds up no other one that goes step by step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from uvicorn.server import ServerState

from corpus_server.access import ANYONE
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.data.ahead import following
from corpus_server.data.door import Door
from corpus_server.data.exchange import make_ahead
from corpus_server.data.service import Service
from corpus_server.settings import Settings
from tests.corpora import some_tokens, write_raw

LENGTH, ROWS = 33, 8
QUERY = f"corpus=web&seq_len={LENGTH - 1}&batch_size={ROWS}&order=sequential&checksum=false"
NUM_STEPS = 12


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = write_raw(tmp_path / "web.bin", some_tokens(100_000))
    settings = Settings(corpora=(CorpusSpec(name="web", path=path),), state_dir=tmp_path / "state")
    with Service.open(settings) as service:
        yield service


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, step: int) -> np.ndarray:
    writer.write(f"GET /v1/batches?{QUERY}&step={step} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    return np.frombuffer(await reader.readexactly(ROWS * LENGTH * 2), "<u2").reshape(ROWS, LENGTH)


@pytest.mark.parametrize("step", [3, 6], ids=["as the first counts", "as the last counts"])
def test_a_number_elsewhere_is_not_taken_for_the_step(service: Service, step: int) -> None:
    """A header that counts beside a step that stays: only the parsers say which number is the step."""
    target = f"/v1/batches?{QUERY}&%73tep={step}"
    text = f"GET {target} HTTP/1.1\r\nHost: x\r\nReferer: http://x/?step=2&a\r\n\r\n".encode()
    run = following(text, 4)
    assert b"?step=3&a" in run[0]
    assert make_ahead(service, run, ANYONE) == {}
    plain = f"GET /v1/batches?{QUERY}&step=2 HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    assert list(make_ahead(service, following(plain, 4), ANYONE)) == following(plain, 4)


async def ask_while_held_up(service: Service, release: threading.Event) -> list[np.ndarray]:
    """Ask for steps in a row while the thread that makes responses ahead is held up by somebody else."""
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Door(service, state, asyncio.Protocol), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())

    def hang() -> None:
        with service.working_ahead():
            release.wait()

    service.ahead_thread.submit(hang)
    try:
        return [await asyncio.wait_for(ask(reader, writer, step), 20) for step in range(NUM_STEPS)]
    finally:
        release.set()
        writer.close()
        server.close()


def test_a_run_that_waits_behind_a_hung_one_is_given_up(service: Service) -> None:
    release = threading.Event()
    found = asyncio.run(ask_while_held_up(service, release))
    tokens = some_tokens(100_000)
    for step, batch in enumerate(found):
        for row in range(ROWS):
            start = (step * ROWS + row) * (LENGTH - 1)
            assert np.array_equal(batch[row], tokens[start : start + LENGTH]), (step, row)
