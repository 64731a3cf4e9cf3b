"""Measure what the dearest question of each kind costs a server, and what others notice of it.

    .venv/bin/python -m scripts.benchmarks.questions [--seconds 6] [--only WORD] [--out FILE]

A server of one worker has a corpus of 2^32 tokens, one of two million documents, and two views of that. Each
question is asked once, alone, beside small batches that 64 others ask, each 4 times a second; the first line
is of them alone. Then four ask it at the same moment and leave after half a second.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.tools.viewing.make import make_view
from tests.metadata import write_metadata
from tests.raw_http import RawConnection, get
from tests.serving import RunningServer, run_here

NUM_DOCUMENTS: Final = 2_000_000
OTHERS: Final = 64
PAUSE_SECONDS: Final = 0.25


@dataclass
class Costs:
    """What a question cost, alone and with four callers who left."""

    status: int
    what: str
    seconds: float
    cpu_seconds: float
    peak_mib: float
    others_p99_ms: float
    after_left_seconds: float = 0.0  # until the server was idle again
    after_left_cpu_seconds: float = 0.0  # that it used until then
    left_peak_mib: float = 0.0


def write_corpora(folder: Path) -> dict[str, str]:
    """Write the corpora that are asked about, and two views; return what to serve."""
    with (folder / "huge.bin").open("wb") as file:
        file.truncate(2**33)
    lengths = np.random.default_rng(0).integers(2, 48, NUM_DOCUMENTS)
    tokens = np.random.default_rng(1).integers(1, 50_000, int(lengths.sum())).astype("uint16")
    tokens[lengths.cumsum() - 1] = 0
    (folder / "docs").mkdir()
    (folder / "docs" / "docs.bin").write_bytes(tokens.tobytes())
    small = tokens[: int(lengths[:20_000].sum())]
    (folder / "few").mkdir()
    (folder / "few" / "few.bin").write_bytes(small.tobytes())
    names = [f"document {number}" for number in range(20_000)]
    write_metadata(folder / "few" / "documents", {"id": names, "url": [f"https://{each}" for each in names]})
    for name in ("docs", "few"):
        made = run_here("index", f"{folder / name},eot=0,dtype=uint16")
        assert made.returncode == 0, made.stderr
    for name, seed in (("one", 2), ("other", 3)):
        counts = np.random.default_rng(seed).choice([0, 1, 1, 2], NUM_DOCUMENTS).astype(np.uint16)
        with Corpus.open(CorpusSpec.parse(f"docs={folder / 'docs'},dtype=uint16")) as corpus:
            make_view(corpus, counts, folder / f"{name}.view", made={})
    text = np.random.default_rng(4).integers(97, 123, 8_000_000).astype("uint16")
    (folder / "text.bin").write_bytes(text.tobytes())
    served = {name: f"{folder / name},dtype=uint16" for name in ("docs", "few")}
    return {"huge": str(folder / "huge.bin"), "text": f"{folder / 'text.bin'},tokenizer=bytes", **served}


class Others(threading.Thread):
    """Someone who asks for a small batch again and again; `waits` are seconds."""

    def __init__(self, server: RunningServer, number: int) -> None:
        super().__init__(daemon=True)
        self._server, self._number = server, number
        self.waits: list[float] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        """Ask until stopped."""
        with RawConnection(self._server, timeout=60) as connection:
            step = self._number * 10**6
            while not self.stopped.wait(PAUSE_SECONDS):
                step += 1
                began = time.monotonic()
                connection.send(get("/v1/batches", corpus="huge", seq_len=256, batch_size=8, step=step))
                assert connection.read().status == 200
                self.waits.append(time.monotonic() - began)


def cpu_seconds(server: RunningServer) -> float:
    """Return the processor time of the worker and of the processes that it has started."""
    worker = psutil.Process(server.worker_pid)
    times = worker.cpu_times()
    total = times.children_user + times.children_system
    for process in (worker, *worker.children(recursive=True)):
        with suppress(OSError):  # it has ended
            total += time.clock_gettime((~process.pid << 3) | 2)  # its clock, see clock_getcpuclockid(3)
    return total


def memory_mib(server: RunningServer, name: str) -> float:
    """Return a line of /proc/PID/status of the worker."""
    for line in Path(f"/proc/{server.worker_pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(name)


class Peak(threading.Thread):
    """Looks for the most private memory that the worker takes; pages of the files are the page cache's."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._before = self._most = memory_mib(server, "RssAnon")
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """Look until stopped."""
        while not self._stopped.wait(0.01):
            self._most = max(self._most, memory_mib(self._server, "RssAnon"))

    def mib(self) -> float:
        """Stop, and return by how much it grew at most."""
        self._stopped.set()
        self.join()
        return self._most - self._before


def wait_until_idle(server: RunningServer) -> tuple[float, float]:
    """Wait for 0.3 s without work; return until when there was some, and how much: in seconds, and of CPU.

    Less than a fifth of a CPU is no work: each second a worker counts what it did.
    """
    began = seen = time.monotonic()
    first = last = used = cpu_seconds(server)
    busy_until = began
    while seen - busy_until < 0.3:
        time.sleep(0.01)
        now, total = time.monotonic(), cpu_seconds(server)
        if total - last > 0.2 * (now - seen):
            busy_until, used = now, total
        seen, last = now, total
    return busy_until - began, used - first


def measure(server: RunningServer, request: bytes, timeout: float) -> Costs:
    """Ask a question alone, beside others; then by four callers who leave."""
    wait_until_idle(server)
    others = [Others(server, number) for number in range(OTHERS)]
    peak, before = Peak(server), cpu_seconds(server)
    for each in others:
        each.start()
    began = time.monotonic()
    with RawConnection(server, timeout=timeout) as connection:
        connection.send(request)
        try:
            response = connection.read()
            status, what = response.status, "" if response.status == 200 else response.body.decode()
        except OSError:
            status, what = 0, "no response"
    seconds = time.monotonic() - began
    time.sleep(max(0.0, 1.5 - seconds))  # so that there are enough batches
    for each in others:
        each.stopped.set()
    for each in others:
        each.join()
    waits = np.concatenate([each.waits for each in others])
    cpu = cpu_seconds(server) - before
    costs = Costs(status, what, seconds, cpu, peak.mib(), 1e3 * float(np.percentile(waits, 99)))
    wait_until_idle(server)
    peak = Peak(server)
    callers = [RawConnection(server, timeout=timeout).__enter__() for _ in range(4)]
    for caller in callers:
        caller.send(request)
    time.sleep(0.5)
    for caller in callers:
        caller.__exit__(None, None, None)
    costs.after_left_seconds, costs.after_left_cpu_seconds = wait_until_idle(server)
    costs.left_peak_mib = peak.mib()
    return costs


Questions = dict[str, Callable[[], bytes]]
"""Requests by what they ask; made when they are asked, so that no plan is in memory before."""

_PACKED: dict[str, Any] = {"rows": {"documents": {}}}


def questions(server: RunningServer) -> Questions:
    """Return all of them."""
    nothing: Questions = {"nothing but others": lambda: get("/healthz")}
    return {**nothing, **_diffs(server), **_about_plans(server), **_about_tokens(server)}


def posted(server: RunningServer, mixture: str, size: int, **more: Any) -> str:
    """Return the id of a plan that the server is told."""
    stage = {"global_batch_size": size, "mixture": {mixture: 1}, **more.pop("stage", {})}
    response = server.post_plan({"seq_len": 64, "stages": [stage], **more})
    while response.status == 503:
        time.sleep(0.5)
        response = server.post_plan({"seq_len": 64, "stages": [stage], **more})
    assert response.status == 200, response.body
    return str(response.json()["id"])


def _diffs(server: RunningServer) -> Questions:
    def diff(one: str, other: str) -> bytes:
        return get(f"/v1/plans/{one}/diff", other=other, steps=100)

    bounded = {"order": {"shuffle": {"block_windows": 1024, "group_blocks": 64}}}
    shared = {"exclude": {"huge": [[k * 60_000, k * 60_000 + 10] for k in range(62_500)]}}
    more = {"exclude": {"huge": [*shared["exclude"]["huge"], [2**32 - 100, 2**32 - 90]]}}
    return {
        "diff of windows, 2^20 a step": lambda: diff(
            posted(server, "huge", 2**20), posted(server, "huge", 2**20, seed=1)
        ),
        "diff of packed rows, 2^16 a step": lambda: diff(
            posted(server, "docs", 2**16, **_PACKED), posted(server, "docs", 2**16, seed=1, **_PACKED)
        ),
        "diff of packed rows, 2^20 a step": lambda: diff(
            posted(server, "docs", 2**20, **_PACKED), posted(server, "docs", 2**20, seed=1, **_PACKED)
        ),
        "diff of balanced batches of 65,536": lambda: diff(
            posted(server, "docs", 2**16, rows={"documents": {"balance_ranks": True}}),
            posted(server, "docs", 2**16, seed=1, rows={"documents": {"balance_ranks": True}}),
        ),
        "diff of two bounded shuffles, 62,500 shared exclusions": lambda: diff(
            posted(server, "huge", 512, stage=shared, **bounded),
            posted(server, "huge", 512, stage=more, **bounded),
        ),
    }


def _about_plans(server: RunningServer) -> Questions:
    skipped = [[3 * k, 3 * k + 1] for k in range(2000)]
    return {
        "shards of 4,096 steps of packed rows, 64 a step": lambda: get(
            f"/v1/plans/{posted(server, 'docs', 64, **_PACKED)}/shards", step=0, count=4096
        ),
        "shards of 4,096 steps of packed rows, 1,024 a step": lambda: get(
            f"/v1/plans/{posted(server, 'docs', 1024, **_PACKED)}/shards", step=0, count=4096
        ),
        "shards of 4,096 steps of windows, 1,024 a step": lambda: get(
            f"/v1/plans/{posted(server, 'huge', 1024)}/shards", step=0, count=4096
        ),
        "shards of 4,096 steps of a view, 64 a step": lambda: get(
            f"/v1/plans/{posted(server, 'one', 64)}/shards", step=0, count=4096
        ),
        "indices of 4,096 steps of packed rows": lambda: get(
            "/v1/indices", plan=posted(server, "docs", 1024, **_PACKED), step=0, count=4096, format="raw"
        ),
        "look-up of 100,000 rows": lambda: get(
            "/v1/lookup", plan=posted(server, "huge", 64), start=0, stop=640, epochs=10_000, limit=100_000
        ),
        "usage over 2,048 skipped ranges": lambda: get(
            f"/v1/plans/{posted(server, 'huge', 64, skip_steps=skipped)}/usage",
            step=10_000,
        ),
        "receipt of 2^20 windows": lambda: get(f"/v1/plans/{posted(server, 'huge', 2**20)}/receipt", step=0),
    }


def _about_tokens(server: RunningServer) -> Questions:
    return {
        "tokens of a view, 2.4 MB": lambda: get("/v1/corpora/one/tokens", start=5, count=1_200_000),
        "tokens of a view, all": lambda: get("/v1/corpora/one/tokens", start=0, count=20_000_000),
        "search": lambda: get("/v1/corpora/text/search", text="zzzzzzzz"),
        "rows as text, 2^20 tokens": lambda: get(
            f"/v1/plans/{posted(server, 'text', 4096)}/rows", step=0, count=4096
        ),
        "4,096 rows of 65,536 with all metadata": lambda: get(
            f"/v1/plans/{posted(server, 'few', 2**16)}/rows", step=0, count=4096, metadata="all"
        ),
        "tokens as JSON, 2^20": lambda: get("/v1/corpora/text/tokens", count=2**20, format="json"),
        "tokens as text, 2^20": lambda: get("/v1/corpora/text/tokens", count=2**20, format="text"),
        "spans of 2^20 tokens": lambda: get("/v1/corpora/text/spans", count=2**20),
        "batches as text, 2^20 tokens": lambda: get(
            "/v1/batches", corpus="text", seq_len=255, batch_size=4096, step=0, format="text"
        ),
        "statistics": lambda: get("/v1/corpora/docs/statistics"),
        "a table of an inline plan": lambda: get(
            "/v1/batches",
            corpus="docs",
            seq_len=int(time.time() * 10) % 900 + 70,
            batch_size=8,
            step=0,
            rows="documents",
        ),
    }


def report(found: dict[str, Costs]) -> str:
    """Return the figures as a table."""
    lines = [
        "| question | response | s | CPU s | peak MiB | others' p99, ms | idle after 4 left, s | their CPU s "
        "| their MiB |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, its in found.items():
        response = str(its.status)
        with suppress(ValueError):
            response += f" {json.loads(its.what)['type']}"
        figures = (its.seconds, its.cpu_seconds)
        lines.append(
            f"| {name} | {response} | "
            + " | ".join(f"{each:.2f}" for each in figures)
            + f" | {its.peak_mib:.0f} | {its.others_p99_ms:.0f} | {its.after_left_seconds:.2f} | "
            f"{its.after_left_cpu_seconds:.2f} | {its.left_peak_mib:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure the questions, and print a table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--only", default="", help="Questions whose names hold this word.")
    arguments.add_argument("--seconds", type=float, default=60, help="How long a response is waited for.")
    arguments.add_argument("--out", type=Path, help="Write the table there, too.")
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="questions-") as folder:
        corpora = write_corpora(Path(folder))
        views = {name: f"docs?view={folder}/{name}.view" for name in ("one", "other")}
        served = {**corpora, **views}
        with RunningServer(served, Path(folder)) as server:
            found = {}
            for name, request in questions(server).items():
                if asked.only not in name:
                    continue
                found[name] = measure(server, request(), asked.seconds)
                print(name, found[name], flush=True)
    day = datetime.datetime.now(datetime.UTC).date()
    head = f"# The dearest questions, {day}\n\n{platform.machine()}, {psutil.cpu_count()} cores\n\n"
    text = head + report(found) + "\n"
    print(text)
    if asked.out:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
