"""A corpus-server in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

READY_SECONDS = 30.0
STOP_SECONDS = 15.0


class ServerFailed(Exception):
    """The server did not start, or did not answer as it must."""


def serve_command(corpora: Mapping[str, Path], *, port: int, state_dir: Path) -> list[str]:
    """What a person would type to serve these corpora on this machine only."""
    program = os.path.relpath(Path(sys.executable).with_name("corpus-server"))
    named = [f"{name}={os.path.relpath(path)}" for name, path in corpora.items()]
    state = os.path.relpath(state_dir)
    return [program, "serve", *named, "--host", "127.0.0.1", "--port", str(port), "--state-dir", state]


@contextmanager
def running(command: list[str], *, url: str, log: Path) -> Iterator[None]:
    """Run the server until the block ends, however it ends; enter when it says that it is ready.

    It gets a session of its own: Ctrl-C then reaches this process alone, which stops the server when the
    training has closed its connections.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_until_ready(process, url, log)
        yield
    finally:
        _stop(process)


def claim_port(port: int = 0) -> int:
    """This port of the loopback interface, or any for 0, if nobody listens there right now."""
    with socket.socket() as probe:
        # As servers do: connections that linger from the last run are no reason to refuse.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ServerFailed(f"port {port} of 127.0.0.1 is not free ({error}); give another") from error
        claimed: int = probe.getsockname()[1]
        return claimed


def get_text(url: str) -> str:
    """The body of a GET, as text."""
    try:
        with _open(url, timeout=10) as response:
            body: bytes = response.read()
            return body.decode()
    except urllib.error.HTTPError as error:
        raise ServerFailed(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while process.poll() is None:
        try:
            with _open(f"{url}/readyz", timeout=1):
                return
        except OSError as error:  # not listening yet, or listening and not ready (503)
            if time.monotonic() > deadline:
                raise ServerFailed(f"not ready after {READY_SECONDS:g} s ({error}); see {log}") from error
        time.sleep(0.1)
    ending = log.read_text(errors="replace").strip().splitlines()[-5:]
    what = f"it ended with exit code {process.returncode}; {log} ends with"
    raise ServerFailed("\n  ".join([what, *ending]))


def _open(url: str, *, timeout: float) -> "urllib.request._UrlopenRet":
    # Loopback is never behind the proxy that the environment may name.
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)  # does nothing to a process that has ended
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
