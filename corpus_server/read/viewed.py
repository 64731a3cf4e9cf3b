"""The sources of a plan that are views: from their tokens to pieces of the corpora's shards, and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.views import View
from corpus_server.pieces import NO_SHARD, Pieces
from corpus_server.plan.origins import Origins
from corpus_server.plan.ranges import Ranges


class Viewed:
    """The sources of a plan, some of them views; see `Origins`. A view's shards are those of its corpus."""

    def __init__(self, corpora: Mapping[str, Corpus]) -> None:
        self._corpora = list(corpora.values())
        self.num_tokens = tuple(each.base.num_tokens for each in self._corpora)
        counts = [len(each.shards) for each in self._corpora]
        self._first_shard = list(accumulate(counts, initial=0))
        self._source_of_shard = np.arange(len(counts)).repeat(counts)
        self._views = [number for number, each in enumerate(self._corpora) if isinstance(each, View)]
        # First token of each of the plan's shards, in its source and in the source's corpus.
        self._own, self._base = (
            np.array([start for starts in every for start in starts[:-1]], dtype=np.int64)
            for every in zip(*((each.starts, each.base.starts) for each in self._corpora), strict=True)
        )

    def resolve(self, rows: Pieces) -> Pieces:
        """See `Origins.resolve`: a piece of a corpus that is no view stays."""
        places = rows.places
        shards, begins, counts = places.T
        sources = np.where(shards == NO_SHARD, -1, self._source_of_shard[shards])
        owners, parts = [np.flatnonzero(~np.isin(sources, self._views))], []
        for source in self._views:
            its = np.flatnonzero(sources == source)
            starts = begins[its] + self._own[shards[its]]
            found = self._corpora[source].pieces(starts, starts + counts[its])
            found.places[:, 0] += self._first_shard[source]
            empty = its[counts[its] == 0]  # which stay, at the begin of their shards
            parts += [found.places, places[empty] * (1, 0, 0)]
            owners += [its[found.each_once()], empty]
        if not parts:
            return rows
        owner = np.concatenate(owners)
        resolved = np.concatenate([places[owners[0]], *parts])[owner.argsort(kind="stable")]
        borders = np.concatenate(([0], np.bincount(owner, minlength=len(places)).cumsum()))
        return Pieces(resolved, borders[rows.borders])

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
