"""Measure how long a first batch takes, and a server until it is ready.

A loader's first batch is timed in a fresh process, where everything happens for the first time, with a plan
that the server has not seen; imports are not counted. A server's time runs from starting the process to
`/readyz` answering 200. Neither may grow with the corpus.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np

from scripts.benchmarks import corpus
from scripts.benchmarks.measure import Rounds
from scripts.benchmarks.report import Options, Report
from scripts.benchmarks.servers import serving
from scripts.processes import output_of

HELP = "time from CorpusLoader(...) to the first batch, and from starting a server to ready"

SIZES, SHARDS = (10**6, 10**12), (1, 1000)
ROWS, SEQ_LEN, SHARD_TOKENS = 64, 1024, 10_000
FIRST_BATCH_MS, READY_MS = 50.0, 1500.0
MS = "milliseconds"

LOADER = """
import json, sys, time
from corpus_client import CorpusLoader
arguments = json.loads(sys.argv[1])
began = time.perf_counter()
with CorpusLoader(device="cpu", **arguments) as loader:
    batch = next(loader)
    seconds = time.perf_counter() - began
assert batch.step == 0 and batch.inputs.shape[0] == arguments["global_batch_size"], batch.inputs.shape
print(seconds)
"""


def measure(options: Options) -> Report:
    """Measure loaders over corpora of two sizes and servers of few and many shards, in turn."""
    rounds = Rounds("start", {MS: ("ms", ",.0f")})
    corpora = {f"tokens-{size}": corpus.sparse(options.cache, size) for size in SIZES}
    folders = {number: _shards(options.cache, number) for number in (SHARDS[:1] if options.quick else SHARDS)}
    seeds = itertools.count()
    with serving(corpora) as server:
        # The first turn brings programs and libraries into the page cache.
        for turn in range(options.quick, options.rounds + 1):
            for name in corpora:
                plan = {"corpus": name, "seq_len": SEQ_LEN, "global_batch_size": ROWS, "seed": next(seeds)}
                seconds = output_of(["-c", LOADER, json.dumps({"urls": server.url, **plan})])
                if turn:
                    rounds.add(f"first batch, {name}", {MS: float(seconds) * 1e3})
    for _ in range(options.rounds):
        for number, folder in folders.items():
            with serving({corpus.NAME: folder}) as server:
                rounds.add(f"server ready, shards: {number:,}", {MS: server.ready_seconds * 1e3})
    targets = [
        rounds.target(name, MS, "at most", FIRST_BATCH_MS if name.startswith("first") else READY_MS)
        for name in rounds.values
    ]
    return Report(data=rounds.summary(), tables=[rounds.table()], targets=targets)


def _shards(cache: Path, number: int) -> Path:
    """Return a folder of raw shards of different tokens, made once."""
    folder = cache / f"shards_{number}x{SHARD_TOKENS}"
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(number):
        path = folder / f"train_{shard:06}.bin"
        if not path.exists():
            draw = np.random.default_rng(shard)
            path.write_bytes(draw.integers(0, corpus.VOCABULARY, SHARD_TOKENS, dtype=np.uint16).tobytes())
    return folder
