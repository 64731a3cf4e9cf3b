"""A loop that waits for a server: signals end it at once, and the log says what it waits for."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from corpus_client import CorpusLoader, errors
from corpus_client.network import pool
from tests.client.network.scripted import ScriptedServer
from tests.client.reference_server import Fault, ReferenceServer
from tests.serving import environment

TRAIN = """
import json, signal, sys
from corpus_client import CorpusLoader, Network

url, handler = sys.argv[1:3]
loader = CorpusLoader(url, corpus="web", seq_len=16, global_batch_size=12, device="cpu")

def stop(number, frame):
    if loader.waiting:
        raise SystemExit(128 + number)

if handler == "own":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
next(loader)
loader.seek(1)
print("trained", flush=True)
sys.stdin.readline()
print("waits", flush=True)
try:
    while True:
        next(loader)
finally:
    print(json.dumps(loader.state_dict()["next_step"]), flush=True)
"""

CONSTRUCT = """
import sys
from corpus_client import CorpusLoader
print("waits", flush=True)
try:
    CorpusLoader(sys.argv[1], corpus="web", seq_len=16, global_batch_size=12, device="cpu")
finally:
    print("ended", flush=True)
"""


def end_of_wait(process: subprocess.Popen[str], number: signal.Signals) -> tuple[float, str]:
    """Seconds from the signal to what the process says then; torch itself may end slowly."""
    time.sleep(1.5)  # it waits by now
    started = time.monotonic()
    process.send_signal(number)
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = time.monotonic() - started
    process.wait()
    return seconds, line


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
    command = [sys.executable, "-c", TRAIN, server.url, handler]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "trained\n"
        server.stop()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "waits\n"
        seconds, line = end_of_wait(process, number)
        assert seconds < 1
        assert process.returncode == code
        assert json.loads(line) >= 1
    server.start()  # for the fixture's end


@pytest.mark.parametrize("silent", [False, True], ids=["nobody listens", "a question in flight"])
def test_the_first_interrupt_ends_a_loader_that_is_being_made(
    request: pytest.FixtureRequest, silent: bool
) -> None:
    server = ScriptedServer([60.0])
    request.addfinalizer(server.close)
    if not silent:
        server.close()
    with subprocess.Popen(
        [sys.executable, "-c", CONSTRUCT, server.url], stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        seconds, line = end_of_wait(process, signal.SIGINT)
        assert (seconds < 1, line) == (True, "ended\n")


@pytest.mark.parametrize("when", ["made", "asked for a batch"])
def test_the_log_says_that_a_loop_waits_and_for_how_long_at_most(
    make_loader: Callable[..., CorpusLoader],
    server: ReferenceServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    """And goes on saying it."""
    monkeypatch.setattr(pool, "TELL_FIRST_SECONDS", 0.2)
    monkeypatch.setattr(pool, "TELL_SECONDS", 0.4)
    if when == "made":
        server.stop()
        with pytest.raises(errors.DeadlineExceeded):
            make_loader(deadline_seconds=1.5)
        server.start()
    else:
        server.next_fault = lambda: Fault("busy", 0)
        with pytest.raises(errors.DeadlineExceeded):
            next(make_loader(deadline_seconds=1.5))
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    waits = [text for text in told if "waiting up to 2 s in all" in text]
    assert len(waits) >= 2
    assert all(text.startswith("no response for ") and server.url in text for text in waits)
