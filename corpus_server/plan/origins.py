"""Where the tokens of sources lie that are views: virtual sequences over the documents of a corpus.

A plan computes in the tokens of its sources, whatever they are. Only what leaves the arithmetic (pieces of
rows) and what users say in the corpus's own tokens (exclusions, look-ups) is translated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Protocol, Self

import numpy as np

from corpus_server.pieces import Int64Array, Pieces
from corpus_server.plan.ranges import Ranges


class Source(Protocol):
    """A corpus, or a view of one, whose shards are those of the corpus.

    Attributes:
        starts: its first token in each shard; then all its tokens.
    """

    starts: tuple[int, ...]

    @property
    def base(self) -> Source:
        """The corpus: itself, unless it is a view."""

    def pieces(self, starts: Int64Array, stops: Int64Array) -> Pieces:
        """Return where ranges of its tokens lie in the shards, `(k,)` each: a row for each range."""

    def ranges_of(self, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return its tokens that are those of ranges of the corpus, wherever they come: `(m, 2)` ranges."""

    def documents(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the documents of the corpus with tokens in ranges of it, none empty: numbers, `(m,)`.

        Also how many each range has, `(k,)`. Each range lies in one shard.
        """

    def extents(self, starts: Int64Array, stops: Int64Array) -> Int64Array:
        """Return ranges of the corpus that hold the tokens of ranges of it, none empty, `(k, 2)`.

        Others may lie between them.
        """


class Origins:
    """Translates between the sources of a plan, of which some are views, and their corpora.

    Attributes:
        num_tokens: of the corpus of each source.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self.num_tokens = tuple(source.base.starts[-1] for source in sources)
        counts = [len(source.starts) - 1 for source in sources]
        self._first_shard = list(accumulate(counts, initial=0))
        self._views = [number for number, source in enumerate(sources) if is_view(source)]
        # Of each of the plan's shards, then of NO_SHARD.
        self._source_of_shard = np.append(np.arange(len(counts)).repeat(counts), -1)
        self._is_of_view = np.isin(self._source_of_shard, self._views)
        # First token of each of the plan's shards, in its source and in the source's corpus.
        self._own, self._base = (
            np.array([start for starts in every for start in starts[:-1]], dtype=np.int64)
            for every in zip(*((source.starts, source.base.starts) for source in sources), strict=True)
        )

    @classmethod
    def of(cls, corpora: Mapping[str, Source]) -> Self | None:
        """Return what translates between some corpora and their views; None if none is a view."""
        return cls(list(corpora.values())) if any(map(is_view, corpora.values())) else None

    def resolve(self, rows: Pieces) -> Pieces:
        """Return rows of pieces in the corpora's shards for those of pieces in the views'.

        A piece of a corpus that is no view stays.
        """
        places = rows.places
        shards, begins, counts = places.T
        sources, others = self._source_of_shard[shards], np.flatnonzero(~self._is_of_view[shards])
        owners, parts = [others], [places.T.take(others, axis=1)]
        for source in self._views:
            which = np.flatnonzero(sources == source)
            starts = begins[which] + self._own[shards[which]]
            pieces = self._sources[source].pieces(starts, starts + counts[which])
            pieces.places[:, 0] += self._first_shard[source]
            empty = which[counts[which] == 0]  # which stay, at the begin of their shards
            parts += [pieces.places.T, places[empty].T * [[1], [0], [0]]]
            owners += [which[pieces.each_once()], empty]
        if not self._views:
            return rows
        owner = np.concatenate(owners)
        resolved = np.concatenate(parts, axis=1).take(owner.argsort(kind="stable"), axis=1).T
        borders = np.concatenate(([0], np.bincount(owner, minlength=len(places)).cumsum()))
        return Pieces(resolved, borders[rows.borders])

    def ranges(self, source: int, given: Ranges) -> Ranges:
        """Return the tokens of a source that are those of ranges of its corpus, wherever they come."""
        if source not in self._views or not given.total:
            return given
        return Ranges(self._sources[source].ranges_of(*given.bounds.astype(np.int64).T))

    def extents(self, pieces: Int64Array) -> Int64Array:
        """Return which tokens of a corpus's shard hold those of pieces: `(k, 2)`, start, stop.

        Others may lie between them.

        Args:
            pieces: `(k, 3)`: the plan's shard, start, tokens, of which there is one at least.
        """
        shards, starts, counts = pieces.T
        extents = np.stack((starts, starts + counts), axis=1)
        sources = self._source_of_shard[shards]
        for source in self._views:
            which = np.flatnonzero(sources == source)
            own, base = (first[shards[which], None] for first in (self._own, self._base))
            extents[which] = self._sources[source].extents(*(extents[which] + own).T) - base
        return extents


def is_view(source: Source) -> bool:
    """Tell whether a source is a view of a corpus."""
    return source.base is not source
