"""Read a corpus once, from its first token to its last, in several processes.

    corpus    [ stretch 0 | stretch 1 | stretch 2 | ... ]     2^24 tokens each, across the borders of shards
    stretch   blocks of 2^18 tokens, each with the n - 1 tokens behind it

What a stretch holds is a table of *runs*: n-grams that begin at consecutive tokens of the corpus and of the
items. A journal keeps the runs of the stretches that are done, so that a pass which was interrupted goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.progress import Progress
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidParameter
from corpus_server.tools.finding.decoded import DecodedText, read_tokens
from corpus_server.tools.finding.ngrams import NGrams
from corpus_server.tools.processes import in_processes

Runs = NDArray[np.int64]
"""`(r, 3)`: where the first n-gram of each run begins in the corpus, where it begins first in the items, and
how many there are."""

STRETCH_TOKENS: Final = 1 << 24
BLOCK_TOKENS: Final = 1 << 18
MAX_RUNS: Final = 1 << 23
"""Of a corpus, 200 MB."""

_HEADER: Final = np.dtype([("stretch", "<i8"), ("count", "<i8"), ("digest", "<u8")])


@dataclass(frozen=True, kw_only=True, slots=True)
class Scan:
    """A pass over a corpus.

    Args:
        spec: of the corpus; of a view its corpus is read.
        n: tokens of an n-gram.
        table: folder of the saved table.
        key: of the items, n and the corpus: what a journal must be of.
        journal: file of what is done; None: nothing is kept.
        by_text: whether the text is read, see `DecodedText`, whose tables are in the folder, too.
    """

    spec: CorpusSpec
    n: int
    table: Path
    key: bytes
    journal: Path | None = None
    by_text: bool = False

    def runs(self, num_tokens: int, itemsize: int, *, num_processes: int, progress: Progress | None) -> Runs:
        """Return all runs, ascending.

        Raises:
            InvalidParameter: there are more than `MAX_RUNS`.
            CorpusServerError: a process ended.
        """
        starts = range(0, num_tokens, STRETCH_TOKENS)
        with ExitStack() as stack:
            journal = None if self.journal is None else stack.enter_context(_Journal(self.journal, self.key))
            found = {} if journal is None else journal.found
            missing = [number for number in range(len(starts)) if number not in found]
            done, made = num_tokens - sum(self._size(number, num_tokens) for number in missing), 0
            count = sum(map(len, found.values()))
            calls = [(self.spec, self.table, self.n, self.by_text, number) for number in missing]
            results: Iterator[tuple[int, Runs]]
            if min(num_processes, len(calls)) > 1:
                results = in_processes(scan_stretch, calls, num_processes=num_processes, what="the pass")
            else:
                results = (scan_stretch(*call) for call in calls)
            if progress is not None:
                progress("scanning", done * itemsize, num_tokens * itemsize, 0)
            for number, runs in results:
                found[number] = runs
                if journal is not None:
                    journal.write(number, runs)
                size = self._size(number, num_tokens)
                done, made, count = done + size, made + size, count + len(runs)
                if progress is not None:
                    progress("scanning", done * itemsize, num_tokens * itemsize, made)
                if count > MAX_RUNS:
                    raise InvalidParameter(
                        f"more than {MAX_RUNS:,} runs of n-grams are in corpus {self.spec.name!r}",
                        parameter="n",
                        received=self.n,
                        remedy="look for longer n-grams with -n, or leave out items that stand everywhere",
                    )
        return np.concatenate([np.empty((0, 3), np.int64), *(found[number] for number in sorted(found))])

    def _size(self, number: int, num_tokens: int) -> int:
        return min(STRETCH_TOKENS, num_tokens - number * STRETCH_TOKENS)


def scan_stretch(spec: CorpusSpec, table: Path, n: int, by_text: bool, number: int) -> tuple[int, Runs]:
    """Return the number of a stretch of a corpus, or of its text, and its runs."""
    corpus, ngrams, text = _opened(spec, table, n, by_text)
    size, dtype = (corpus.num_tokens, corpus.dtype) if text is None else (text.num_tokens, text.dtype)
    start = number * STRETCH_TOKENS
    stop = min(start + STRETCH_TOKENS, size)
    buffer = np.empty(BLOCK_TOKENS + n - 1, dtype=dtype)
    found: list[Runs] = []
    for first in range(start, stop, BLOCK_TOKENS):
        wanted = min(BLOCK_TOKENS, stop - first) + n - 1
        tokens = buffer[: min(wanted, size - first)]
        if text is None:
            read_tokens(corpus, first, tokens)
        else:
            text.read(first, tokens)
        starts, grams = ngrams.find(tokens)
        if starts.size:
            found.append(runs_of(starts + first, ngrams.first(grams)))
    for shard in corpus.shards_of(start, stop) if text is None else corpus.shards:
        shard.file.check_unchanged()
    return number, _joined(np.concatenate(found)) if found else np.empty((0, 3), np.int64)


@lru_cache(maxsize=1)
def _opened(
    spec: CorpusSpec, table: Path, n: int, by_text: bool
) -> tuple[Corpus, NGrams, DecodedText | None]:
    """Return what a process scans, and looks for; it stays open until another is asked for."""
    corpus = Corpus.open(spec)
    return corpus, NGrams.load(table, n), DecodedText.load(table, corpus) if by_text else None


def runs_of(starts: NDArray[np.int64], first: NDArray[np.int64]) -> Runs:
    """Return n-grams as runs."""
    begins = np.flatnonzero((np.diff(starts, prepend=-2) != 1) | (np.diff(first, prepend=-2) != 1))
    return np.stack((starts[begins], first[begins], np.diff(begins, append=starts.size)), axis=1)


def _joined(runs: Runs) -> Runs:
    """Join runs that a border of blocks, or of stretches, cuts."""
    starts, first, counts = runs.T
    cut = np.zeros(len(runs), dtype=bool)
    cut[1:] = (starts[:-1] + counts[:-1] == starts[1:]) & (first[:-1] + counts[:-1] == first[1:])
    begins = np.flatnonzero(~cut)
    if begins.size == len(runs):
        return runs
    return np.stack((starts[begins], first[begins], np.add.reduceat(counts, begins)), axis=1)


class _Journal:
    """The runs of the stretches that are done, in a file; a record that was not completed does not count.

    Attributes:
        found: what it holds, by stretch.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.found: dict[int, Runs] = {}
        self._file = path.open("r+b" if path.exists() else "w+b")
        if self._file.read(len(key)) == key:
            self._read()
        else:
            self._file.seek(0)
            self._file.write(key)
        self._file.truncate()

    def __enter__(self) -> _Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, stretch: int, runs: Runs) -> None:
        data = np.ascontiguousarray(runs, dtype="<i8").tobytes()
        header = np.array((stretch, len(runs), xxhash.xxh3_64_intdigest(data)), dtype=_HEADER)
        self._file.write(header.tobytes() + data)
        self._file.flush()

    def _read(self) -> None:
        end, size = self._file.tell(), os.fstat(self._file.fileno()).st_size
        while True:
            header = self._file.read(_HEADER.itemsize)
            if len(header) < _HEADER.itemsize:
                break
            stretch, count, digest = np.frombuffer(header, dtype=_HEADER)[0].tolist()
            if not 0 <= count <= (size - end) // 24:
                break
            data = self._file.read(24 * count)
            if xxhash.xxh3_64_intdigest(data) != digest:
                break
            self.found[stretch] = np.frombuffer(data, dtype="<i8").reshape(-1, 3)
            end = self._file.tell()
        self._file.seek(end)
