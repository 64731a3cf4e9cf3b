"""Memory of connections that do nothing: idle ones, and ones whose reader has stalled."""

from __future__ import annotations

import dataclasses
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from corpus_server.web.answers import PIECE_BYTES
from scripts.benchmarks import corpus
from scripts.benchmarks.private import private_bytes
from scripts.benchmarks.report import Options, Plot, Report, Table, Target
from scripts.benchmarks.servers import Server, batches_path, serving
from scripts.processes import HOST

NUM_IDLE = (500, 2000)
NUM_STALLED = 56
"""With those before the count begins 64, which is as many answers as a process has under way."""

NUM_BEFORE = 8
SEQ_LENS = (128, 2048, 32768)
IDLE_TARGET_BYTES = 64_000
STALLED_TARGET_BYTES = PIECE_BYTES + IDLE_TARGET_BYTES
ANSWER_BYTES = 64 * 2**20
"""The largest answer that a server gives by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """Connections that wait: for nothing, or `stalled` in the midst of an answer of some window length."""

    stalled: bool
    connections: int
    seq_len: int = 2048

    @property
    def name(self) -> str:
        """For tables."""
        return f"stalled, windows of {self.seq_len + 1:,}" if self.stalled else "idle"

    @property
    def target_bytes(self) -> int:
        """What one of them may hold."""
        return STALLED_TARGET_BYTES if self.stalled else IDLE_TARGET_BYTES


def measure(options: Options) -> Report:
    """Private memory of the server before and after, divided by the number of connections.

    Every idle connection has had one small answer and waits for the next request. Every stalled one
    has taken the head of the largest answer and reads no further; what the kernel holds for it in
    socket buffers is no memory of the process and depends on its limits for sockets.
    """
    cases = [Waiting(stalled=False, connections=number) for number in NUM_IDLE]
    cases += [Waiting(stalled=True, connections=NUM_STALLED, seq_len=seq_len) for seq_len in SEQ_LENS]
    if options.smoke:
        cases = [Waiting(stalled=False, connections=20), Waiting(stalled=True, connections=4)]
    path = corpus.make(options.cache, 10**6 if options.smoke else 10**8)
    found: list[dict[str, Any]] = []
    for case in cases:
        # A server of its own for each: what one left behind would be reused by the next.
        with serving({corpus.NAME: path}) as server, ExitStack() as connections:
            _open(server, case, NUM_BEFORE, connections)  # threads and buffers that every use brings
            before = private_bytes(server.pid, leaving_out=[path])
            _open(server, case, case.connections, connections)
            after = private_bytes(server.pid, leaving_out=[path])
        each = (after - before) / case.connections
        found.append(
            {
                **dataclasses.asdict(case),
                "name": case.name,
                "bytes_before": before,
                "bytes_each": each,
                "target_bytes": case.target_bytes,
            }
        )
    return _report(found)


def _open(server: Server, case: Waiting, number: int, connections: ExitStack) -> None:
    """Open connections and leave them to themselves."""
    rows = ANSWER_BYTES // (2 * (case.seq_len + 1)) if case.stalled else 1
    query = {"corpus": corpus.NAME, "seq_len": case.seq_len, "batch_size": rows, "checksum": "false"}
    for step in range(number):
        connection = connections.enter_context(socket.create_connection((HOST, server.port), timeout=30))
        # Small, so that the server and not the kernel holds the answer.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        path = batches_path(**query, step=step)
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        _read(connection, None if case.stalled else 2 * rows * (case.seq_len + 1))


def _read(connection: socket.socket, body_bytes: int | None) -> None:
    """Read the head of an answer, and its body too unless that is None."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(256)
    head, _, body = received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise SystemExit(f"a request failed: {received[:500]!r}")
    left = 0 if body_bytes is None else body_bytes - len(body)
    while left > 0:
        left -= len(connection.recv(left))


def _report(found: list[dict[str, Any]]) -> Report:
    rows = [
        [
            each["name"],
            str(each["connections"]),
            f"{each['bytes_before'] / 1e6:.1f}",
            f"{each['bytes_each'] / 1e3:.1f}",
        ]
        for each in found
    ]
    title = f"waiting connections: private memory of the server (a piece is {PIECE_BYTES / 1e3:.0f} kB)"
    return Report(
        data={"waiting": found},
        tables=[Table(title=title, columns=["they are", "connections", "MB before", "kB each"], rows=rows)],
        targets=[
            Target(
                figure=f"private memory of one of {each['connections']:,} connections, {each['name']}",
                reached=each["bytes_each"] / 1e3,
                bound="at most",
                wanted=each["target_bytes"] / 1e3,
                unit="kB",
            )
            for each in found
        ],
        plots=[Plot(name="growth-waiting", draw=lambda figure: _draw(figure, found))],
    )


def _draw(figure: Figure, found: list[dict[str, Any]]) -> None:
    axes = figure.add_subplot()
    names = [f"{each['connections']:,} {each['name']}" for each in found]
    axes.barh(names, [each["bytes_each"] / 1e3 for each in found])
    for number, each in enumerate(found):
        wanted = each["target_bytes"] / 1e3
        axes.plot([wanted, wanted], [number - 0.4, number + 0.4], color="black", linestyle=":")
        axes.text(each["bytes_each"] / 1e3, number, f" {each['bytes_each'] / 1e3:.0f}", va="center")
    axes.set_xscale("log")
    axes.set_xlim(1, 1e5)
    axes.invert_yaxis()
    axes.set_xlabel("private memory of the server for one connection, kB (dotted: at most)")
