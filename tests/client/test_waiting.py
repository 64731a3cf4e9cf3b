"""A loop that waits for a server: signals end it at once, and the log says what it waits for."""

from __future__ import annotations

import logging
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from corpus_client import CorpusLoader
from corpus_client.network import pool
from tests.client.reference_server import Fault, ReferenceServer
from tests.serving import environment, wait_until

ENDLESS = """
import json, logging, signal, sys
from corpus_client import CorpusLoader, Network
from corpus_client.network import options, pool, replica
from corpus_client.staging import fetcher

# Nothing but a signal ends a wait here: the next attempt, line of the log and deadline are a day away.
DAY = 86_400.0
replica.BACKOFF_FIRST_SECONDS = replica.BACKOFF_LAST_SECONDS = pool.TELL_SECONDS = DAY
options.CONNECT_SECONDS = fetcher.JOIN_SECONDS = DAY
network = Network(deadline_seconds=5 * DAY, reach_seconds=DAY, progress_seconds=DAY)

class Waits(logging.Handler):
    def emit(self, record):
        if "waiting up to" in record.getMessage():
            print("waits", flush=True)

logging.getLogger("corpus_client").addHandler(Waits())

def make():
    return CorpusLoader(
        sys.argv[1], corpus="web", seq_len=16, global_batch_size=12, device="cpu", network=network
    )
"""

TRAIN = """
loader = make()

def stop(number, frame):
    if loader.waiting:
        raise SystemExit(128 + number)

if sys.argv[2] == "own":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
next(loader)
loader.seek(1)
print("trained", flush=True)
sys.stdin.readline()
try:
    while True:
        next(loader)
finally:
    print(json.dumps(loader.state_dict()["next_step"]), flush=True)
"""

CONSTRUCT = """
try:
    make()
finally:
    print("ended", flush=True)
"""


def said(process: subprocess.Popen[str]) -> str:
    """Return the next line of a process."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("handler", "number", "code"),
    [
        ("default", signal.SIGINT, -signal.SIGINT),
        ("own", signal.SIGINT, 128 + signal.SIGINT),
        ("own", signal.SIGTERM, 128 + signal.SIGTERM),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_the_first_signal_ends_a_loop_that_waits(
    server: ReferenceServer, handler: str, number: signal.Signals, code: int
) -> None:
    """The state is that of the batches yielded."""
    command = [sys.executable, "-c", ENDLESS + TRAIN, server.url, handler]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdin is not None
        assert said(process) == "trained"
        server.stop()
        process.stdin.write("\n")
        process.stdin.flush()
        assert said(process) == "waits"
        process.send_signal(number)
        assert int(said(process)) >= 1
        assert process.wait() == code
    server.start()  # for the fixture's end


def asked(listener: socket.socket) -> list[socket.socket]:
    """Accept connections until one of them has brought a question; return them."""
    peers: list[socket.socket] = []
    while True:
        readable, _, _ = select.select([listener, *peers], [], [])
        if readable != [listener]:
            return peers
        peers.append(listener.accept()[0])


@pytest.mark.parametrize("silent", [False, True], ids=["nobody listens", "a question in flight"])
def test_the_first_interrupt_ends_a_loader_that_is_being_made(silent: bool) -> None:
    """A question in flight is never answered."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        if not silent:
            listener.close()
        command = [sys.executable, "-c", ENDLESS + CONSTRUCT, url]
        process = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        )
        if silent:
            for peer in asked(listener):
                stack.callback(peer.close)
        else:
            assert said(process) == "waits"
        process.send_signal(signal.SIGINT)
        assert said(process) == "ended"
        process.wait()


@pytest.mark.parametrize("when", ["made", "asked for a batch"])
def test_the_log_says_that_a_loop_waits_and_for_how_long_at_most(
    make_loader: Callable[..., CorpusLoader],
    server: ReferenceServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    """And goes on saying it until the server responds."""
    monkeypatch.setattr(pool, "TELL_FIRST_SECONDS", 0.2)
    monkeypatch.setattr(pool, "TELL_SECONDS", 0.4)
    if when == "made":
        server.stop()
    else:
        server.next_fault = lambda: Fault("busy", 0)

    def waits() -> list[str]:
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        return [text for text in told if "waiting up to 300 s in all" in text]

    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(lambda: next(make_loader(deadline_seconds=300, reach_seconds=300)))
        wait_until(lambda: len(waits()) >= 2 or first.done())
        if when == "made":
            server.start()
        server.next_fault = lambda: None
        assert first.result().step == 0
    assert len(waits()) >= 2
    assert all(text.startswith("no response for ") and server.url in text for text in waits())
