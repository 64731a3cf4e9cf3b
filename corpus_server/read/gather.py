"""Copy rows from the maps of shards into one array.

All maps of a process lie in one address space, so windows of any number of shards are one fancy
index over one strided view that begins at the lowest map:

    address of a window   = address of its shard's token 0 + start * itemsize
    row of the view       = (address - lowest address) / itemsize

NumPy releases the GIL during that copy, for any number of windows and shards. The response is sent from
the array that the copy made: a second copy, into a buffer of the server's own, would cost half as much again.

Rows that join pieces are slices of the same memory, joined by `bytes.join`: at least twice as fast as every
other way that was measured, but it holds the GIL. So one byte of each page is read first, by an index that
releases it: a page that is not in memory is waited for there.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import NO_SHARD, Pieces
from corpus_server.read.memory import READS, Mapped, Span, num_major_faults, strided, touch
from corpus_server.read.readahead import read_ahead
from corpus_server.stores import Extent, Extents, check_unchanged, held

# bytes; NumPy's limit. Maps lie within 2^47 bytes, so only windows of more than 65,536 tokens get
# there. They are so large that copying them one by one costs nothing extra.
_MAX_VIEW_BYTES = 2**63

_SAMPLE_WINDOWS = 16  # looked up in the page cache before all windows of a selection are prefetched

_LOOK_SECONDS = 0.1  # requests look at copies before they begin; a look for each piece halves the rate

_JOINED_BYTES = 1 << 20  # that are copied under the GIL at once, in 0.3 ms; longer rows are copied without it


class Gatherer:
    """Gathers rows of a fixed list of open shards; safe to use from several threads.

    The shards must stay open for as long as the gatherer and its selections are used.

    Args:
        shards: numbered as in locations.
        reads_ahead: once a copy had to wait for the disk, ask the kernel for the remaining windows of
            the selection, all at once. Without it, each window is read when the copy reaches it.

    Attributes:
        shards, spans: the shards, and the address ranges that they lie in.
        memory: the bytes from the lowest map to the end of the highest one; never read between the maps.
        span_of_shard: `(num_shards,)`, the number of each shard's span.
        extents: of those shards that lie in object stores, if `is_staged`.
        cold: a copy waited for the disk, and the windows since were not found in the page cache.
        num_faults: how often a copy waited for the disk, for a page that nobody had asked for.
    """

    def __init__(self, shards: Sequence[Mapped], *, reads_ahead: bool = True) -> None:
        self.shards = shards
        self.reads_ahead = reads_ahead
        self.cold = False
        self.num_faults = 0
        self.extents = Extents(shards)
        self.is_staged = bool(self.extents)
        self._num_tokens = np.array([shard.num_tokens for shard in shards], dtype=np.int64)
        # A selection keeps a shard number for each window: one byte is enough up to 255 shards.
        self._shard_type = np.min_scalar_type(len(shards))
        # One view steps by whole tokens, so it reaches only shards of one type and one alignment.
        kinds = [(shard.dtype.str, shard.address % shard.dtype.itemsize) for shard in shards]
        distinct = sorted(set(kinds))
        self.span_of_shard = np.array([distinct.index(kind) for kind in kinds], dtype=np.intp)
        self.spans = [
            Span([shard for shard, its in zip(shards, kinds, strict=True) if its == kind])
            for kind in distinct
        ]
        # Each shard's token 0, counted in tokens from the lowest map of its span. An empty shard has
        # address 0 and no window.
        self._first_token = np.array(
            [
                max(0, shard.address - self.spans[span].lowest) // shard.dtype.itemsize
                for shard, span in zip(shards, self.span_of_shard.tolist(), strict=True)
            ],
            dtype=np.int64,
        )
        self._itemsizes = np.array([span.dtype.itemsize for span in self.spans], dtype=np.int64)
        mapped = [span for span in self.spans if span.end]
        lowest = min((span.lowest for span in mapped), default=0)
        self._span_bytes = np.array([max(0, span.lowest - lowest) for span in self.spans], dtype=np.int64)
        self.memory = strided(lowest, max((span.end for span in mapped), default=0), np.dtype(np.uint8))

    def select(
        self,
        locations: NDArray[np.int64],
        length: int,
        dtype: np.dtype[np.integer],
        extents: Extents | None = None,
    ) -> Selection:
        """Return windows that can be read as a whole or in parts, after `Selection.check_unchanged`.

        Args:
            locations: `(k, 2) int64` or more: shard number, start token; every window inside its shard.
            length: tokens of a window.
            dtype: type of the result; must hold the tokens of the shards.
            extents: of the plan; None: those of the files.
        """
        return _Windows(self, *self._places(locations, length), length, dtype, extents)

    def select_rows(
        self, rows: Pieces, dtype: np.dtype[np.integer], extents: Extents | None = None
    ) -> Selection:
        """Return rows of pieces, as `select` returns windows; all have the same number of tokens."""
        pieces, borders = rows
        lengths = pieces[:, 2]
        if len(pieces) == rows.num_rows and len(pieces) and pieces[:, 0].min() != NO_SHARD:
            return self.select(pieces, int(lengths[0]), dtype, extents)
        is_own = pieces[:, 0] != NO_SHARD
        own, ends = pieces, None
        if not is_own.all():
            which = np.flatnonzero(~is_own)
            _, tokens, counts = pieces[which].T
            rows_of = borders.searchsorted(which, side="right") - 1
            before = which - np.arange(which.size)
            ends = _Ends(rows_of, before, self.end_token(tokens), counts)
            # `compress` takes a fifth of the time of a mask as an index.
            own, borders = pieces.compress(is_own, axis=0), np.concatenate(([0], is_own.cumsum()))[borders]
        return _Joined(self, *self._places(own, own[:, 2]), own[:, 2], dtype, borders, ends, extents)

    def end_token(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what stands in rows where no piece is, given the tokens there."""
        return tokens

    def byte_ranges(
        self, spans: NDArray[np.intp], numbers: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where numbers in spans lie in `memory`, and the bytes of so many tokens: `(k,)` each."""
        itemsizes = self._itemsizes[spans]
        return self._span_bytes[spans] + numbers * itemsizes, lengths * itemsizes

    def numbers_at(
        self, spans: NDArray[np.intp], starts: NDArray[np.int64], sizes: NDArray[np.integer]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return numbers in spans and tokens of bytes in `memory`: the inverse of `byte_ranges`."""
        itemsizes = self._itemsizes[spans]
        return (starts - self._span_bytes[spans]) // itemsizes, sizes // itemsizes

    def _places(
        self, locations: NDArray[np.int64], lengths: NDArray[np.int64] | int
    ) -> tuple[NDArray[np.unsignedinteger], NDArray[np.int64]]:
        """Return shard numbers and numbers in their spans of what lies inside its shard; refuse the rest."""
        shard_numbers, starts = locations[:, 0], locations[:, 1]
        # Reading trusts its indices. Without this check a wrong one would read any memory of the process.
        if (starts < 0).any() or (starts + lengths > self._num_tokens[shard_numbers]).any():
            raise IndexError(f"a window of {lengths} tokens lies outside its shard")
        return shard_numbers.astype(self._shard_type), self._first_token[shard_numbers] + starts

    def gather(
        self, locations: NDArray[np.int64], length: int, dtype: np.dtype[np.integer]
    ) -> NDArray[np.integer]:
        """Return windows, `(k, length)`: `select`, `check_unchanged` and `read` in one."""
        selection = self.select(locations, length, dtype)
        selection.check_unchanged(slice(None))
        return selection.read(slice(None))

    def locations(
        self, shard_numbers: NDArray[np.unsignedinteger], numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the locations `(k, 2) int64` of windows given by shard and number in the span."""
        return np.stack([shard_numbers, numbers - self._first_token[shard_numbers]], axis=1)

    def read_ahead(self, locations: NDArray[np.int64], lengths: NDArray[np.int64] | int) -> None:
        """Start to read windows of so many tokens from disk; blocks only while the disk's queue is full."""
        shard_numbers, starts = locations[:, 0], locations[:, 1]
        numbers, spans = self._first_token[shard_numbers] + starts, self.span_of_shard[shard_numbers]
        for number, span in enumerate(self.spans):
            here = spans == number
            if here.any():
                its = lengths if isinstance(lengths, int) else lengths[here]
                read_ahead(span.addresses(numbers[here]), its * span.dtype.itemsize)

    def are_resident(self, locations: NDArray[np.int64]) -> bool:
        """Tell whether the page cache holds the first token of every window; stops at the first miss."""
        return all(self.shards[number].is_resident(start) for number, start in locations.tolist())


class _Ends(NamedTuple):
    """Parts of rows that no piece fills, `(k,)` each, ascending: mostly their ends.

    Attributes:
        rows: that they are in.
        pieces: before each of them, in all rows.
        tokens, counts: the token there, and how often.
    """

    rows: NDArray[np.int64]
    pieces: NDArray[np.int64]
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]


class Selection:
    """Rows that were checked to lie inside their shards; safe to use from several threads.

    A reader that stalls keeps its selection: one takes 9 to 12 bytes a window, 17 to 20 a piece; of a store
    24 more.

    Args:
        shard_numbers: `(k,)`, the shards of windows or pieces.

    Attributes:
        num_bytes: memory of the arrays.
    """

    num_bytes: int

    def __init__(
        self,
        gatherer: Gatherer,
        shard_numbers: NDArray[np.unsignedinteger],
        dtype: np.dtype[np.integer],
        extents: Extents | None,
    ) -> None:
        self._gatherer, self._shard_numbers, self._dtype = gatherer, shard_numbers, dtype
        self._staged = gatherer.extents if extents is None else extents
        self._asked_ahead = not gatherer.reads_ahead
        # See `Extents.numbered`.
        self._found: tuple[NDArray[np.intp], NDArray[np.intp], list[Extent]] | None = None

    def read(self, part: slice) -> NDArray[np.integer]:
        """Return some of the rows, `(k, length)`, C order, maybe read-only.

        Blocks while pages are read from disk: never call it in an event loop's thread.

        Raises:
            CorpusChanged: a shard was truncated or written to.
            NotStaged: a shard of an object store was removed from the cache.
            ReadFailed: the disk did not deliver.
        """
        gatherer, own = self._gatherer, self._own(part)
        if gatherer.cold and not self._asked_ahead:
            self._ask_ahead(own.start or 0)
        extents = self._extents(own)  # none, the usual case, cost nothing
        with held(extents) if extents else nullcontext() as attached:
            before = num_major_faults()
            tokens = self._copy(part, own)
            num_faults = num_major_faults() - before
            READS.add(num_faults)
            if num_faults > 0:
                gatherer.num_faults += num_faults
                gatherer.cold = True
            # A file that is truncated during the copy reads as zeros. Only a check after the copy proves
            # that every copied token was the file's.
            self.check_unchanged(part)
            if attached is not None:
                check_unchanged(attached, since_seconds=_LOOK_SECONDS)
        return tokens

    def check_unchanged(self, part: slice) -> None:
        """Raise `CorpusChanged` or `ReadFailed` if a shard of these rows is not what was opened."""
        shards, numbers = self._gatherer.shards, self._shard_numbers[self._own(part)]
        # With one shard, the common case, a large array need not become a list.
        for number in set((numbers[:1] if len(shards) == 1 else numbers).tolist()):
            shards[number].file.check_unchanged()

    def _extents(self, own: slice) -> Sequence[Extent]:
        """Return the extents that hold windows or pieces."""
        if not self._gatherer.is_staged:
            return ()
        if self._found is None:  # for all at once: a third of the time of a piece, if it were for each piece
            places = self._places(slice(None))
            self._found = self._staged.numbered(places)
        which, numbers, extents = self._found
        start, stop, _ = own.indices(len(self._shard_numbers))
        low, high = which.searchsorted((start, stop)).tolist()
        if high - low == len(numbers):
            return extents
        return [extents[number] for number in np.flatnonzero(np.bincount(numbers[low:high])).tolist()]

    def _places(self, own: slice) -> NDArray[np.int64]:
        """Return where windows or pieces lie: shard number, start token, tokens."""
        shard_numbers, (numbers, lengths) = self._shard_numbers[own], self._numbers_in(own)
        places = np.empty((len(shard_numbers), 3), np.int64)
        places[:, :2], places[:, 2] = self._gatherer.locations(shard_numbers, numbers), lengths
        return places

    def extents(self, part: slice, masks: Extents) -> Sequence[Extent]:
        """Return the extents that hold some rows, and those of their loss masks."""
        own = self._own(part)
        return [*self._extents(own), *(masks.of(self._places(own)) if masks else ())]

    def first_shards(self, part: slice) -> NDArray[np.unsignedinteger]:
        """Return the shard in which each of some rows begins, `(k,)`."""
        return self._shard_numbers[part]

    def _own(self, part: slice) -> slice:
        """Return which windows or pieces some rows consist of."""
        return part

    def _copy(self, part: slice, own: slice) -> NDArray[np.integer]:
        """Return some of the rows, which consist of `own`."""
        raise NotImplementedError

    def _ask_ahead(self, first: int) -> None:
        """Ask the kernel for all windows or pieces from `first` on, unless a sample of them is resident."""
        self._asked_ahead = True
        gatherer, shard_numbers = self._gatherer, self._shard_numbers[first:]
        numbers, lengths = self._numbers_in(slice(first, None))
        rest = gatherer.locations(shard_numbers, numbers)
        if gatherer.are_resident(rest[:: max(1, len(rest) // _SAMPLE_WINDOWS)]):
            gatherer.cold = False
        else:
            gatherer.read_ahead(rest, lengths)

    def _numbers_in(self, own: slice) -> tuple[NDArray[np.int64], NDArray[np.int64] | int]:
        """Return the numbers in their spans, and the tokens, of windows or pieces."""
        raise NotImplementedError


class _Windows(Selection):
    """Windows of one length; `numbers` are theirs in the spans of their shards, `(k,)`."""

    def __init__(
        self,
        gatherer: Gatherer,
        shard_numbers: NDArray[np.unsignedinteger],
        numbers: NDArray[np.int64],
        length: int,
        dtype: np.dtype[np.integer],
        extents: Extents | None,
    ) -> None:
        super().__init__(gatherer, shard_numbers, dtype, extents)
        self._numbers, self._length = numbers, length
        self._views: dict[int, NDArray[np.integer]] = {}  # by the number of the span, all its windows
        self.num_bytes = shard_numbers.nbytes + numbers.nbytes

    def _copy(self, part: slice, own: slice) -> NDArray[np.integer]:
        numbers, spans = self._numbers[own], self._gatherer.spans
        if len(spans) == 1 and spans[0].dtype == self._dtype:
            return self._copy_span(0, numbers)
        of_span = self._gatherer.span_of_shard[self._shard_numbers[own]]
        tokens = np.empty((len(numbers), self._length), dtype=self._dtype)
        for span in np.unique(of_span).tolist():
            rows = np.flatnonzero(of_span == span)
            tokens[rows] = self._copy_span(span, numbers[rows])
        return tokens

    def _copy_span(self, number: int, numbers: NDArray[np.int64]) -> NDArray[np.integer]:
        """Return windows of one span, `(k, length)`."""
        span, length = self._gatherer.spans[number], self._length
        if (span.end - span.lowest) * length >= _MAX_VIEW_BYTES:
            window_bytes = length * span.dtype.itemsize
            starts = span.addresses(numbers).tolist()
            return np.concatenate(
                [strided(start, start + window_bytes, span.dtype, length) for start in starts]
            )
        if (view := self._views.get(number)) is None:
            view = self._views[number] = strided(span.lowest, span.end, span.dtype, length)
        return view[numbers]

    def _numbers_in(self, own: slice) -> tuple[NDArray[np.int64], NDArray[np.int64] | int]:
        return self._numbers[own], self._length


class _Joined(Selection):
    """Rows that join pieces, and ends that no piece fills.

    Args:
        numbers, lengths: `(k,)` each, of the pieces in the spans of their shards, and their tokens.
        borders: `(rows + 1,)`, the first piece of each row; then k.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        shard_numbers: NDArray[np.unsignedinteger],
        numbers: NDArray[np.int64],
        lengths: NDArray[np.int64],
        dtype: np.dtype[np.integer],
        borders: NDArray[np.int64],
        ends: _Ends | None,
        extents: Extents | None,
    ) -> None:
        super().__init__(gatherer, shard_numbers, dtype, extents)
        self._borders, self._ends = borders, ends
        of_ends = 0 if ends is None else int(ends.counts.sum())
        self._row_tokens = (int(lengths.sum()) + of_ends) // max(1, len(borders) - 1)
        # Where the bytes lie is found once for all rows, and not again for each response of a few.
        spans = gatherer.span_of_shard[shard_numbers]
        self._starts, self._sizes = gatherer.byte_ranges(spans, numbers, lengths)
        arrays = (shard_numbers, self._starts, self._sizes, borders, *(ends or ()))
        self.num_bytes = sum(each.nbytes for each in arrays)

    def first_shards(self, part: slice) -> NDArray[np.unsignedinteger]:
        """See `Selection.first_shards`."""
        return self._shard_numbers[self._borders[:-1][part]]

    def _own(self, part: slice) -> slice:
        start, stop, _ = part.indices(len(self._borders) - 1)
        return slice(int(self._borders[start]), int(self._borders[max(start, stop)]))

    def _copy(self, part: slice, own: slice) -> NDArray[np.integer]:
        gatherer, starts = self._gatherer, self._starts[own]
        stops = starts + self._sizes[own]
        touch(gatherer.memory, starts, stops)
        start, stop, _ = part.indices(len(self._borders) - 1)
        num_rows = max(0, stop - start)
        ends = self._ends_of(start, start + num_rows)
        bounds = zip(starts.tolist(), stops.tolist(), strict=True)
        row_bytes = self._row_tokens * self._dtype.itemsize
        if num_rows * row_bytes <= _JOINED_BYTES and all(s.dtype == self._dtype for s in gatherer.spans):
            memory = gatherer.memory.data
            parts: list[memoryview | bytes] = [memory[begin:end] for begin, end in bounds]
            for place, end in ends:
                parts.insert(place, end)
            tokens = np.frombuffer(b"".join(parts), self._dtype)
        else:
            spans = gatherer.span_of_shard[self._shard_numbers[own]].tolist()
            arrays: list[NDArray[Any]] = [
                gatherer.memory[begin:end].view(gatherer.spans[span].dtype)
                for span, (begin, end) in zip(spans, bounds, strict=True)
            ]
            for place, end in ends:
                arrays.insert(place, np.frombuffer(end, self._dtype))
            tokens = np.concatenate([np.empty(0, self._dtype), *arrays], dtype=self._dtype, casting="unsafe")
        return tokens.reshape(num_rows, self._row_tokens)

    def _ends_of(self, start: int, stop: int) -> list[tuple[int, bytes]]:
        """Return the ends in rows [start, stop), the last one first: how many pieces lie before each."""
        if self._ends is None:
            return []
        low, high = self._ends.rows.searchsorted((start, stop)).tolist()
        places = self._ends.pieces[low:high] - self._borders[start]
        tokens, counts = (each[low:high].tolist() for each in self._ends[2:])
        stored = {token: np.array(token, self._dtype).tobytes() for token in set(tokens)}
        ends = zip(places.tolist(), tokens, counts, strict=True)
        return [(place, stored[token] * count) for place, token, count in ends][::-1]

    def _numbers_in(self, own: slice) -> tuple[NDArray[np.int64], NDArray[np.int64] | int]:
        gatherer = self._gatherer
        spans = gatherer.span_of_shard[self._shard_numbers[own]]
        return gatherer.numbers_at(spans, self._starts[own], self._sizes[own])
