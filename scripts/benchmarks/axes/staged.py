"""Measure a corpus whose extents are in the cache of `file://` beside the same file mapped in place.

Two servers, one worker each, in turns; both files lie in the page cache. The difference is what extents cost
a request: they are found, held while windows are copied, and looked at afterwards.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from functools import partial
from urllib.request import urlopen

from corpus_client import CorpusLoader
from scripts.benchmarks.contest import Maker, contest, resident_corpus, shapes_of
from scripts.benchmarks.corpus import NAME
from scripts.benchmarks.expected import document_of
from scripts.benchmarks.measure import DELIVERY, SPEED, Rounds
from scripts.benchmarks.ours import Ours
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import Server, serving

HELP = "extents that are in the cache of file:// beside the same file mapped in place"

MAPPED, STAGED = "mapped", "in the cache"
OF_MAPPED = 0.97


def measure(options: Options) -> Report:
    """Measure both at both shapes."""
    path = resident_corpus(options)
    report = Report(data={}, tables=[])
    with ExitStack() as stack:
        enter = stack.enter_context
        cache = enter(tempfile.TemporaryDirectory(prefix="bench-cache-"))
        limit = str(path.stat().st_size + (1 << 30))
        arguments = ("--cache-dir", cache, "--cache-bytes", limit, "--workers", "1")
        mapped = enter(serving({NAME: path}, arguments=("--workers", "1")))
        staged = enter(serving({NAME: f"file://{path.resolve()}"}, arguments=arguments))
        for shape in shapes_of(options):
            with CorpusLoader(staged.url, plan=document_of(shape), device="cpu") as loader:
                next(loader)
                while _held_bytes(staged) < path.stat().st_size:  # what the plan needs later comes by itself
                    time.sleep(0.1)
            makers: list[Maker] = [
                partial(Ours, MAPPED, mapped, shape, path),
                partial(Ours, STAGED, staged, shape, path),
            ]
            rounds = contest(Rounds(str(shape), DELIVERY), shape, path, options, makers)
            report.tables.extend([rounds.table(), rounds.ratio_table([(STAGED, MAPPED)])])
            report.targets.append(rounds.target(STAGED, SPEED, "at least", OF_MAPPED, to=MAPPED))
            report.data[str(shape)] = rounds.summary()
    return report


def _held_bytes(server: Server) -> float:
    with urlopen(f"{server.url}/metrics") as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("corpus_held_bytes "))
