"""Measure in which stages a server's worker spends its time, by samples of its stacks.

    .venv/bin/pip install py-spy
    .venv/bin/python -m scripts.stages [--before COMMIT] [--seconds 5] [--only KIND ...]

Servers of the commit and of this tree take turns. A loader takes batches from one at a time. *CPU* is the
worker's, in seconds for 10^9 tokens, the sampler's own cost included. The shares are of samples in which a
thread of the worker ran or waited for the interpreter's lock:

    rows       where the rows of a step lie: permutations, tables, searches, views
    check      whether the places lie inside their shards
    copy       tokens from the maps
    send       hashing and writing to the socket
    rest       HTTP, the query, choosing what is sent
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from scripts.benchmarks import corpus
from scripts.benchmarks.__main__ import CACHE
from scripts.benchmarks.axes.rows import NUM_SAMPLES, NUM_TOKENS, documents, served, view
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.ours import Ours
from scripts.benchmarks.servers import Server, checked_out, serving
from scripts.processes import ROOT

SHAPES: Final = (Shape(rows=64, length=1025), Shape(rows=512, length=2049))
PACKED: Final[Mapping[str, Any]] = {"rows": {"documents": {}}}
KINDS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    "windows": ("all", {}),
    "packed rows": ("all", PACKED),
    "Megatron's rows": ("all", {"order": {"megatron": {"num_samples": NUM_SAMPLES // 3}}}),
    "windows of a view": ("view", {}),
    "packed rows of a view": ("view", PACKED),
}
STAGES: Final[Mapping[str, str]] = {
    "rows": r"\bpieces \(\S*/read/bound_plan\.py|/corpus_server/plan/",
    "check": r"\bselect\w* \(\S*/read/gather\.py",
    "copy": r"\bread \(\S*/read/gather\.py",
    "send": r"/corpus_server/http/send\.py",
}
"""Patterns of frames; a stack is in the first stage of which it has one."""
WAITING: Final = r"/threading\.py|/selectors\.py|/asyncio/runners\.py|\b_work \(\S*/responses/threads\.py"
"""Innermost frames of threads that wait for work, as the event loop does outside Python code."""
SAMPLES_A_SECOND: Final = 200


def stage_of(stack: str) -> str:
    """Return the stage of a stack, as `py-spy record --full-filenames --format raw` writes it."""
    frames = stack.replace(";", " ")
    return next((name for name, pattern in STAGES.items() if re.search(pattern, frames)), "rest")


@contextmanager
def sampled(pid: int, seconds: float) -> Iterator[tuple[subprocess.Popen[bytes], Counter[str]]]:
    """Sample a process; yield the sampler, and the samples by stage, which are there in the end."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        raise SystemExit("py-spy is missing: pip install py-spy")
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "stacks"
        command = f"{program} record --pid {pid} --duration {seconds:.0f} --rate {SAMPLES_A_SECOND}"
        command += f" --full-filenames --format raw --output {out}"
        with subprocess.Popen(command.split(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            yield process, counts
            _, errors = process.communicate()
        if process.returncode:
            raise SystemExit(f"py-spy failed: {errors.decode()}")
        for line in out.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            if not re.search(WAITING, stack.rpartition(";")[2]):
                counts[stage_of(stack)] += int(count)


def clock(pid: int) -> float:
    """Return the CPU time of a process so far."""
    return time.clock_gettime((~pid << 3) | 2)  # see clock_getcpuclockid(3)


def measure(
    server: Server, path: Path, shape: Shape, kind: str, seconds: float
) -> tuple[float, Counter[str]]:
    """Return the CPU of the worker and its samples by stage while batches of a kind are taken."""
    with closing(Ours(kind, server, shape, path, **KINDS[kind][1])) as loader:
        before = {pid: clock(pid) for pid in server.pids}
        for _ in range(200_000_000 // shape.num_tokens):
            loader.next()
        worker = max(server.pids, key=lambda pid: clock(pid) - before[pid])
        with sampled(worker, seconds) as (sampler, counts):
            began, number = clock(worker), 0
            while sampler.poll() is None:
                loader.next()
                number += 1
            used = clock(worker) - began
    return used / number * 1e9 / shape.num_tokens, counts


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="that commit's server beside this tree's")
    parser.add_argument("--seconds", type=float, default=5, help="of each kind; default %(default)s")
    parser.add_argument("--only", action="append", choices=list(KINDS), help="this kind; may be repeated")
    given = parser.parse_args()
    path = documents(CACHE, NUM_TOKENS)
    corpora = {"all": served(path), "view": view(path)}
    corpus.warm(path)
    with checked_out(given.before) if given.before else nullcontext() as before:
        trees = {given.before: before} if before else {}
        trees |= {"this tree": ROOT}
        print(f"| what | server | CPU | {' | '.join([*STAGES, 'rest'])} |\n|---|---|--:|{'--:|' * 5}")
        for kind in given.only or KINDS:
            for shape in SHAPES:
                for name, tree in trees.items():
                    with serving({corpus.NAME: corpora[KINDS[kind][0]]}, tree=tree) as server:
                        cpu, counts = measure(server, path, shape, kind, given.seconds)
                    shares = [f"{counts[each] / counts.total():.0%}" for each in (*STAGES, "rest")]
                    print(f"| {kind}, {shape} | {name} | {cpu:.2f} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
