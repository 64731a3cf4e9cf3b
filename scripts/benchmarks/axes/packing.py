"""Measure rows of documents: how full they are, what the table costs, and how fast a step's rows are located.

Lengths are lognormal (median 400, mean 1,000), as web pages have. Times are CPU times, but those of a build
by copies, which share the blocks as in a server, are times of a clock. `--only 1e8` packs 10^8 documents,
which takes 8 GiB and some minutes.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.packing import Packing, build
from corpus_server.read.apart import map_in_copies, run_apart
from corpus_server.work import Budget
from scripts.benchmarks.measure import Columns, Rounds
from scripts.benchmarks.report import Options, Report

HELP = "rows of documents: fill, table, build time and locating rows"

Lengths = NDArray[np.int64]

SEQ_LENS, QUICK_SEQ_LENS = (1024, 2048, 8192, 32_768, 131_072), (1024, 32_768)
SIZES, QUICK_SIZES = {"1e6": 10**6, "1e7": 10**7, "1e8": 10**8}, (3000,)
DEFAULT_SIZES = ("1e6", "1e7")
BLOCK_DOCUMENTS = 2**18
ROWS = 512

BUILD, COPIES, LOCATE = "build_cpu_seconds_per_1e8", "build_seconds_per_1e8", "locate_ms"
BYTES, FILL = "bytes_per_document", "fill"
TABLES: Columns = {
    BUILD: ("build, CPU s for 10^8 documents", ".2f"),
    COPIES: ("build by copies, s for 10^8 documents", ".2f"),
    LOCATE: (f"{ROWS} rows located, CPU ms", ".2f"),
    BYTES: ("bytes a document", ".2f"),
    FILL: ("fill %", ".3f"),
}
WANTED_FILL, MOST_BYTES, MOST_MS = 99.9, 8.0, 1.0
MOST_SECONDS = {2048: 3.0, 32_768: 30.0}
LOCATED_SEQ_LEN = 2048


def measure(options: Options) -> Report:
    """Build and use tables of growing size."""
    report = Report(data={}, tables=[])
    sizes = [SIZES[name] for name in options.chosen(list(SIZES)) if name in (options.only or DEFAULT_SIZES)]
    for documents in QUICK_SIZES if options.quick else sizes:
        rounds = Rounds(f"tables of {documents:,} documents", TABLES)
        lengths = lognormal(documents)
        for seq_len in QUICK_SEQ_LENS if options.quick else SEQ_LENS:
            name = f"seq_len {seq_len:,}"
            for epoch in range(options.rounds if documents <= SIZES["1e7"] else 1):
                rounds.add(name, build_and_locate(lengths, seq_len, epoch))
            report.targets.append(rounds.target(name, FILL, "at least", WANTED_FILL))
            report.targets.append(rounds.target(name, BYTES, "at most", MOST_BYTES))
            if seq_len in MOST_SECONDS:
                report.targets.append(rounds.target(name, COPIES, "at most", MOST_SECONDS[seq_len]))
            if seq_len == LOCATED_SEQ_LEN:
                report.targets.append(rounds.target(name, LOCATE, "at most", MOST_MS))
        report.data[rounds.title] = rounds.summary()
        report.tables.append(rounds.table())
    return report


def build_and_locate(lengths: Lengths, seq_len: int, epoch: int) -> dict[str, float]:
    """Build the table of a source, and locate the rows of some steps in it."""
    starts, shard_ends = lengths.cumsum() - lengths, np.array([lengths.sum()])
    random = np.random.default_rng(epoch)
    began = time.process_time()
    table = build(starts, lengths, shard_ends, seq_len=seq_len, block_documents=BLOCK_DOCUMENTS)
    seconds = time.process_time() - began
    packing = Packing(table, seq_len=seq_len, key=7)
    epochs = np.array([epoch], dtype=np.uint64)
    milliseconds = []
    for _ in range(15):
        rows = random.integers(0, packing.num_rows, ROWS).astype(np.uint64)
        began = time.process_time()
        slots, _ = packing.slots(rows, epochs)
        classes = packing.classes(slots)
        packing.tokens(packing.pieces_at(slots, epochs, classes), classes)
        milliseconds.append(1e3 * (time.process_time() - began))
    predictions = np.maximum(lengths - 1, 0)
    used = int(predictions.sum() - (-predictions // seq_len).sum())
    return {
        BUILD: seconds * 1e8 / lengths.size,
        COPIES: run_apart("the build", Budget(), build_by_copies, lengths.size, seq_len) * 1e8 / lengths.size,
        LOCATE: float(np.median(milliseconds)),
        BYTES: packing.num_bytes / lengths.size,
        FILL: 100 * used / (packing.num_rows * (seq_len + 1)),
    }


def build_by_copies(num_documents: int, seq_len: int) -> float:
    """Return how long copies of this process, which may have one thread only, take to build a table."""
    lengths = lognormal(num_documents)
    starts, shard_ends = lengths.cumsum() - lengths, np.array([lengths.sum()])
    shape = {"seq_len": seq_len, "block_documents": BLOCK_DOCUMENTS}
    began = time.perf_counter()
    build(starts, lengths, shard_ends, **shape, run=map_in_copies)
    return time.perf_counter() - began


def lognormal(number: int) -> Lengths:
    """Return lengths with median 400 and mean 1,000."""
    drawn = np.random.default_rng(26).lognormal(np.log(400), np.sqrt(2 * np.log(2.5)), number)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)
