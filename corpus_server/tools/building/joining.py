"""Join the parts, in order, to shards.

A shard holds at most `shard_tokens` tokens and ends where a document ends. Only a document that is longer
than a shard is cut: it begins a shard, and its rest continues in the next ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np

from corpus_server.corpus.formats.documents import documents_path
from corpus_server.corpus.formats.layout import Ends, TokenDtype
from corpus_server.corpus.formats.masks import MASK_DTYPE, WEIGHT_DTYPE, mask_name
from corpus_server.corpus.index import write_ends
from corpus_server.corpus.progress import Meter
from corpus_server.corpus.publish import publishing
from corpus_server.corpus.shards import open_runs
from corpus_server.tools.building.job import BuildOptions
from corpus_server.tools.building.part import LENGTH_DTYPE, PartResult, Tokens, part_path

_PIECE: Final = 1 << 20  # tokens, or documents, that are in memory at a time


class SplitTokens:
    """The token sequence of one split over all parts, read in pieces and never held as a whole.

    Attributes:
        mask_dtype: of its loss masks: float16 if one of them holds a weight, else bool; None without masks.
    """

    def __init__(self, options: BuildOptions, results: Sequence[PartResult], split: str, parts: Path) -> None:
        self._dtype = options.part_dtype
        self._split, self._folder = split, parts
        self._numbers = [result.number for result in results]
        splits = [result.splits[split] for result in results]
        self._starts = list(accumulate((part.num_tokens for part in splits), initial=0))
        self.num_tokens = self._starts[-1]
        self.num_documents = sum(part.num_documents for part in splits)
        # The last document of a running text may lack its end-of-text token.
        last = [int(some[-1]) for some in self.pieces(max(0, self.num_tokens - 1), self.num_tokens)]
        self.num_documents += last not in ([], [options.eot])
        self.num_targets = sum(part.num_targets for part in splits)
        self.mask_dtype: np.dtype[Any] | None = None
        if options.has_masks:
            self.mask_dtype = WEIGHT_DTYPE if any(part.num_weighted for part in splits) else MASK_DTYPE

    def pieces(self, start: int, stop: int) -> Iterator[Tokens]:
        """Yield the tokens [start, stop), some at a time, in the type of the parts."""
        return self._pieces(start, stop, "tokens", self._dtype)

    def masks(self, start: int, stop: int) -> Iterator[Tokens]:
        """Yield the loss mask of the tokens [start, stop), some at a time."""
        return self._pieces(start, stop, "mask", WEIGHT_DTYPE)

    def _pieces(self, start: int, stop: int, kind: str, dtype: np.dtype[Any]) -> Iterator[Tokens]:
        for index in self._within(start, stop):
            base, end = self._starts[index], self._starts[index + 1]
            path = part_path(self._folder, self._numbers[index], f"{self._split}.{kind}")
            last = min(stop, end) - base
            for token in range(max(start - base, 0), last, _PIECE):
                count = min(_PIECE, last - token)
                yield np.fromfile(path, dtype, count, offset=token * dtype.itemsize)

    def ends(self, start: int, stop: int) -> Iterator[Ends]:
        """Yield the ends of documents in (start, stop], some at a time, increasing."""
        end = 0
        for index in self._within(start, stop):
            end = self._starts[index]
            path = part_path(self._folder, self._numbers[index], f"{self._split}.lengths")
            with path.open("rb") as file:
                while data := file.read(_PIECE * LENGTH_DTYPE.itemsize):
                    ends = np.cumsum(np.frombuffer(data, LENGTH_DTYPE)) + np.uint64(end)
                    end = int(ends[-1])
                    inside = ends[(ends > start) & (ends <= stop)]
                    if inside.size:
                        yield inside
        if end < stop == self.num_tokens:
            yield np.array([stop], np.uint64)

    @property
    def kept(self) -> list[Path]:
        """Files with the kept fields of the documents, in order."""
        return [part_path(self._folder, number, f"{self._split}.kept") for number in self._numbers]

    def _within(self, start: int, stop: int) -> range:
        """Return the indices of the parts that hold the tokens [start, stop)."""
        return range(bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop))


def write_shards(
    documents: SplitTokens, folder: Path, *, dtype: TokenDtype, eot: int, shard_tokens: int, written: Meter
) -> None:
    """Write the shards of a split, their loss masks and their document ends; what is there already stays."""
    start = 0
    for number, stop in enumerate(cuts(documents.ends(0, documents.num_tokens), shard_tokens)):
        path = folder / f"{number:06}.npy"
        if path.exists():
            written.add((stop - start) * dtype.itemsize)
        else:
            _write_array(path, dtype, stop - start, _counted(documents.pieces(start, stop), dtype, written))
        mask = path.with_name(mask_name(path.name))
        if documents.mask_dtype is not None and not mask.exists():
            _write_array(mask, documents.mask_dtype, stop - start, documents.masks(start, stop))
        if not documents_path(path).exists():
            (shard,) = open_runs(path)
            with shard, publishing(documents_path(path)) as file:
                base = np.uint64(start)
                write_ends([shard], eot, (ends - base for ends in documents.ends(start, stop)), file)
        start = stop


def _counted(pieces: Iterable[Tokens], dtype: TokenDtype, written: Meter) -> Iterator[Tokens]:
    for piece in pieces:
        yield piece
        written.add(piece.size * dtype.itemsize)


def _write_array(path: Path, dtype: np.dtype[Any], size: int, pieces: Iterable[Tokens]) -> None:
    with publishing(path) as file:
        header = {"descr": dtype.str, "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(file, header)
        for piece in pieces:
            file.write(piece.astype(dtype, copy=False).data)


def cuts(ends: Iterable[Ends], shard_tokens: int) -> Iterator[int]:
    """Yield where shards end, given where documents end.

    >>> list(cuts([np.array([3, 5, 9, 20], np.uint64)], 6))
    [5, 9, 15, 20]
    """
    start = last = 0  # of the shard; the last end of a document that it holds
    for some in ends:
        while (found := int(np.searchsorted(some, start + shard_tokens, "right"))) < some.size:
            if found:
                last = int(some[found - 1])
            # No end inside: the document is longer than a shard.
            start = last = last if last > start else start + shard_tokens
            yield start
        last = int(some[-1])
    if last > start:
        yield last
