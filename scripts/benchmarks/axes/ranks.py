"""Measure balanced ranks: what attention within documents costs the dearest rank, with and without.

Documents are lognormal (median 400, mean 1,000, as web pages have), their rows drawn at random, as a shuffled
plan has them. A rank costs the sum of tokens squared over the pieces of its rows. Since a step ends with its
slowest rank, that rank's cost over the mean is how much longer attention takes than it would at best. A round
is a step. Times are CPU times of a step that is not kept.
"""

from __future__ import annotations

import time

import numpy as np

from corpus_server.plan.dealing import deal
from corpus_server.plan.packing import Packing, build
from scripts.benchmarks.axes.packing import BLOCK_DOCUMENTS, QUICK_DOCUMENTS, ROWS, lognormal
from scripts.benchmarks.measure import Columns, Rounds
from scripts.benchmarks.report import Options, Report

HELP = "balanced ranks: attention's cost of the dearest rank, with and without, and the time to deal a step"

SEQ_LENS, QUICK_SEQ_LENS = (2048, 8192, 32_768), (1024,)
SHAPES = ((8, 8), (8, 64), (64, 8), (64, 16))
"""Ranks, and rows of each."""
STEPS = 50
PLAIN, DEALT, MILLISECONDS = "plain", "dealt", "milliseconds"
COLUMNS: Columns = {
    PLAIN: ("dearest rank / mean", ".3f"),
    DEALT: ("the same, balanced", ".3f"),
    MILLISECONDS: ("a step dealt, CPU ms", ".3f"),
}
WANTED_MS = 1.0
"""Of 512 rows."""


def measure(options: Options) -> Report:
    """Deal steps over ranks, and compare with ranks that have neighbouring rows."""
    options = options.in_force()
    lengths = lognormal(QUICK_DOCUMENTS if options.quick else BLOCK_DOCUMENTS)
    starts, shard_ends = lengths.cumsum() - lengths, np.array([lengths.sum()])
    steps = 2 if options.quick else STEPS
    report = Report(data={}, tables=[])
    for seq_len in QUICK_SEQ_LENS if options.quick else SEQ_LENS:
        table = build(starts, lengths, shard_ends, seq_len=seq_len, block_documents=BLOCK_DOCUMENTS)
        packing = Packing(table, seq_len=seq_len, key=7)
        rounds = Rounds(f"{lengths.size:,} documents, seq_len {seq_len:,}", COLUMNS)
        for num_ranks, rows in SHAPES:
            name = f"{num_ranks} ranks of {rows} rows"
            for step in range(steps):
                rounds.add(name, _deal(packing, num_ranks, rows, step))
            if num_ranks * rows == ROWS:
                report.targets.append(rounds.target(name, MILLISECONDS, "at most", WANTED_MS))
        report.data[rounds.title] = rounds.summary()
        report.tables.append(rounds.table())
    return report


def _deal(packing: Packing, num_ranks: int, rows: int, step: int) -> dict[str, float]:
    """Return the figures of one step."""
    size = num_ranks * rows
    drawn = np.random.default_rng(step).integers(0, packing.num_rows, size).astype(np.uint64)
    began = time.process_time()
    dealt = deal(packing.costs(drawn), num_ranks)
    seconds = time.process_time() - began
    epochs = np.array([step], dtype=np.uint64)
    slots, borders = packing.slots(drawn, epochs)
    _, tokens = packing.tokens(packing.pieces_at(slots, epochs))
    costs = np.add.reduceat(tokens * tokens, borders[:-1])
    sums = [costs[order].reshape(num_ranks, rows).sum(axis=1) for order in (np.arange(size), dealt)]
    plain, balanced = (float(its.max() / its.mean()) for its in sums)
    return {PLAIN: plain, DEALT: balanced, MILLISECONDS: 1e3 * seconds}
