"""Measure what copying rows of several pieces costs beside windows of as many tokens, in CPU time.

    python -m scripts.piece_copies [ROUNDS]

Rows join random pieces of two shards, cut as documents with a median of 400 tokens (lognormal) would be, and
are read as responses read them, 896 KiB at a time. Every round reads other places. *Slices* are a loop.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from corpus_server.corpus.shards import Shard, open_runs
from corpus_server.plan.rows import Pieces
from corpus_server.read.gather import Gatherer, Selection
from corpus_server.read.pieces import PieceSelection
from corpus_server.read.reading import PIECE_BYTES

SHARD_BYTES = 100 << 20
NUM_PARTS = 4  # of 896 KiB, which are located together
MEDIAN_TOKENS, SIGMA = 400, 1.35
WINDOWS, SLICES, CHUNKS, SELECTED = "windows", "slices", "chunks", "chunks with selecting"


def some_pieces(draw: np.random.Generator, row_tokens: int, num_rows: int, shard_tokens: int) -> Pieces:
    """Return rows of pieces at random places of two shards."""
    rows = np.arange(num_rows + 1) * row_tokens
    documents = draw.lognormal(np.log(MEDIAN_TOKENS), SIGMA, rows[-1] // 200).astype(np.int64) + 1
    ends = documents.cumsum()
    cuts = np.union1d(rows, ends[ends < rows[-1]])
    counts = np.diff(cuts)
    places = draw.integers(0, 2, counts.size), draw.integers(0, shard_tokens - row_tokens, counts.size)
    return np.stack((*places, counts), axis=1), np.searchsorted(cuts, rows)


def copy_slices(shards: list[Shard], pieces: np.ndarray) -> np.ndarray:
    """Copy pieces one by one."""
    tokens = np.empty(pieces[:, 2].sum(), shards[0].dtype)
    at = 0
    for number, start, count in pieces.tolist():
        tokens[at : at + count] = shards[number].tokens[start : start + count]
        at += count
    return tokens


def measure(shards: list[Shard], seq_len: int, rounds: int) -> dict[str, float]:
    """Return CPU seconds for 10^9 tokens, by way: medians."""
    draw, gatherer, dtype = np.random.default_rng(0), Gatherer(shards), shards[0].dtype
    row_tokens, shard_tokens = seq_len + 1, shards[0].num_tokens
    part = PIECE_BYTES // (row_tokens * dtype.itemsize)
    num_rows, parts = NUM_PARTS * part, [slice(n * part, (n + 1) * part) for n in range(NUM_PARTS)]
    spent: dict[str, list[float]] = {WINDOWS: [], SLICES: [], CHUNKS: [], SELECTED: []}

    def read(name: str, selection: Selection) -> None:
        began = time.thread_time()
        for each in parts:
            selection.read(each)
        spent[name].append(time.thread_time() - began)

    for _ in range(rounds):
        pieces, borders = some_pieces(draw, row_tokens, num_rows, shard_tokens)
        located = np.stack(
            (draw.integers(0, 2, num_rows), draw.integers(0, shard_tokens - row_tokens, num_rows))
        )
        read(WINDOWS, gatherer.select(located.T, row_tokens, dtype))
        began = time.thread_time()
        for each in parts:
            copy_slices(shards, pieces[borders[each.start] : borders[each.stop]])
        spent[SLICES].append(time.thread_time() - began)
        pieces, borders = some_pieces(draw, row_tokens, num_rows, shard_tokens)
        began = time.thread_time()
        selection = PieceSelection(gatherer, (pieces, borders), dtype)
        selected = time.thread_time() - began
        read(CHUNKS, selection)
        spent[SELECTED].append(selected + spent[CHUNKS][-1])
    return {name: median(its) * 1e9 / (num_rows * row_tokens) for name, its in spent.items()}


def main() -> None:
    """Print a table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    print("| tokens | seq_len | windows, CPU s / 10^9 tokens | slices | chunks | chunks with selecting |")
    print("|---|---|---|---|---|---|")
    for dtype in map(np.dtype, ("uint16", "uint32")):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
            shards: list[Shard] = []
            for number in range(2):
                path = Path(folder) / f"{number}.bin"
                np.random.default_rng(number).integers(
                    0, 50_000, SHARD_BYTES // dtype.itemsize, dtype
                ).tofile(path)
                (shard,) = open_runs(path, dtype=dtype)
                shards.append(opened.enter_context(shard))
                shard.tokens.sum()  # all pages are mapped
            for seq_len in (1024, 2048, 8192):
                found = measure(shards, seq_len, rounds)
                base = found.pop(WINDOWS)
                cells = [f"{seconds / base:.2f} x" for seconds in found.values()]
                print(f"| {dtype} | {seq_len:,} | {base:.2f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
