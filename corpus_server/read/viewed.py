"""The sources of a plan that are views: from their tokens to pieces of the corpora's shards, and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.views import View
from corpus_server.plan.origins import Origins
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows import NO_SHARD, Pieces


class Viewed:
    """The sources of a plan, some of them views; see `Origins`. A view's shards are those of its corpus."""

    def __init__(self, corpora: Mapping[str, Corpus]) -> None:
        self._corpora = list(corpora.values())
        self.num_tokens = tuple(each.base.num_tokens for each in self._corpora)
        counts = [len(each.shards) for each in self._corpora]
        self._first_shard = list(accumulate(counts, initial=0))
        self._source_of_shard = np.arange(len(counts)).repeat(counts)
        # First token of each of the plan's shards, in its source and in the source's corpus.
        self._own, self._base = (
            np.array([start for starts in every for start in starts[:-1]], dtype=np.int64)
            for every in zip(*((each.starts, each.base.starts) for each in self._corpora), strict=True)
        )

    def resolve(self, pieces: Pieces) -> Pieces:
        """See `Origins.resolve`: a piece of no token, and one of a corpus that is no view, stays."""
        found, borders = pieces
        shards, begins, counts = found.T
        sources = self._source_of_shard[shards]
        owners, parts = [np.arange(len(found))], [found]
        for source, corpus in enumerate(self._corpora):
            if not isinstance(corpus, View):
                continue
            some = np.flatnonzero((sources == source) & (shards != NO_SHARD) & (counts > 0))
            if not some.size:
                continue
            starts = begins[some] + self._own[shards[some]]
            its = corpus.places.pieces(starts, starts + counts[some])
            within = its.starts - self._base[shards[some][its.owners]]
            parts.append(np.stack((shards[some][its.owners], within, its.stops - its.starts), axis=1))
            owners.append(some[its.owners])
            owners[0] = np.setdiff1d(owners[0], some, assume_unique=True)
        if len(parts) == 1:
            return pieces
        parts[0] = found[owners[0]]
        owner = np.concatenate(owners)
        order = owner.argsort(kind="stable")
        counted = np.bincount(owner, minlength=len(found))
        return np.concatenate(parts)[order], np.concatenate(([0], counted.cumsum()))[borders]

    def ranges(self, source: int, given: Ranges) -> Ranges:
        """See `Origins.ranges`."""
        corpus = self._corpora[source]
        if not isinstance(corpus, View) or not given.total:
            return given
        found = corpus.places.ranges(given.starts.astype(np.int64), given.stops.astype(np.int64))
        return Ranges(np.stack((found.starts, found.stops), axis=1))

    def extents(self, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `Origins.extents`."""
        shards, starts, counts = pieces.T
        found = np.stack((starts, starts + counts), axis=1)
        sources = self._source_of_shard[shards]
        for source in np.unique(sources).tolist():
            if isinstance(corpus := self._corpora[source], View):
                some = np.flatnonzero(sources == source)
                own, base = (each[shards[some], None] for each in (self._own, self._base))
                found[some] = np.stack(corpus.places.extents(*(found[some] + own).T), axis=1) - base
        return found


def viewed(corpora: Mapping[str, Corpus]) -> Origins | None:
    """Return what translates between some corpora and their views; None if none is a view."""
    return Viewed(corpora) if any(isinstance(each, View) for each in corpora.values()) else None
