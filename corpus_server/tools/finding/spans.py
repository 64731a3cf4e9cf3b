"""Runs of n-grams become spans: what an item and a corpus have in common, as long as it goes on in both.

    item      a b c d e f g h              n = 3: abc, bcd, cde are in the corpus, one after another
    corpus    x a b c d e y ...            the span is abcde: 5 of 8 tokens of the item are covered

Coverage is exact, whatever else happens: it needs each n-gram once. The places of one n-gram are the product
of those in the items and those in the corpus, which a phrase that stands everywhere makes endless. So no more
than `num_places` of each are listed, and items of which some are left out say so.

A line of `=` lies in a longer one at every shift. Of spans of an item that overlap in the corpus and are
shifted against each other by less than `2 n` tokens, as few are listed as hold the same tokens of the corpus:

    item      = = = =                      n = 3: ====, ===, at 8 shifts
    corpus    x = = = = = = = = = y        listed are [1, 5), [5, 9) and [6, 10)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.errors import InvalidParameter
from corpus_server.pieces import Int64Array, expanded
from corpus_server.tools.finding.decoded import DecodedText
from corpus_server.tools.finding.items import Encoded
from corpus_server.tools.finding.ngrams import AT_ONCE, NGrams
from corpus_server.tools.finding.scan import Runs

MAX_SPANS: Final = 1 << 21

_NOWHERE: Final = -1  # instead of a document


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """What is common to the items and one corpus.

    Attributes:
        covered: `(items,)`: tokens of each item that lie in an n-gram of the corpus.
        is_cut: `(items,)`: whether more places are known than are listed.
        item, item_start: `(s,)`: of each span the item, and its first token there, counted over its texts.
        place: `(s,)`: where it begins in what was compared: its first token, or the byte of the text.
        start, length: `(s,)`: its first token, corpus-wide, and its tokens. By item, then by place.
        item_length: `(s,)`: its tokens in the item; bytes, where texts are compared.
        first_document, last_document: `(s,)`: those that hold it; -1 where no document is known.
        ranges: `(m, 2)`: all tokens of the corpus that lie in n-grams of items whose share is large enough;
            complete, and ascending.
    """

    covered: Int64Array
    is_cut: NDArray[np.bool_]
    item: Int64Array
    item_start: Int64Array
    place: Int64Array
    start: Int64Array
    length: Int64Array
    item_length: Int64Array
    first_document: Int64Array
    last_document: Int64Array
    ranges: Int64Array


def find_spans(
    runs: Runs,
    ngrams: NGrams,
    encoded: Encoded,
    corpus: Corpus,
    *,
    min_share: float,
    num_places: int,
    text: DecodedText | None = None,
) -> Spans:
    """Return the spans that runs come to.

    Args:
        min_share: spans of items that are covered less are left out.
        num_places: of one n-gram that are listed, in the corpus and in the items.
        text: in which the runs are; None: they are in the tokens of the corpus.

    Raises:
        InvalidParameter: there are more than `MAX_SPANS`.
    """
    found = _found_grams(runs, ngrams)
    covered = _covered(found, ngrams, encoded)
    lengths = np.diff(encoded.item_borders)
    is_listed = (covered > 0) & (covered >= min_share * np.maximum(lengths, 1))
    listing = _Listing(ngrams, encoded, is_listed, num_places)
    spans, ranges = listing.of(runs)
    start, at, num_grams = _extended(spans, runs, listing.gram_at, ngrams, encoded).T
    item = encoded.items_at(at)
    kept = _without_shifted(item, start, at, num_grams + ngrams.n - 1, 2 * ngrams.n)
    is_cut = listing.is_cut(found)
    is_cut[item[~kept]] = True
    start, at, num_grams, item = start[kept], at[kept], num_grams[kept], item[kept]
    order = np.lexsort((at, start, item))
    start, at, item, num_grams = start[order], at[order], item[order], num_grams[order]
    item_length = num_grams + ngrams.n - 1
    place, stop = start, start + item_length
    if text is not None:
        start, stop = _tokens_of(text, start, stop)
        ranges = joined_ranges(np.stack(_tokens_of(text, *ranges.T), axis=1))
    return Spans(
        covered=covered,
        is_cut=is_cut,
        item=item,
        item_start=at - encoded.item_borders[item],
        place=place,
        start=start,
        length=stop - start,
        item_length=item_length,
        first_document=documents_at(corpus, start),
        last_document=documents_at(corpus, stop - 1),
        ranges=ranges,
    )


def _tokens_of(text: DecodedText, start: Int64Array, stop: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return the first token, and the one behind the last, of ranges of a text."""
    return text.tokens_at(start), text.tokens_at(stop - 1) + 1


def documents_in(corpus: Corpus, ranges: Int64Array) -> Int64Array:
    """Return the documents that hold a token of some ranges, ascending, each once."""
    first, last = documents_at(corpus, ranges[:, 0]), documents_at(corpus, ranges[:, 1] - 1)
    known = (first >= 0) & (last >= 0)
    _, numbers = expanded(first[known], (last - first)[known] + 1)
    return np.unique(numbers)


def document_ranges(corpus: Corpus, documents: Int64Array) -> Int64Array:
    """Return the tokens of ascending documents as ranges."""
    edges = corpus.document_edges(documents, 1)
    return joined_ranges(edges[edges[:, 0] < edges[:, 1]])


def documents_at(corpus: Corpus, tokens: Int64Array) -> Int64Array:
    """Return the document that holds each token, -1 where none does or there is no index."""
    if not corpus.num_documents or not tokens.size:
        return np.full(tokens.size, _NOWHERE)
    shards = np.array(corpus.starts).searchsorted(tokens, side="right") - 1
    firsts = np.array(corpus.document_starts)
    low, high = firsts[shards], firsts[shards + 1]
    end = high.copy()
    while (open_ := np.flatnonzero(low < high)).size:
        middle = (low[open_] + high[open_]) // 2
        behind = corpus.document_edges(middle, 1)[:, 1] > tokens[open_]
        high[open_[behind]] = middle[behind]
        low[open_[~behind]] = middle[~behind] + 1
    found = np.full(tokens.size, _NOWHERE)
    there = np.flatnonzero(low < end)
    begins = corpus.document_edges(low[there], 1)[:, 0]
    held = there[begins <= tokens[there]]
    found[held] = low[held]
    return found


def _found_grams(runs: Runs, ngrams: NGrams) -> NDArray[np.bool_]:
    """Tell which n-grams are in the corpus."""
    change = np.zeros(ngrams.tokens.size + 1, dtype=np.int32)
    np.add.at(change, runs[:, 1], 1)
    np.add.at(change, runs[:, 1] + runs[:, 2], -1)
    np.cumsum(change, out=change)
    found = np.zeros(ngrams.keys.size, dtype=bool)
    for places, grams in ngrams.parts():
        found[grams[change[places] > 0]] = True  # runs lie in the items where their n-grams begin first
    return found


def _covered(found: NDArray[np.bool_], ngrams: NGrams, encoded: Encoded) -> Int64Array:
    """Return how many tokens of each item lie in n-grams that were found."""
    change = np.zeros(ngrams.tokens.size + 1, dtype=np.int32)
    for places, grams in ngrams.parts():
        its = places[found[grams]]
        np.add.at(change, its, 1)
        np.add.at(change, its + ngrams.n, -1)
    is_covered = np.cumsum(change, out=change) > 0
    borders = encoded.item_borders
    covered = np.zeros(borders.size - 1, dtype=np.int64)
    has_tokens = np.flatnonzero(np.diff(borders))
    if has_tokens.size:
        covered[has_tokens] = np.add.reduceat(is_covered, borders[has_tokens], dtype=np.int64)
    return covered


class _Listing:
    """Which places of n-grams are listed.

    Attributes:
        gram_at: `(t + 1,) int32`: the n-gram that begins at each token of the items; -1 where none does.
    """

    def __init__(
        self, ngrams: NGrams, encoded: Encoded, is_listed: NDArray[np.bool_], num_places: int
    ) -> None:
        self._ngrams, self._encoded = ngrams, encoded
        self._is_listed, self._num_places = is_listed, num_places
        self.gram_at = np.full(ngrams.tokens.size + 1, -1, dtype=np.int32)
        self._wanted = np.zeros(ngrams.keys.size, dtype=bool)  # n-grams that a listed item holds
        self._counts = np.zeros(ngrams.keys.size, dtype=np.int32)  # of them in the corpus
        self._is_thinned = np.zeros(ngrams.keys.size, dtype=bool)
        self._kept_places = np.ones(ngrams.places.size, dtype=bool)
        first = 0
        for places, grams in ngrams.parts():
            self.gram_at[places] = grams
            self._wanted[grams[is_listed[encoded.items_at(places)]]] = True
            kept = _Repetitions(places, grams, ngrams.n).kept
            self._kept_places[first : first + places.size] = kept
            self._is_thinned[grams[~kept]] = True
            first += places.size

    def of(self, runs: Runs) -> tuple[Int64Array, Int64Array]:
        """Return spans, as their start in the corpus, start in the items, n-grams: `(s, 3)`; and all tokens
        of the corpus that lie in n-grams which are wanted, as ranges.

        Raises:
            InvalidParameter: there are more than `MAX_SPANS`.
        """
        ngrams, most = self._ngrams, self._num_places
        spans = [np.empty((0, 3), np.int64)]
        ranges = [np.empty((0, 2), np.int64)]
        num_spans = 0
        for starts, grams in self._grams(runs):
            ranges.append(_ranges(starts, ngrams.n))
            listed, kept = _first_places(starts, grams, self._counts, most, ngrams.n)
            self._is_thinned[grams[listed & ~kept]] = True
            starts, grams = starts[listed & kept], grams[listed & kept]
            which, places = expanded(ngrams.borders[grams], np.minimum(ngrams.num_places(grams), most))
            which, places = which[self._kept_places[places]], places[self._kept_places[places]]
            at = ngrams.places[places].astype(np.int64)
            its = self._is_listed[self._encoded.items_at(at)]
            ones = np.ones(np.count_nonzero(its), np.int64)
            spans.append(_maximal(starts[which[its]], at[its], ones, self._encoded))
            num_spans += len(spans[-1])
            if num_spans > MAX_SPANS:
                raise InvalidParameter(
                    f"more than {MAX_SPANS:,} places are to be listed",
                    parameter="places",
                    received=most,
                    remedy="list fewer of each n-gram with --places, or look for longer ones with -n",
                )
        joined = np.concatenate(spans)
        start, at, num_grams = joined.T
        return _maximal(start, at, num_grams, self._encoded), joined_ranges(np.concatenate(ranges))

    def is_cut(self, found: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Tell of which listed items more places are known than are listed, after `of`."""
        cut = np.zeros(self._is_listed.size, dtype=bool)
        for places, grams in self._ngrams.parts():
            is_cut = self._is_thinned[grams] | (self._counts[grams] > self._num_places)
            is_cut |= self._ngrams.num_places(grams) > self._num_places
            cut[self._encoded.items_at(places[is_cut & found[grams]])] = True
        return cut & self._is_listed

    def _grams(self, runs: Runs) -> Iterator[tuple[Int64Array, Int64Array]]:
        """Yield where wanted n-grams begin in the corpus, ascending, and which: a bounded number at a time.

        What is yielded is not cut inside a run, so one that has more comes by itself.
        """
        before = runs[:, 2].cumsum() - runs[:, 2]
        first = 0
        while first < len(runs):
            stop = max(first + 1, int(before.searchsorted(before[first] + AT_ONCE)))
            its = runs[first:stop]
            which, starts = expanded(its[:, 0], its[:, 2])
            at = its[:, 1][which] + (starts - its[:, 0][which])
            grams = self.gram_at[at].astype(np.int64)
            wanted = self._wanted[grams]
            yield starts[wanted], grams[wanted]
            first = stop


class _Repetitions:
    """Places of n-grams which overlap others of the same n-gram: those of a repetition.

    Args:
        places, grams: `(p,)`: ordered by n-gram, then by place.

    Attributes:
        is_first: `(p,)`: whether the place overlaps none before.
        kept: `(p,)`: the first and the last one in each n tokens of a repetition: they hold all its tokens.
    """

    def __init__(self, places: Int64Array, grams: Int64Array, n: int) -> None:
        self.is_first = np.ones(places.size, dtype=bool)
        self.is_first[1:] = (grams[1:] != grams[:-1]) | (places[1:] - places[:-1] >= n)
        begins = np.flatnonzero(self.is_first)
        blocks = (places - np.repeat(places[begins], np.diff(begins, append=places.size))) // n
        goes_on = ~self.is_first[1:] & (blocks[1:] == blocks[:-1])
        self.kept = ~(np.append(False, goes_on) & np.append(goes_on, False))[: places.size]


def _first_places(
    starts: Int64Array, grams: Int64Array, count: NDArray[np.int32], num_places: int, n: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Tell which places of n-grams are listed, and which are kept of a repetition; count them.

    Where n-grams follow one another in the corpus, all are as soon as one is: a rare one beside one that
    stands everywhere shows the whole span. A repetition counts as one place.
    """
    order = np.argsort(grams, kind="stable")
    ordered = grams[order]
    repetitions = _Repetitions(starts[order], ordered, n)
    begins = np.flatnonzero(np.diff(ordered, prepend=-1))
    before = repetitions.is_first.cumsum() - 1
    is_first, kept = np.empty(grams.size, dtype=bool), np.empty(grams.size, dtype=bool)
    rank = before - np.repeat(before[begins], np.diff(begins, append=ordered.size))
    is_first[order] = count[ordered] + rank < num_places
    kept[order] = repetitions.kept
    if not begins.size:
        return is_first, kept
    count[ordered[begins]] += np.add.reduceat(repetitions.is_first, begins, dtype=np.int32)
    segments = np.flatnonzero(np.diff(starts, prepend=-2) != 1)
    listed = np.logical_or.reduceat(is_first, segments)
    return np.repeat(listed, np.diff(segments, append=starts.size)), kept


def _without_shifted(
    item: Int64Array, start: Int64Array, at: Int64Array, length: Int64Array, shift: int
) -> NDArray[np.bool_]:
    """Tell which spans are listed: of those shifted by less than `shift`, as few as hold their tokens."""
    order = np.lexsort((start, start - at, item))
    item, start, diagonal = item[order], start[order], (start - at)[order]
    stop = start + length[order]
    linked = np.zeros(order.size, dtype=bool)
    linked[1:] = (item[1:] == item[:-1]) & (np.diff(diagonal) < shift)
    linked[1:] &= (start[1:] < stop[:-1]) & (start[:-1] < stop[1:])
    begins = np.flatnonzero(~linked)
    sizes = np.diff(begins, append=order.size)
    kept = np.ones(order.size, dtype=bool)
    for first, size in zip(begins[sizes > 1].tolist(), sizes[sizes > 1].tolist(), strict=True):
        its = slice(first, first + size)
        kept[its] = False
        kept[first + _cover(start[its], stop[its])] = True
    found = np.empty(order.size, dtype=bool)
    found[order] = kept
    return found


def _cover(start: Int64Array, stop: Int64Array) -> Int64Array:
    """Return the fewest of some ranges that hold what all do, which is one range."""
    order = np.lexsort((-stop, start))
    start, stop = start[order], stop[order]
    reach = np.maximum.accumulate(stop)
    farthest = np.maximum.accumulate(np.where(np.diff(reach, prepend=-1) > 0, np.arange(stop.size), 0))
    chosen, end = [], int(start[0])
    while end < reach[-1]:
        last = int(start.searchsorted(end, side="right")) - 1
        chosen.append(int(farthest[last]))
        end = int(reach[last])
    return order[chosen]


def _maximal(starts: Int64Array, at: Int64Array, counts: Int64Array, encoded: Encoded) -> Int64Array:
    """Join n-grams, or spans of them, that continue one another in the corpus and in a text: `(s, 3)`."""
    order = np.lexsort((starts, starts - at))
    starts, at, counts = starts[order], at[order], counts[order]
    # Of single tokens the last of a text and the first of the next are neighbours, too.
    text = encoded.text_ends.searchsorted(at, side="right")
    follows = np.zeros(starts.size, dtype=bool)
    follows[1:] = (
        (starts[:-1] + counts[:-1] == starts[1:])
        & (at[:-1] + counts[:-1] == at[1:])
        & (text[:-1] == text[1:])
    )
    begins = np.flatnonzero(~follows)
    if not begins.size:
        return np.empty((0, 3), np.int64)
    return np.stack((starts[begins], at[begins], np.add.reduceat(counts, begins)), axis=1)


def _extended(
    spans: Int64Array, runs: Runs, gram_at: NDArray[np.int32], ngrams: NGrams, encoded: Encoded
) -> Int64Array:
    """Extend spans over n-grams that have too many places to be listed, as far as they go on in both.

    Every span then is maximal, whether all its n-grams were listed or one.
    """
    start, at, count = spans.T.copy()
    text = encoded.text_ends.searchsorted(at, side="right")

    def found(starts: Int64Array) -> Int64Array:
        """Return which n-gram begins at tokens of the corpus; -2 where none does."""
        its = runs[:, 0].searchsorted(starts, side="right") - 1
        within = starts - runs[its, 0]
        is_there = (its >= 0) & (within < runs[its, 2])
        return np.where(is_there, gram_at[np.where(is_there, runs[its, 1] + within, 0)], -2)

    for is_before in (True, False):
        left = np.arange(len(spans))
        while left.size:
            offset = np.full(left.size, -1) if is_before else count[left]
            places = at[left] + offset
            is_same = (places >= 0) & (gram_at[places] == found(start[left] + offset))
            is_same &= encoded.text_ends.searchsorted(places, side="right") == text[left]
            left = left[is_same]
            count[left] += 1
            if is_before:
                start[left] -= 1
                at[left] -= 1
    return np.unique(np.stack((start, at, count), axis=1), axis=0)


def _ranges(starts: Int64Array, n: int) -> Int64Array:
    """Return the tokens that n-grams hold which begin at ascending places, as ranges."""
    begins = np.flatnonzero(np.diff(starts, prepend=-n - 1) > n)
    ends = np.append(begins[1:], starts.size) - 1
    return np.stack((starts[begins], starts[ends] + n), axis=1) if starts.size else np.empty((0, 2), np.int64)


def joined_ranges(ranges: Int64Array) -> Int64Array:
    """Join ascending ranges that touch."""
    if not len(ranges):
        return ranges
    begins = np.flatnonzero(np.append(True, ranges[1:, 0] > ranges[:-1, 1]))
    ends = np.append(begins[1:], len(ranges)) - 1
    return np.stack((ranges[begins, 0], ranges[ends, 1]), axis=1)
