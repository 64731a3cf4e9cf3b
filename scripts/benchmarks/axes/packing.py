"""Measure rows of documents: how full they are, what the table costs, and how fast a step's rows are located.

Lengths are lognormal (median 400, mean 1,000), as web pages have. Times are CPU times, but those of a build
by copies, which share the blocks as in a server, are times of a clock. `--only 1e8` packs 10^8 documents,
which takes 8 GiB and some minutes.

`--only begin` measures rows that begin with a document, of corpora whose documents end or begin with
end-of-text, beside nanochat's rule: of 1,000 documents in a buffer, a row takes the longest that fits whole;
where none fits, the shortest is cropped to fill the row, and what is cropped is lost.
"""

from __future__ import annotations

import bisect
import itertools
import time
from typing import Any

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
BEGIN, BEGUN_SEQ_LENS, BEGUN_DOCUMENTS = "begin", (1024, 2048, 8192), 2**20
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
UNUSED, LOST, CUT, BEGINS = "unused_percent", "lost_percent", "cut_percent", "begins_percent"
BEGUN: Columns = {
    UNUSED: ("unused %", ".3f"),
    LOST: ("predictions in no row, %", ".2f"),
    CUT: ("documents that fit into a row, and are cut, %", ".2f"),
    BEGINS: ("rows that begin with a document, %", ".1f"),
    BYTES: ("bytes a document", ".2f"),
    BUILD: ("build, CPU s for 10^8 documents", ".2f"),
    LOCATE: (f"{ROWS} rows located, CPU ms", ".2f"),
}
MOST_UNUSED, MOST_LOST, BEGUN_TARGET = 1.0, 2.0, 2048
WANTED_FILL, MOST_BYTES, MOST_MS = 99.9, 8.0, 1.0
MOST_SECONDS = {2048: 3.0, 32_768: 30.0}
LOCATED_SEQ_LEN = 2048


def measure(options: Options) -> Report:
    """Build and use tables of growing size."""
    report = Report(data={}, tables=[])
    names = options.only or (*DEFAULT_SIZES, BEGIN)
    sizes = [SIZES[name] for name in options.chosen([*SIZES, BEGIN]) if name in SIZES and name in names]
    if BEGIN in names:
        measure_begun(options, report)
    for documents in QUICK_SIZES if options.quick and sizes else sizes:
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


def measure_begun(options: Options, report: Report) -> None:
    """Build tables of rows that begin with a document, and crop as nanochat does."""
    lengths = lognormal(QUICK_SIZES[0] if options.quick else BEGUN_DOCUMENTS)
    for seq_len in BEGUN_SEQ_LENS:
        rounds = Rounds(f"rows of {seq_len:,} that begin with a document, of {lengths.size:,}", BEGUN)
        for epoch in range(options.rounds):
            for eot_first in (False, True):
                name = f"end-of-text {'first' if eot_first else 'last'}"
                rounds.add(name, pack_begun(lengths, seq_len, epoch, eot_first=eot_first))
                if not epoch and seq_len == BEGUN_TARGET:
                    report.targets.append(rounds.target(name, UNUSED, "at most", MOST_UNUSED))
                    report.targets.append(rounds.target(name, LOST, "at most", MOST_LOST))
        rounds.add("nanochat's rule", crop(lengths, seq_len))
        report.data[rounds.title] = rounds.summary()
        report.tables.append(rounds.table())


def pack_begun(lengths: Lengths, seq_len: int, epoch: int, *, eot_first: bool) -> dict[str, float]:
    """Return the figures of rows that begin with a document; that they do is counted, and not assumed."""
    began = time.process_time()
    packing = packed(lengths, seq_len, begin=True, eot_first=eot_first)
    seconds = time.process_time() - began
    rows = np.arange(packing.num_rows, dtype=np.uint64)
    slots, borders = packing.slots(rows, np.array([epoch], dtype=np.uint64))
    pieces = packing.pieces_at(slots, np.array([epoch], dtype=np.uint64))
    first = pieces[borders[:-1]]
    starts = lengths.cumsum() - lengths
    begins = packing.tokens(first)[0] == starts[packing.documents(first)]
    total, used = packing.table.num_predictions.tolist()
    # A document that fits into a row is one piece: its own class says so. What lies in several is longer.
    fits = np.flatnonzero(lengths - (not eot_first) <= seq_len)
    cut = np.isin(fits, np.flatnonzero(np.bincount(packing.documents(pieces)) > 1)).sum()
    tokens = used if eot_first else used + packing.num_pieces
    return {
        UNUSED: 100 * (1 - tokens / (packing.num_rows * (seq_len + (not eot_first)))),
        LOST: 100 * (1 - used / total),
        CUT: 100 * cut / lengths.size,
        BEGINS: 100 * begins.mean(),
        BYTES: packing.num_bytes / lengths.size,
        BUILD: seconds * 1e8 / lengths.size,
        LOCATE: locate_ms(packing, np.random.default_rng(epoch)),
    }


def crop(lengths: Lengths, seq_len: int, buffered: int = 1000) -> dict[str, float]:
    """Return the figures of nanochat's rule: a begin-of-text token and the document, cropped to fill rows."""
    coming, row_tokens = iter(lengths.tolist()), seq_len + 1
    buffer = sorted(itertools.islice(coming, buffered))
    lost = cut = num_rows = 0
    while len(buffer) == buffered:
        left = row_tokens
        while left and buffer:
            at = bisect.bisect_right(buffer, left) - 1
            length = buffer.pop(max(at, 0))
            if length > left:
                lost += length - left
                cut += length <= row_tokens
            left -= min(length, left)
            if (more := next(coming, None)) is not None:
                bisect.insort(buffer, more)
        num_rows += 1
    seen = int(lengths.sum()) - sum(buffer)
    return {UNUSED: 0.0, LOST: 100 * lost / seen, CUT: 100 * cut / lengths.size, BEGINS: 100.0}


def packed(lengths: Lengths, seq_len: int, *, begin: bool = False, eot_first: bool = False) -> Packing:
    """Return the rows of a corpus of one shard."""
    starts, shard_ends = lengths.cumsum() - lengths, np.array([lengths.sum()])
    table = build(
        starts,
        lengths,
        shard_ends,
        seq_len=seq_len,
        block_documents=BLOCK_DOCUMENTS,
        begin=begin,
        eot_first=eot_first,
    )
    return Packing(table, key=7)


def build_and_locate(lengths: Lengths, seq_len: int, epoch: int) -> dict[str, float]:
    """Build the table of a source, and locate the rows of some steps in it."""
    began = time.process_time()
    packing = packed(lengths, seq_len)
    seconds = time.process_time() - began
    predictions = np.maximum(lengths - 1, 0)
    used = int(predictions.sum() - (-predictions // seq_len).sum())
    return {
        BUILD: seconds * 1e8 / lengths.size,
        COPIES: run_apart("the build", Budget(), build_by_copies, lengths.size, seq_len) * 1e8 / lengths.size,
        LOCATE: locate_ms(packing, np.random.default_rng(epoch)),
        BYTES: packing.num_bytes / lengths.size,
        FILL: 100 * used / (packing.num_rows * (seq_len + 1)),
    }


def locate_ms(packing: Packing, random: np.random.Generator) -> float:
    """Return how long it takes to locate the pieces of the rows of a step."""
    epochs, milliseconds = np.array([int(random.integers(9))], dtype=np.uint64), []
    for _ in range(15):
        rows = random.integers(0, packing.num_rows, ROWS).astype(np.uint64)
        began = time.process_time()
        slots, _ = packing.slots(rows, epochs)
        classes = packing.classes(slots)
        packing.tokens(packing.pieces_at(slots, epochs, classes), classes)
        milliseconds.append(1e3 * (time.process_time() - began))
    return float(np.median(milliseconds))


def build_by_copies(num_documents: int, seq_len: int) -> float:
    """Return how long copies of this process, which may have one thread only, take to build a table."""
    lengths = lognormal(num_documents)
    starts, shard_ends = lengths.cumsum() - lengths, np.array([lengths.sum()])
    began = time.perf_counter()
    shape: dict[str, Any] = {"seq_len": seq_len, "block_documents": BLOCK_DOCUMENTS}
    build(starts, lengths, shard_ends, **shape, run=map_in_copies)
    return time.perf_counter() - began


def lognormal(number: int) -> Lengths:
    """Return lengths with median 400 and mean 1,000."""
    drawn = np.random.default_rng(26).lognormal(np.log(400), np.sqrt(2 * np.log(2.5)), number)
    return np.maximum(1, np.rint(drawn)).astype(np.int64)
