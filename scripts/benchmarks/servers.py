"""Servers for an axis, ours and the peers': started on a free port, asked, counted, ended."""

from __future__ import annotations

import http.client
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

from scripts import processes
from scripts.processes import HOST, claim_port, is_ready, read, running

_SAMPLE = re.compile(r'corpus_requests_total\{route="([^"]*)",status="(\d+)"\} (\S+)')


class Address(NamedTuple):
    """Where a contender asks, in the words of its kind, and the processes that work for it."""

    at: str
    pids: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A running server of ours.

    Args:
        url: `http://127.0.0.1:PORT` or `uds:///PATH`.
        port: on loopback; 0 on a Unix-domain socket.
        pid: its only process.
        state_dir: where it keeps plans.
        ready_seconds: from starting the process to `/readyz` saying yes.
    """

    url: str
    port: int
    pid: int
    state_dir: Path
    ready_seconds: float

    @property
    def address(self) -> Address:
        """As peers have one."""
        return Address(self.url, [self.pid])

    def connect(self) -> http.client.HTTPConnection:
        """A new connection, the caller's to close."""
        return processes.connect(self.url)

    def post_plan(self, document: str) -> str:
        """Make a plan known, given as JSON; return its id."""
        return str(json.loads(self.answer_to_plan(document.encode()))["id"])

    def answer_to_plan(self, document: bytes) -> bytes:
        """Make a plan known; return what the server says of it, as it came."""
        with closing(self.connect()) as connection:
            connection.request("POST", "/v1/plans", document)
            return read(connection)

    def num_requests(self, route: str, *, status: int = 200) -> int:
        """How many requests it has answered so, by its own metrics."""
        text = processes.get(self.url, "/metrics").decode()
        wanted = (route, str(status))
        return sum(int(float(n)) for *labels, n in _SAMPLE.findall(text) if tuple(labels) == wanted)


@contextmanager
def serving(
    corpora: Mapping[str, Path],
    *,
    uds: Path | None = None,
    arguments: Sequence[str] = (),
    dtype: str | None = "uint16",
) -> Iterator[Server]:
    """Serve corpora from a process of its own until the block ends.

    Args:
        corpora: path by name.
        uds: listen on this Unix-domain socket instead of a port.
        arguments: more of the command line.
        dtype: of headerless files; None where the format says it.
    """
    port = 0 if uds else claim_port()
    url = f"uds://{quote(str(uds))}" if uds else f"http://{HOST}:{port}"
    with tempfile.TemporaryDirectory(prefix="bench-state-") as state_dir:
        command = [sys.executable, "-m", "corpus_server", "serve"]
        command += [f"{name}={path}" for name, path in corpora.items()]
        command += ["--uds", str(uds)] if uds else ["--port", str(port)]
        command += ["--state-dir", state_dir, "--log-level", "warning", *arguments]
        command += [] if dtype is None else ["--dtype", dtype]
        began = time.perf_counter()
        with running(command, ready=partial(is_ready, url)) as process:
            yield Server(
                url=url,
                port=port,
                pid=process.pid,
                state_dir=Path(state_dir),
                ready_seconds=time.perf_counter() - began,
            )


@contextmanager
def spawn_peer(kind: str, path: Path, *options: str) -> Iterator[Address]:
    """Start a peer of `scripts.benchmarks.peers` over a corpus."""
    with tempfile.TemporaryDirectory() as folder:
        address_file = Path(folder) / "address"
        command = [sys.executable, "-m", "scripts.benchmarks.peers", kind, str(path), str(address_file)]
        with running([*command, *options], ready=address_file.exists) as process:
            yield Address(address_file.read_text(), [process.pid])


def batches_path(**query: object) -> str:
    """`/v1/batches` with a query."""
    return f"/v1/batches?{urlencode(query)}"


def timed_gets(connection: http.client.HTTPConnection, paths: Sequence[str]) -> list[float]:
    """Seconds that each of these requests took on one connection, one after another."""
    seconds = []
    for path in paths:
        began = time.perf_counter()
        connection.request("GET", path)
        read(connection)
        seconds.append(time.perf_counter() - began)
    return seconds
