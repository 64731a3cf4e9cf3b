"""Real server processes for tests, and the few lines that ask them something."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock
from urllib.parse import quote, urlencode, urlsplit

import numpy as np
import psutil

from scripts.processes import ending_with_this_process

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = STOP_SECONDS = WAIT_SECONDS = 300.0
"""Far beyond what anything takes on a busy machine: whoever waits goes on as soon as it is so."""


_BEFORE_TEMPLATES = "corpus_server.run.worker"
"""The module that was a worker in releases whose workers were not copies of a template."""


@dataclass(frozen=True)
class Response:
    """A whole HTTP response."""

    status: int
    headers: Message
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON."""
        return json.loads(self.body)

    def array(self) -> np.ndarray:
        """Return a raw body as the array that its headers describe."""
        shape = [int(part) for part in self.headers["Corpus-Shape"].split(",")]
        return np.frombuffer(self.body, np.dtype(self.headers["Corpus-Dtype"]).newbyteorder("<")).reshape(
            shape
        )


WITHOUT_PRIVILEGES = "import ctypes; [ctypes.CDLL(None).prctl(24, each, 0, 0, 0) for each in (1, 2)]"
"""Python after which permissions hold for programs that root starts, too: PR_CAPBSET_DROP of CAP_DAC_OVERRIDE
and CAP_DAC_READ_SEARCH."""


def command(*arguments: str | Path, prelude: str = "") -> list[str]:
    """Return the argument list of the command line of this checkout, run by this interpreter."""
    script = ["-c", f"{prelude}; from corpus_server.cli import main; main()"]
    return [sys.executable, *(script if prelude else ("-m", "corpus_server")), *map(str, arguments)]


def environment(*, tree: Path = ROOT, **variables: str) -> dict[str, str]:
    """Return the environment of a server: this checkout, or another one, first; no colours, wide lines."""
    path = os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200", **variables}


def run_here(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end in this process, which saves a second; for what starts no server."""
    from corpus_server.cli import common, main

    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["corpus-server", *map(str, arguments)]),
        mock.patch.dict(os.environ, {"NO_COLOR": "1", "COLUMNS": "200", **variables}),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        for console in (common.console, common.errors):  # they keep the width of their first use
            console.width = int(os.environ["COLUMNS"])
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(sys.argv, code, stdout.getvalue(), stderr.getvalue())


class RunningServer:
    """`python -m corpus_server serve` on a port of loopback or a Unix socket, from entering to leaving.

    The first start takes a free port, later ones the same. Nothing that it started outlives it.

    Args:
        corpora: path or URL by name.
        folder: for the state, the log and the configuration; made if it is not there.
        workers: processes.
        uds: path of the Unix socket to listen on instead of a port.
        config: text of a corpus.toml.
        arguments: more of the command line.
        prelude: Python that the supervisor runs first, to set what no option does.

    Attributes:
        tree: the checkout whose server runs. `scripts/drills --before` sets it for a whole process.
    """

    tree = ROOT

    def __init__(
        self,
        corpora: Mapping[str, Path | str],
        folder: Path,
        *,
        workers: int = 1,
        uds: Path | None = None,
        config: str | None = None,
        arguments: Sequence[str] = (),
        prelude: str = "",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.state_dir = folder / "state"
        self.workers = workers
        self.uds = uds
        self._prelude = prelude
        self.port = 0
        self.tls: ssl.SSLContext | None = None  # what raw connections to the port speak
        self._log_path = folder / "server.log"
        self._log_start = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._arguments = [*(f"{name}={path}" for name, path in corpora.items()), *arguments]
        if config is not None:
            (folder / "corpus.toml").write_text(config)
            self._arguments += ["--config", str(folder / "corpus.toml")]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT` or `uds:///PATH`."""
        return f"uds://{quote(str(self.uds))}" if self.uds else f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        assert self._process is not None, "the server was not started"
        return self._process.pid

    def worker_pids(self) -> list[int]:
        """Return the processes that answer requests, oldest first."""
        found = []
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # one that has just ended is no worker
                if child.name() == "corpus-worker" or _BEFORE_TEMPLATES in child.cmdline():
                    found.append(child.pid)
        return sorted(found)

    def templates(self) -> list[psutil.Process]:
        """Return the process that workers are copies of; none of a release that has none."""
        children = psutil.Process(self.pid).children()
        return [each for each in children if each.name() == "corpus-template"]

    @property
    def worker_pid(self) -> int:
        """Process id of the only worker: the process whose memory, CPU and descriptors requests cost."""
        (pid,) = self.worker_pids()
        return pid

    @contextlib.contextmanager
    def replacing(self, num_workers: int = 1) -> Iterator[None]:
        """Wait at the end of the block until so many more workers are ready than at its beginning."""
        ready = self._num_ready()
        yield
        wait_until(lambda: self._num_ready() >= ready + num_workers, self.log)

    def kill_worker(self, number: int = 0) -> None:
        """Kill one of the workers, oldest first, and wait until its successor is ready."""
        with self.replacing():
            os.kill(self.worker_pids()[number], signal.SIGKILL)

    def _num_ready(self) -> int:
        """Return how many workers were ready since the last start."""
        return self.log().count(" is ready")

    def log(self) -> str:
        """Return what the server has written since its last start."""
        return self._log_path.read_bytes()[self._log_start :].decode(errors="replace")

    def start(self) -> None:
        """Start, and wait until every worker is ready."""
        self._log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
        place = ("--uds", self.uds) if self.uds else ("--port", str(self.port))
        options = (*place, "--workers", str(self.workers), "--state-dir", self.state_dir)
        with self._log_path.open("ab") as log:
            words = command(
                "serve", "--log-format", "text", *self._arguments, *options, prelude=self._prelude
            )
            self._process = subprocess.Popen(
                ending_with_this_process(words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=None if self.tree == ROOT else self.tree,  # `python -m` looks there before PYTHONPATH
                env=environment(tree=self.tree),
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        try:
            while not self._ready():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start:\n{self.log()}")
                time.sleep(0.02)
        except BaseException:
            self.kill()
            raise

    def _ready(self) -> bool:
        found = re.search(r"running on .*?(?:uds|http://127\.0\.0\.1:(\d+))", self.log())
        if found is None or self._num_ready() < self.workers:
            return False
        self.port = int(found[1] or 0)
        try:
            return self.get("/readyz").status == 200
        except OSError:
            return False

    def stop(self) -> int:
        """End it as an operator would (SIGTERM); return its exit code."""
        assert self._process is not None, "the server was not started"
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        """End it and its workers at once (SIGKILL); idempotent."""
        if self._process is None:
            return
        # The group has its leader's number until the last worker is gone.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_SECONDS)

    def restart(self) -> None:
        """Kill it and start it again on the same port."""
        self.kill()
        self.start()

    def connect(self, timeout: float = 30.0) -> http.client.HTTPConnection:
        """Return a new connection, to be closed by the caller."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        if self.uds:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(timeout)
            try:
                connection.sock.connect(str(self.uds))
            except OSError:
                connection.close()
                raise
        return connection

    def get(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        **query: object,
    ) -> Response:
        """Ask over a connection of its own; `query` values are spelled by `str`."""
        target = path + ("?" + urlencode(query) if query else "")
        with contextlib.closing(self.connect()) as connection:
            return ask(connection, target, method=method, headers=headers, body=body)

    def active_requests(self, headers: Mapping[str, str] | None = None) -> int:
        """Return the requests under way besides the one that asks."""
        lines = self.get("/metrics", headers=headers).body.decode().splitlines()
        return sum(int(float(line.split()[1])) for line in lines if line.startswith("corpus_active_req")) - 1

    def wait_until_idle(
        self, seconds: float = WAIT_SECONDS, headers: Mapping[str, str] | None = None
    ) -> None:
        """Wait until no request is under way: one is counted a moment after its response has left.

        Raises:
            AssertionError: after `seconds` some still are.
        """
        deadline = time.monotonic() + seconds
        if self.workers > 1:
            self._wait_for_counts(deadline)
        while active := self.active_requests(headers):
            assert time.monotonic() < deadline, f"{active} requests are under way after {seconds:.0f} s"
            time.sleep(0.05)

    def _wait_for_counts(self, deadline: float) -> None:
        """Wait until the workers have told each other what they have counted by now."""
        for path in (self.state_dir / "metrics" / str(self.pid)).glob("[0-9]*.json"):
            for _ in range(2):  # what they tell every second may have been begun before
                with contextlib.suppress(FileNotFoundError):  # the worker has ended
                    known = path.stat().st_mtime_ns
                    while path.stat().st_mtime_ns == known:
                        assert time.monotonic() < deadline, f"{path.name} is not written any more"
                        time.sleep(0.05)

    def post_plan(self, plan: object) -> Response:
        """Post a plan document."""
        return self.get("/v1/plans", method="POST", body=json.dumps(plan).encode())


def ask(
    connection: http.client.HTTPConnection,
    target: str,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> Response:
    """Send one request over a connection and read its whole response; equal requests have equal ones."""
    connection.request(method, target, body=body, headers={"X-Request-Id": "tests", **(headers or {})})
    response = connection.getresponse()
    return Response(status=response.status, headers=response.headers, body=response.read())


def wait_until(condition: Callable[[], object], what: object = "", seconds: float = WAIT_SECONDS) -> None:
    """Ask for a condition until it holds; after `seconds` fail, saying `what`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(0.02)


def host_and_port(url: str) -> tuple[str, int]:
    """Return where a URL points, for sockets."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def check_problem(
    response: Response, status: int, slug: str, *, parameter: str | None = None
) -> dict[str, Any]:
    """Check that a response is a complete problem document and return it."""
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.headers["Cache-Control"] == "no-store"
    document: dict[str, Any] = response.json()
    assert (response.status, document["status"], document["type"]) == (status, status, slug), document
    assert document["title"] == slug.replace("-", " ").capitalize()
    assert document["detail"]
    assert document["request_id"] == response.headers["X-Request-Id"]
    assert set(document) - {"parameter", "received", "accepted", "remedy"} == {
        *("type", "title", "status", "detail", "request_id")
    }
    if parameter is not None:
        assert document["parameter"] == parameter
    return document
