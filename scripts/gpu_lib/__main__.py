"""Measure what only a GPU, or a machine with many cores, can show; write each figure as soon as it is there.

`--minutes` ends the run in time. Parts are measured in the order of their worth, with one server and one
corpus for all. What today's file in DIR holds is left out, so that a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.gpu_lib import needs, plots
from scripts.gpu_lib.parts import PARTS
from scripts.gpu_lib.record import QUICK, Record
from scripts.gpu_lib.run import FAILED, LEFT_OUT, SIMULATED
from scripts.processes import ROOT, ending_with_this_process

DONE, MISSED, NOTHING = 0, 1, 3
"""Exit codes: all is well; a cell failed or a figure was missed; nothing could be measured."""

CACHE = ROOT / ".cache" / "gpu"
NUM_TOKENS, QUICK_TOKENS = 2 * 10**8, 200_000
"""Beyond every cache of a CPU, written in seconds."""

CLOSING_SECONDS = 5.0
"""For the pages and plots at the end."""

MAX_WORKERS = 4


class Log:
    """Lines with the seconds since the run began."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def __call__(self, line: str) -> None:
        """Print a line."""
        print(f"[{time.monotonic() - self.began:4.0f} s] {line}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    listed = "\n".join(f"  {name:<10} {part.help}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description=__doc__,
        epilog=f"parts, in the order of their worth:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="after which the run ends (default 8)")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas between")
    parser.add_argument("--results", type=Path, default=ROOT / "scripts" / "results", metavar="DIR")
    parser.add_argument(
        "--again", action="store_true", help="begin anew instead of going on with today's file"
    )
    parser.add_argument("--quick", action="store_true", help="tiny and on any machine; figures mean nothing")
    parser.add_argument("--device", default="cuda", help=f"of torch; '{SIMULATED}' rehearses a quick run")
    chosen = parser.parse_args(arguments)
    names = chosen.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts must be some of {','.join(PARTS)}, got {','.join(unknown)}")
    if chosen.device == SIMULATED and not chosen.quick:
        parser.error(f"--device {SIMULATED} has no speed to measure; give --quick with it")
    # End as after Ctrl-C does, so that no server is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log = Log()
    usable = []
    for name in (name for name in PARTS if name in names):
        if reason := needs.missing(
            need for need in PARTS[name].needs if need != needs.CUDA or not chosen.quick
        ):
            log(f"{name}: left out, {reason}")
        else:
            usable.append(name)
    return _measure(usable, chosen, log) if usable else NOTHING


def _measure(names: list[str], chosen: argparse.Namespace, log: Log) -> int:
    """Measure the parts; write the page and the plots."""
    import torch

    from corpus_client.tools.machine import describe

    date, until = datetime.date.today().isoformat(), log.began + 60 * chosen.minutes - CLOSING_SECONDS
    chosen.results.mkdir(parents=True, exist_ok=True)
    path = chosen.results.absolute() / f"{date}-gpu{'-quick' * chosen.quick}.json"
    if chosen.again:
        path.unlink(missing_ok=True)
    has_device = chosen.device == SIMULATED or torch.cuda.is_available() or not chosen.quick
    device = chosen.device if has_device else "cpu"
    record = Record(
        path,
        {
            "title": f"scripts/gpu, {date}",
            "command": " ".join(["scripts/gpu", *sys.argv[1:]]),
            "machine": describe(torch.device("cpu" if device == SIMULATED else device)),
            "notes": [QUICK] if chosen.quick else [],
        },
    )
    with (
        served(chosen.quick) as (url, corpus, corpus_path),
        tempfile.TemporaryDirectory(prefix="gpu-") as folder,
    ):
        log(f"a server on {url} serves {corpus_path.stat().st_size / 2e6:,.0f} million tokens")
        common = {"device": device, "url": url, "corpus": corpus, "path": str(corpus_path), "folder": folder}
        for name in names:
            job = {
                **common,
                "part": name,
                "quick": chosen.quick,
                "done": list(record.cells(name)),
                "until": until,
            }
            _run_part(job, record, log)
            record.write_page()
    page = record.write_page()
    pictures = plots.draw(record, path.parent)
    log(f"wrote {page}" + "".join(f", {picture.name}" for picture in pictures))
    for figure in (missed := record.missed()):
        log(f"MISSED: {figure}")
    if not record.data["parts"]:
        return NOTHING
    return MISSED if missed or record.failures() else DONE


def _run_part(job: dict[str, Any], record: Record, log: Log) -> None:
    """Run a part in a process of its own until it is done or the time is over."""
    part, left = job["part"], job["until"] - time.monotonic()
    if left <= 0:
        log(f"{part}: left out, the time is over")
        return
    log(f"{part}: {PARTS[part].help}")
    command = [sys.executable, "-m", "scripts.gpu_lib.child", json.dumps(job)]
    num_told = 0
    with subprocess.Popen(
        ending_with_this_process(command), cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        ending = threading.Timer(left, end)
        ending.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                found = json.loads(line)
                _note(part, found["cell"], found["figures"], record, log)
                num_told += 1
            code = process.wait()
        finally:
            ending.cancel()
            end()
    if code == -signal.SIGKILL and time.monotonic() >= job["until"]:
        log(f"{part}: ended, the time is over; what it had measured is written")
    elif code:
        record.add(
            part, "the whole part", {FAILED: f"its process ended with exit code {code}; it says why above"}
        )
        log(f"{part}: FAILED with exit code {code}")
    elif not num_told and not job["done"]:
        log(f"{part}: nothing of it can be measured on {job['device']}")


def _note(part: str, cell: str, figures: dict[str, Any], record: Record, log: Log) -> None:
    """Write a cell and say what became of it."""
    if LEFT_OUT in figures:
        log(f"  {part}, {cell}: left out, {figures[LEFT_OUT]}")
        return
    record.add(part, cell, figures)
    end = f"FAILED, {figures[FAILED]}" if FAILED in figures else f"{figures['took_seconds']:.1f} s"
    log(f"  {part}, {cell}: {end}")


@contextlib.contextmanager
def served(quick: bool) -> Iterator[tuple[str, str, Path]]:
    """Serve one corpus, which lies in the page cache: its URL, its name, its file."""
    from scripts.benchmarks import corpus
    from scripts.benchmarks.servers import serving

    path = corpus.make(CACHE, QUICK_TOKENS if quick else NUM_TOKENS)
    corpus.warm(path)
    workers = max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // 4))
    with serving({corpus.NAME: path}, arguments=["--workers", str(workers)]) as server:
        yield server.url, corpus.NAME, path


if __name__ == "__main__":
    sys.exit(main())
