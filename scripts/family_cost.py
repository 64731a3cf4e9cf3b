"""Measure families of plans: memory of many members, time of a member's first rows, of the question for all.

    python -m scripts.family_cost --folder DIR [--documents 10000000] [--members 1000]

The corpus is a sparse file of zeros with datatrove's index of documents of 200 tokens on average: what the
tokens are costs nothing. Its metadata has a column of as many texts as documents, one of 50,000 sites, and
one of 30 years. Members of each family are made known to one worker; those of a plan without a family take
turns with them, step by step. Times are from the request to the last byte, CPU is that of the worker. What
the columns take of memory is measured after that of the years, by which pyarrow is loaded.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from scripts.processes import HOST, claim_port, is_ready, running

SEQ_LEN: Final = 512
ROWS: Final = 64
STEPS: Final = 40
MIB: Final = 2**20
FAMILIES: Final[Mapping[str, dict[str, Any]]] = {
    "leaves out a tenth": {"leave_out": 0.1},
    "leaves out 0.15, doubles 0.1": {"leave_out": 0.15, "double": 0.1},
}


def write(folder: Path, num_documents: int) -> None:
    """Write the corpus with its metadata, unless it is there."""
    if (folder / "web.ds.index").exists():
        return
    (folder / "documents").mkdir(parents=True)
    lengths = 1 + np.random.default_rng(0).geometric(1 / 199, num_documents)
    with (folder / "web.ds").open("wb") as file:
        file.truncate(2 * int(lengths.sum()))
    with pq.ParquetWriter(
        folder / "documents" / "0.parquet",
        pa.schema({"url": pa.string(), "site": pa.string(), "year": pa.int64()}),
    ) as writer:
        for first in range(0, num_documents, 1 << 17):
            numbers = range(first, min(first + (1 << 17), num_documents))
            urls = [f"https://www.example.org/{number}/{number * 7919 % 9973}" for number in numbers]
            sites = [f"{number * 7919 % 50_000}.org" for number in numbers]
            writer.write(pa.table({"url": urls, "site": sites, "year": [number % 30 for number in numbers]}))
    (folder / "web.ds.index").write_bytes(lengths.cumsum().astype("<u8").tobytes())


class Server:
    """One worker over the corpus.

    Args:
        worker: its process.
    """

    def __init__(self, port: int, worker: psutil.Process) -> None:
        self._connection = http.client.HTTPConnection(HOST, port, timeout=600)
        self._worker = worker

    def ask(self, method: str, target: str, document: object = None) -> tuple[float, bytes]:
        """Return the milliseconds of a request, and the body of its response."""
        began = time.perf_counter()
        while True:
            self._connection.request(method, target, None if document is None else json.dumps(document))
            response = self._connection.getresponse()
            body = response.read()
            if response.status != 503:  # a table is being built
                break
            time.sleep(0.05)
        if response.status != 200:
            raise SystemExit(f"{target}: {response.status} {body!r}")
        return 1000 * (time.perf_counter() - began), body

    def post(self, rows: str, family: Mapping[str, Any] | None) -> tuple[float, str]:
        """Make a plan known; return milliseconds and its id."""
        stage = {"global_batch_size": ROWS, "mixture": {"web": 1}}
        document = {"seq_len": SEQ_LEN, "rows": rows, "stages": [stage]}
        document |= {} if family is None else {"family": family}
        seconds, body = self.ask("POST", "/v1/plans", document)
        return seconds, json.loads(body)["id"]

    def rows(self, plan: str, step: int) -> float:
        """Return the milliseconds of a step's rows, located."""
        return self.ask("GET", f"/v1/indices?plan={plan}&step={step}")[0]

    def cpu(self) -> float:
        """Return seconds of CPU that the worker took."""
        times = self._worker.cpu_times()
        return float(times.user + times.system)

    def memory(self) -> float:
        """Return MiB that the worker has, without the files that it maps, which all plans share."""
        return self._status("RssAnon")

    def peak(self, *, is_new: bool = False) -> float:
        """Return MiB that the worker took at most, mapped files included; begin anew before."""
        if is_new:
            Path(f"/proc/{self._worker.pid}/clear_refs").write_text("5")
        return self._status("VmHWM")

    def _status(self, name: str) -> float:
        text = Path(f"/proc/{self._worker.pid}/status").read_text()
        return int(text.split(f"{name}:")[1].split()[0]) / 1024


def measure(server: Server, rows: str, num_members: int) -> None:
    """Print the figures of one kind of rows."""
    first, plain = server.post(rows, None)
    print(f"{rows}: bound for the first time in {first / 1000:.1f} s")
    for name, fields in FAMILIES.items():
        family = {"seed": 7, **fields}
        first, _ = server.post(rows, {**family, "member": num_members})
        before, made, batches = server.memory(), [], []
        plans = []
        for member in range(num_members):
            seconds, plan = server.post(rows, {**family, "member": member})
            plans.append(plan)
            made.append(seconds)
            batches.append(server.rows(plan, 0))
        grown = server.memory() - before
        asked = []
        for number in range(20):
            target = f"/v1/plans/{plans[0]}/members?document={number * 997}&count={num_members}"
            asked.append(server.ask("GET", target)[0])
        own, others, cpu = [], [], [server.cpu()]
        for step in range(1, STEPS):
            own.append(server.rows(plans[-1], step))
            cpu.append(server.cpu())
            others.append(server.rows(plain, step))
            cpu.append(server.cpu())
        used = np.diff(cpu) * 1000
        its_cpu, other_cpu = used[::2].mean(), used[1::2].mean()
        print(
            f"  {name}: first member {first / 1000:.1f} s, {num_members} members {grown:.0f} MiB; median ms: "
            f"posted {statistics.median(made):.1f}, first rows {statistics.median(batches):.1f}, all members "
            f"asked {statistics.median(asked):.0f} (at most {max(asked):.0f}), rows of a step "
            f"{statistics.median(own):.2f} (CPU {its_cpu:.2f}), without a family "
            f"{statistics.median(others):.2f} (CPU {other_cpu:.2f})"
        )


def main() -> None:
    """Measure, and print what a dated result says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=10**7)
    parser.add_argument("--members", type=int, default=1000)
    options = parser.parse_args()
    write(options.folder, options.documents)
    for what in ("windows", "documents", "site", "url"):
        port = claim_port()
        with tempfile.TemporaryDirectory() as state_dir:
            command = [
                sys.executable,
                "-m",
                "corpus_server",
                "serve",
                f"web={options.folder},eot=0,dtype=uint16",
            ]
            command += ["--port", str(port), "--workers", "1", "--state-dir", state_dir]
            with running(command, ready=partial(is_ready, f"http://{HOST}:{port}")) as process:
                children = psutil.Process(process.pid).children()
                (worker,) = [each for each in children if each.name() == "corpus-worker"] or children
                server = Server(port, worker)
                if what in ("windows", "documents"):
                    measure(server, what, options.members)
                    continue
                server.post("windows", {"leave_out": 0.1, "member": 0, "by": "year"})
                before = server.peak(is_new=True)
                seconds, _ = server.post("windows", {"leave_out": 0.1, "member": 0, "by": what})
                print(
                    f"by {what}: {seconds / 1000:.1f} s, at most {server.peak() - before:.0f} MiB more than "
                    f"before, of which {options.documents * 8 / MIB:.0f} MiB are 8 bytes a document"
                )


if __name__ == "__main__":
    main()
