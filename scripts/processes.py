"""Programs of this checkout as processes of their own: ready when handed over, gone afterwards."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
START_SECONDS = 60.0
STOP_SECONDS = 15.0
RESPONSE_SECONDS = 60.0
POLL_SECONDS = 0.005
LAST_LINES = 5


class ServerFailed(Exception):
    """A server did not start, or did not answer as it must."""


@contextmanager
def running(
    command: Sequence[str],
    *,
    ready: Callable[[], bool] | None = None,
    log: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stop_seconds: float = STOP_SECONDS,
    tree: Path = ROOT,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends, however it ends; then end it and all that it started.

    It finds the packages of this checkout, and has a session of its own: Ctrl-C reaches this process alone.

    Args:
        ready: the block is entered when this says yes; None: at once.
        log: file for what it writes, kept; None: shown on standard error if the block fails.
        stdout: as of `subprocess.Popen`; None: to the log.
        stop_seconds: after SIGTERM, until it is killed.
        tree: whose packages it imports: this checkout, or one of another commit.

    Raises:
        ServerFailed: it ended, or a minute passed, before it was ready.
    """
    path = os.pathsep.join(filter(None, (str(tree), str(tree / "client"), os.environ.get("PYTHONPATH"))))
    with ExitStack() as stack:
        output = stack.enter_context(_log_file(log))
        with _uninterrupted():
            process = subprocess.Popen(
                ending_with_this_process(command),
                cwd=None if tree == ROOT else tree,  # `python -m` looks there before PYTHONPATH
                stdin=stdin,
                stdout=output if stdout is None else stdout,
                stderr=output,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            stack.callback(_end, process, stop_seconds)
        try:
            if ready is not None:
                _wait_until(ready, process, output, log)
            yield process
        except BaseException:
            if log is None:
                sys.stderr.write(_written(output))
            raise


def ending_with_this_process(command: Sequence[str]) -> list[str]:
    """Return the command so that the kernel kills what it starts when this process dies, however it dies.

    The kernel counts the end of the *thread* that starts it, so only the main thread asks for this. `setpriv`
    belongs to util-linux; where it is missing, the command is returned as it is.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or (setpriv := shutil.which("setpriv")) is None:
        return list(command)
    return [setpriv, "--pdeathsig", "KILL", "--", *command]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back: an exception inside `Popen` would leave a process that nobody ends."""
    if threading.current_thread() is not threading.main_thread():  # only there do signals raise
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)


def output_of(words: Sequence[str], *, stdin: bytes = b"") -> bytes:
    """Run Python in this checkout, as `python WORDS`, and return what it prints.

    Raises:
        ServerFailed: it ended with an error, which is on standard error.
    """
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, input=stdin, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        raise ServerFailed(f"{sys.executable} {' '.join(words)} failed; it says why above")
    return done.stdout


def claim_port(port: int = 0) -> int:
    """This port of the loopback interface, or any for 0, if nobody listens there right now.

    Raises:
        ServerFailed: somebody does.
    """
    with socket.socket() as probe:
        # As servers do: connections that linger from the last run are no reason to refuse.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ServerFailed(f"port {port} of {HOST} is not free ({error}); give another") from error
        claimed: int = probe.getsockname()[1]
        return claimed


def connect(url: str) -> http.client.HTTPConnection:
    """An open connection to `http://HOST:PORT`, `https://HOST:PORT` or `uds:///PATH`, the caller's to close.

    Raises:
        OSError: nobody listens there.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or HOST, parts.port, timeout=RESPONSE_SECONDS)
    try:
        if parts.scheme == "uds":
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(RESPONSE_SECONDS)
            connection.sock.connect(unquote(parts.path))
        else:
            connection.connect()
    except OSError:
        connection.close()
        raise
    return connection


def read(connection: http.client.HTTPConnection) -> bytes:
    """The body of the response that is awaited.

    Raises:
        ServerFailed: the status is not 200.
    """
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        said = body[:500].decode(errors="replace")
        raise ServerFailed(f"a request was answered with {response.status}: {said}")
    return body


def get(url: str, path: str, *, headers: Mapping[str, str] | None = None) -> bytes:
    """The body of one response, over a connection of its own."""
    with closing(connect(url)) as connection:
        connection.request("GET", path, headers=dict(headers or {}))
        return read(connection)


def is_ready(url: str) -> bool:
    """Whether a server answers `/readyz` with yes."""
    try:
        get(url, "/readyz")
    except (OSError, http.client.HTTPException, ServerFailed):
        return False
    return True


def _log_file(path: Path | None) -> IO[bytes]:
    if path is None:
        return tempfile.TemporaryFile()
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w+b")


def _wait_until(
    ready: Callable[[], bool], process: subprocess.Popen[bytes], output: IO[bytes], log: Path | None
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if process.poll() is not None:
            what = f"{process.args!r} ended with exit code {process.returncode}"
        elif time.monotonic() > deadline:
            what = f"{process.args!r} was not ready after {START_SECONDS:g} s"
        else:
            time.sleep(POLL_SECONDS)
            continue
        ending = _written(output).strip().splitlines()[-LAST_LINES:]
        raise ServerFailed("\n  ".join([f"{what}; {log or 'what it wrote'} ends with", *ending]))


def _written(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace")


def _end(process: subprocess.Popen[bytes], stop_seconds: float) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(stop_seconds)
    with contextlib.suppress(ProcessLookupError):  # its group is there until its last process is gone
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
