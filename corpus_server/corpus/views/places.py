"""Where the tokens of a view lie in its corpus, and the other way round. Vectorised; no place is stored.

Within a group of documents comes pass after pass: the documents of multiplicity 1 or more, then those of 2 or
more, and so on, each pass in the order of the corpus. With multiplicities 1, 0, 3, 2 of documents A, B, C, D:

    the view    A C D | C D | C

A range of the view is cut where layers, passes and sections begin (see `file.py`), so that for each part 8
documents are looked at. Look-ups of single documents, and in the other direction, look at a whole group: a
position in it lies in the first pass p for which sum(length * min(multiplicity, p)) exceeds the position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.views.file import GROUP, SECTION, SECTIONS, Layers, Multiplicities, ViewFile
from corpus_server.corpus.views.layers import layers_of, section_checks
from corpus_server.errors import CorpusChanged
from corpus_server.pieces import Int64Array, at_or_below, expanded, steps_of

_Parts = TypeVar("_Parts", "_Passes", "_Sections")

_AT_ONCE: Final = 128
"""Groups or passes looked at together: 256 KiB for each array; 0.6 of the time of 2 MB."""

_INDEXED_AT_ONCE: Final = 1 << 10  # groups

_SECTIONS_AT_ONCE: Final = 1 << 12
"""288 KiB for each array; with a quarter of that, finding takes 1.2 times as long."""


class Found(NamedTuple):
    """Parts of ranges, `(m,)` each, in the order of the ranges: the range's number, half-open tokens."""

    owners: Int64Array
    starts: Int64Array
    stops: Int64Array


class _Passes(NamedTuple):
    """Parts of ranges that lie in one pass of a layer each: `starts` and `stops` count from its begin."""

    owners: Int64Array
    layers: Int64Array
    starts: Int64Array
    stops: Int64Array


class _Sections(NamedTuple):
    """Parts of ranges that lie in one section of a pass each."""

    owners: Int64Array
    sections: Int64Array
    starts: Int64Array
    stops: Int64Array


class Places:
    """The arithmetic of one view; whoever calls it sees to it that the file is unchanged.

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
        self._layers = file.layers or self._index()

    def pieces(self, starts: Int64Array, stops: Int64Array) -> Found:
        """Return where the tokens of ranges of the view lie in the corpus, in the order of the view.

        Pieces that touch are one, so a range that is consecutive in the corpus is one piece.

        Args:
            starts, stops: `(k,)`, in the view; empty ranges have no piece.
        """
        ranges = np.flatnonzero(stops > starts)
        sections = self._in_sections(self._in_passes(ranges, starts[ranges], stops[ranges]))
        parts = [
            self._in_documents(_Sections(*(column[at : at + _SECTIONS_AT_ONCE] for column in sections)))
            for at in range(0, sections.owners.size, _SECTIONS_AT_ONCE)
        ]
        return _merged(_joined(parts))

    def _in_passes(self, ranges: Int64Array, starts: Int64Array, stops: Int64Array) -> _Passes:
        """Return parts of ranges of the view, none empty, that lie in one pass of a layer each."""
        token, ends = self._layers.token, self._layers.ends[:, -1]
        low = at_or_below(token, starts)
        high, far = low.copy(), np.flatnonzero(token[low + 1] < stops)
        high[far] = at_or_below(token, stops[far] - 1)
        part, layers = expanded(low, high + 1 - low)
        starts, stops = _clipped(starts[part], stops[part], token[layers], token[layers + 1])
        found = _not_empty(_Passes(ranges[part], layers, starts, stops))
        sizes = ends[found.layers].astype(np.int64)
        if (found.stops <= sizes).all():  # as in a view that repeats nothing
            return found
        low, high = found.starts // sizes, (found.stops - 1) // sizes
        part, passes = expanded(low, high + 1 - low)
        owners, layers, starts, stops = (column[part] for column in found)
        passes *= sizes[part]
        return _Passes(owners, layers, *_clipped(starts, stops, passes, passes + sizes[part]))

    def _in_sections(self, passes: _Passes) -> _Sections:
        """Return parts of parts that lie in one section each."""
        ends = self._layers.ends.ravel()
        low = _place_in_row(ends, SECTIONS, SECTIONS * passes.layers, passes.starts)
        high, far = low.copy(), np.flatnonzero(ends[low] < passes.stops)
        high[far] = _place_in_row(ends, SECTIONS, SECTIONS * passes.layers[far], passes.stops[far] - 1)
        part, sections = expanded(low, high + 1 - low)
        owners, _, starts, stops = (column[part] for column in passes)
        until = ends[sections].astype(np.int64)
        begins = np.where(sections % SECTIONS > 0, ends[sections - 1], 0)
        starts, stops = _clipped(starts, stops, begins, until)
        return _not_empty(_Sections(owners, sections, starts, stops))

    def _in_documents(self, sections: _Sections) -> Found:
        """Return where parts of sections lie in the corpus."""
        owners, numbers, starts, stops = sections
        layers, within = numbers // SECTIONS, numbers % SECTIONS
        groups = self._layers.group[layers]
        first = self._groups.first_document[groups] + SECTION * within
        edges = self._edges(first, SECTION)
        if (
            section_checks(edges[:, :-1], edges[:, -1])
            != self._layers.checks.ravel()[SECTIONS * groups + within]
        ).any():
            raise self._changed()
        # All rows as one line; the end of the last document of each counts as a document that is not held.
        # Documents of the next shard have no tokens here.
        edges = edges.ravel()
        counts = self._file.multiplicities(first, SECTION + 1)
        held = counts >= self._layers.reached[layers, None]
        held[:, SECTION] = False
        lengths = steps_of(edges)
        lengths *= held.ravel()
        ends = lengths.cumsum()
        before = np.append(0, ends[SECTION :: SECTION + 1][:-1])
        starts, stops = starts + before, stops + before
        rows = (SECTION + 1) * np.arange(owners.size)
        low, high = (_place_in_row(ends, SECTION, rows, each) for each in (starts, stops - 1))
        part, members = expanded(low, high + 1 - low)
        some = np.flatnonzero(lengths[members])
        part, members = part[some], members[some]
        until = ends[members]
        starts, stops = _clipped(starts[part], stops[part], until - lengths[members], until)
        return Found(owners[part], starts + edges[members], stops + edges[members])

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

    def _index(self) -> Layers:
        """Return the layers of a view of version 1, whose file lacks them: 0.7 s for 10^7 documents."""
        count, parts = self._groups.first_document.size, []
        for at in range(0, count, _INDEXED_AT_ONCE):
            groups = np.arange(at, min(at + _INDEXED_AT_ONCE, count))
            self.check(groups)
            parts.append(layers_of(*self._read(groups)))
        return Layers.joined(parts)

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
        token = self._groups.token
        if ((np.diff(edges) * counts).sum(axis=1) != token[groups + 1] - token[groups]).any():
            raise self._changed()
        return edges, counts.astype(np.int64)

    def _read(self, groups: Int64Array) -> tuple[Int64Array, Multiplicities]:
        """Do what `_load` does, without its check."""
        first = self._groups.first_document[groups]
        counts = self._file.multiplicities(first, GROUP)
        counts *= np.arange(GROUP) < (self._last(first) - first)[:, None]  # not of the next shard
        return self._edges(first, GROUP), counts

    def _changed(self) -> CorpusChanged:
        return CorpusChanged(
            f"{self._file.file.full_name}: the documents of the corpus end elsewhere than those that the "
            "view was made for",
            remedy="serve the document index that it was made with, or make the view again",
        )

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


def _place_in_row(ends: NDArray[Any], width: int, first: Int64Array, numbers: Int64Array) -> Int64Array:
    """Return the place of the first end above each number among the `width` ones from `first` on."""
    found, half = first, width // 2
    while half:
        step = (ends[half - 1 :].take(found) <= numbers).astype(np.int64)
        step *= half
        found = found + step
        half //= 2
    return found


def _clipped(
    starts: Int64Array, stops: Int64Array, begins: Int64Array, ends: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return the parts of ranges that lie in [begin, end), counted from its begin."""
    return np.maximum(starts, begins) - begins, np.minimum(stops, ends) - begins


def _not_empty(parts: _Parts) -> _Parts:
    """Return the parts without those in layers or sections that have no token."""
    some = parts.starts < parts.stops
    return parts if some.all() else type(parts)(*(column[some] for column in parts))


def _joined(parts: list[Found]) -> Found:
    if len(parts) == 1:
        return parts[0]
    parts = [Found(*(np.empty(0, np.int64) for _ in range(3))), *parts]
    return Found(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _merged(found: Found) -> Found:
    """Return the parts with those joined that touch and belong to one range."""
    touches = (found.owners[1:] == found.owners[:-1]) & (found.starts[1:] == found.stops[:-1])
    begins = np.flatnonzero(np.concatenate(([True], ~touches))) if found.owners.size else found.owners
    ends = np.concatenate((begins[1:], [found.owners.size])) - 1 if begins.size else begins
    return Found(found.owners[begins], found.starts[begins], found.stops[ends])
