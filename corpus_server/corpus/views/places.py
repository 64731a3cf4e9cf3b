"""Where the tokens of a view lie in its corpus, and the other way round. Vectorised; nothing is stored.

Within a group of documents comes pass after pass: the documents of multiplicity 1 or more, then those of 2 or
more, and so on, each pass in the order of the corpus. With multiplicities 1, 0, 3, 2 of documents A, B, C, D:

    the view    A C D | C D | C

So of a group only the first token is stored; the rest follows from multiplicities and lengths. A position in
a group lies in the first pass p for which sum(length * min(multiplicity, p)) exceeds the position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.views.file import GROUP, Multiplicities, ViewFile
from corpus_server.corpus.views.laid import Laid, layers_of
from corpus_server.errors import CorpusChanged
from corpus_server.pieces import Int64Array, at_or_below, expanded

_AT_ONCE: Final = 128
"""Groups or passes looked at together: 256 KiB for each array; 0.6 of the time of 2 MB."""

_MAX_LAYERS: Final = 8 * _AT_ONCE
"""Of groups that are laid out together, which have many if their documents have many multiplicities."""


class Found(NamedTuple):
    """Parts of ranges, `(m,)` each, in the order of the ranges: the range's number, half-open tokens."""

    owners: Int64Array
    starts: Int64Array
    stops: Int64Array


class Places:
    """The arithmetic of one view.

    Args:
        file: the view.
        edges: see `Corpus.document_edges`.
        last: from `(k,)` documents to the end of the documents of their shards.
    """

    def __init__(
        self,
        file: ViewFile,
        edges: Callable[[Int64Array, int], Int64Array],
        last: Callable[[Int64Array], Int64Array],
    ) -> None:
        self._file, self._edges, self._last = file, edges, last
        self._groups = file.groups

    def pieces(self, starts: Int64Array, stops: Int64Array) -> Found:
        """Return where the tokens of ranges of the view lie in the corpus, in the order of the view.

        Pieces that touch are one, so a range that is consecutive in the corpus is one piece.

        Args:
            starts, stops: `(k,)`, in the view; empty ranges have no piece.
        """
        token = self._groups.token
        ranges = np.flatnonzero(stops > starts)
        starts, stops = starts[ranges], stops[ranges]
        low = at_or_below(token, starts)
        owners, groups = expanded(low, at_or_below(token, stops - 1) + 1 - low)
        begins = np.maximum(starts[owners] - token[groups], 0)
        ends = np.minimum(stops[owners], token[groups + 1]) - token[groups]
        # Group by group: each is looked at once, whatever number of ranges lie in it.
        order = groups.argsort(kind="stable")
        sorted_groups = groups[order]
        parts = [Found(*(np.empty(0, np.int64) for _ in range(3)))]
        for here in np.split(order, _cuts(sorted_groups)) if order.size else ():
            which, first, last = self._within(groups[here], begins[here], ends[here])
            parts.append(Found(here[which], first, last))
        found = Found(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        order = found.owners.argsort(kind="stable")
        found = Found(*(column[order] for column in found))
        return _merged(Found(ranges[owners[found.owners]], found.starts, found.stops))

    def ranges(self, starts: Int64Array, stops: Int64Array) -> Found:
        """Return where the view has tokens of ranges of the corpus: ascending in each range.

        Args:
            starts, stops: `(k,)`, in the corpus, not empty; each within one shard.
        """
        first = self._groups.first_document
        count = first.size
        if not count:
            return Found(*(np.empty(0, np.int64) for _ in range(3)))
        # The groups that hold the ends, or the next ones; those between are in the view as a whole.
        low, high = self._groups_at(starts), self._groups_at(stops - 1)
        parts = []
        between = np.flatnonzero(high - low > 1)
        token = self._groups.token
        parts.append(Found(between, token[low[between] + 1], token[high[between]]))
        for groups, is_last in ((low, False), (high, True)):
            some = np.flatnonzero((groups < count) & ((high > low) | (not is_last)))
            for at in range(0, some.size, _AT_ONCE):
                here = some[at : at + _AT_ONCE]
                which, begins, ends = self._shown(groups[here], starts[here], stops[here])
                parts.append(Found(here[which], begins, ends))
        found = Found(*(np.concatenate(column) for column in zip(*parts, strict=True)))
        found = Found(*(column[found.stops > found.starts] for column in found))
        order = np.lexsort((found.starts, found.owners))
        return _merged(Found(*(column[order] for column in found)))

    def document(self, number: int) -> tuple[int, int, int]:
        """Return document `number` of the view: the corpus's document, and its tokens in the view."""
        chosen = self._groups.chosen
        group = int(chosen.searchsorted(number, side="right")) - 1
        edges, counts = self._load(np.array([group]))
        lengths = np.diff(edges)
        rest = np.array([number - chosen[group]])
        ones = np.ones_like(lengths)
        passes = _passes(counts, ones, rest)
        rest -= _before(counts, ones, passes)
        member = int(np.flatnonzero(counts[0] >= passes[0])[rest[0]])
        in_pass = lengths[0, :member][counts[0, :member] >= passes[0]].sum()
        start = int(self._groups.token[group] + _before(counts, lengths, passes)[0] + in_pass)
        return int(self._groups.first_document[group]) + member, start, start + int(lengths[0, member])

    def document_at(self, token: int) -> int:
        """Return the number, in the view, of the document that holds a token of the view."""
        group = int(self._groups.token.searchsorted(token, side="right")) - 1
        edges, counts = self._load(np.array([group]))
        lengths = np.diff(edges)
        rest = np.array([token - self._groups.token[group]])
        passes = _passes(counts, lengths, rest)
        left = int((rest - _before(counts, lengths, passes))[0])
        is_in = counts[0] >= passes[0]
        member = int(np.where(is_in, lengths[0], 0).cumsum().searchsorted(left, side="right"))
        before = int(_before(counts, np.ones_like(lengths), passes)[0])
        return int(self._groups.chosen[group]) + before + int(is_in[:member].sum())

    def lengths(self) -> Int64Array:
        """Return the tokens of all documents of the view, in its order."""
        parts = [np.empty(0, np.int64)]
        for at in range(0, self._groups.first_document.size, _AT_ONCE):
            edges, counts = self._load(np.arange(at, min(at + _AT_ONCE, self._groups.first_document.size)))
            lengths = np.diff(edges)
            most = counts.max(axis=1)
            which, passes = expanded(np.ones_like(most), most)
            for first in range(0, which.size, _AT_ONCE):
                some = which[first : first + _AT_ONCE]
                parts.append(lengths[some][counts[some] >= passes[first : first + _AT_ONCE, None]])
        return np.concatenate(parts)

    def extents(self, starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the ranges of the corpus in which the groups of ranges of the view, none empty, lie."""
        token, first = self._groups.token, self._groups.first_document
        low, high = (token.searchsorted(each, side="right") - 1 for each in (starts, stops - 1))
        last = np.minimum(first[high] + GROUP, self._last(first[high])) - 1
        return self._edges(first[low], 0)[:, 0], self._edges(last, 1)[:, 1]

    def check(self, groups: Int64Array) -> None:
        """Raise CorpusChanged unless groups have the tokens that the view was made for."""
        self._load(groups)

    def _groups_at(self, tokens: Int64Array) -> Int64Array:
        """Return the first group that ends behind each token of the corpus; their number if none does."""
        first = self._groups.first_document
        low, high = np.zeros_like(tokens), np.full_like(tokens, first.size)
        while (low < high).any():
            middle = (low + high) // 2
            begins = first[np.minimum(middle, first.size - 1)]
            documents = np.minimum(begins + GROUP, self._last(begins)) - 1
            ends = self._edges(documents, 1)[:, 1]
            is_behind = (ends > tokens) | (low >= high)
            high = np.where(is_behind, np.minimum(middle, high), high)
            low = np.where(is_behind, low, middle + 1)
        return low

    def _load(self, groups: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the edges, `(k, GROUP + 1)`, and the multiplicities, `(k, GROUP)`, of groups."""
        edges, counts = self._read(groups)
        self._check(groups, (np.diff(edges) * counts).sum(axis=1))
        return edges, counts.astype(np.int64)

    def _read(self, groups: Int64Array) -> tuple[Int64Array, Multiplicities]:
        """Do what `_load` does, without `_check`."""
        self._file.file.check_unchanged()
        first = self._groups.first_document[groups]
        return self._edges(first, GROUP), self._file.multiplicities(first, self._last(first))

    def _check(self, groups: Int64Array, num_tokens: Int64Array) -> None:
        """Raise CorpusChanged unless groups have the tokens that the view was made for."""
        token = self._groups.token
        if (num_tokens != token[groups + 1] - token[groups]).any():
            raise CorpusChanged(
                f"{self._file.file.name}: the documents of the corpus end elsewhere than those that the view "
                "was made for",
                remedy="serve the document index that it was made with, or make the view again",
            )

    def _within(
        self, groups: Int64Array, begins: Int64Array, ends: Int64Array
    ) -> tuple[NDArray[np.intp], Int64Array, Int64Array]:
        """Return where positions [begin, end) of ascending groups lie in the corpus: range, start, stop."""
        is_new = np.diff(groups, prepend=-1) > 0
        distinct, of = groups[is_new], is_new.cumsum() - 1
        edges, counts = self._read(distinct)
        passes = layers_of(counts)
        if distinct.size > 1 and np.count_nonzero(passes) > _MAX_LAYERS:
            middle = int(of.searchsorted(distinct.size // 2))
            parts = []
            for first, stop in ((0, middle), (middle, groups.size)):
                which, *places = self._within(groups[first:stop], begins[first:stop], ends[first:stop])
                parts.append((first + which, *places))
            return tuple(map(np.concatenate, zip(*parts, strict=True)))  # type: ignore[return-value]
        laid = Laid(edges, counts, passes)
        self._check(distinct, np.diff(laid.bounds))
        return laid.find(of, begins, ends)

    def _shown(
        self, groups: Int64Array, starts: Int64Array, stops: Int64Array
    ) -> tuple[NDArray[np.intp], Int64Array, Int64Array]:
        """Return where the view has the tokens [start, stop) of the corpus that lie in groups."""
        edges, counts = self._load(groups)
        lengths = np.diff(edges)
        clipped = np.clip(edges, starts[:, None], stops[:, None])
        held = np.diff(clipped)
        most = np.where(held > 0, counts, 0).max(axis=1)
        which, passes = expanded(np.ones_like(most), most)
        parts = [(np.empty(0, np.int64),) * 3]
        for at in range(0, which.size, _AT_ONCE):
            own, its = which[at : at + _AT_ONCE], passes[at : at + _AT_ONCE]
            is_in = counts[own] >= its[:, None]
            table = np.where(is_in, lengths[own], 0)
            before = _before(counts[own], lengths[own], its) + self._groups.token[groups[own]]
            row, member = np.nonzero(is_in & (held[own] > 0))
            origin = before[row] + (table.cumsum(axis=1) - table)[row, member] - edges[own][row, member]
            first, last = clipped[own][row, member], clipped[own][row, member + 1]
            parts.append((own[row], origin + first, origin + last))
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]


def _passes(counts: Int64Array, weights: Int64Array, rest: Int64Array) -> Int64Array:
    """Return the pass, from 1 on, in which each position lies: `(k,)` positions of `(k, GROUP)` documents."""
    low, high = np.ones_like(rest), counts.max(axis=1)
    while (low < high).any():
        middle = (low + high) // 2
        is_before = (weights * np.minimum(counts, middle[:, None])).sum(axis=1) > rest
        high, low = np.where(is_before, middle, high), np.where(is_before, low, np.minimum(middle + 1, high))
    return low


def _before(counts: Int64Array, weights: Int64Array, passes: Int64Array) -> Int64Array:
    """Return how much lies before each pass."""
    before: Int64Array = (weights * np.minimum(counts, passes[:, None] - 1)).sum(axis=1)
    return before


def _cuts(groups: Int64Array) -> NDArray[np.intp]:
    """Return where to cut ascending groups, so that each part has `_AT_ONCE` different ones."""
    begins = np.flatnonzero(np.diff(groups, prepend=-1))
    return begins[_AT_ONCE::_AT_ONCE]


def _merged(found: Found) -> Found:
    """Return the parts with those joined that touch and belong to one range."""
    touches = (found.owners[1:] == found.owners[:-1]) & (found.starts[1:] == found.stops[:-1])
    begins = np.flatnonzero(np.concatenate(([True], ~touches))) if found.owners.size else found.owners
    ends = np.concatenate((begins[1:], [found.owners.size])) - 1 if begins.size else begins
    return Found(found.owners[begins], found.starts[begins], found.stops[ends])
