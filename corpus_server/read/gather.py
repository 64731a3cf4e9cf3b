"""Copy rows from the maps of shards into one array.

All maps of a process lie in one address space, so windows of any number of shards are one fancy
index over one strided view that begins at the lowest map:

    address of a window   = address of its shard's token 0 + start * itemsize
    row of the view       = (address - lowest address) / itemsize

NumPy releases the GIL during that copy, for any number of windows and shards. The response is sent from
the array that the copy made: a second copy, into a buffer of the server's own, would cost half as much again.

Rows that join pieces are slices of memory, joined by `bytes.join`: faster than every other way that was
measured, but it holds the GIL. So a byte of each page is read first, by an index that releases it: a page
that is not in memory is waited for there. The ends of rows are slices, too, of memory that holds end-of-text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import NO_SHARD, Pieces
from corpus_server.read.memory import MEMORY, READS, Mapped, Span, num_major_faults, places_in, strided, touch
from corpus_server.read.readahead import read_ahead
from corpus_server.stores import Extent, Extents, MappedSpans

# bytes; NumPy's limit. Maps lie within 2^47 bytes, so only windows of more than 65,536 tokens get
# there. They are so large that copying them one by one costs nothing extra.
_MAX_VIEW_BYTES = 2**63

_NO_BOUND = 2**62  # tokens; of pieces in no shard

_SAMPLE_WINDOWS = 16  # looked up in the page cache before all windows of a selection are prefetched

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
        # The last of each stands for `NO_SHARD`, -1: pieces that lie in no shard, and so not outside it.
        self._num_tokens = np.array([*(shard.num_tokens for shard in shards), _NO_BOUND], dtype=np.int64)
        self._begins = places_in(*(shard.address for shard in shards), 0)
        self._itemsizes = np.array([*(shard.dtype.itemsize for shard in shards), 1], dtype=np.int64)
        self._fills: dict[tuple[int, np.dtype[np.integer]], NDArray[np.integer]] = {}
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

    def select(self, rows: Pieces, dtype: np.dtype[np.integer], extents: Extents | None = None) -> Selection:
        """Return rows that can be read as a whole or in parts, after `Selection.check_unchanged`.

        Args:
            rows: all of the same number of tokens; every piece inside its shard.
            dtype: type of the result; must hold the tokens of the shards.
            extents: of the plan; None: those of the files.
        """
        shards, tokens, counts = rows.places.T
        lowest = shards.min(initial=0)
        # Reading trusts its indices. Without this check a wrong one would read any memory of the process.
        if lowest < NO_SHARD or (tokens < 0).any() or (tokens + counts > self._num_tokens[shards]).any():
            raise IndexError("a piece of a row lies outside its shard")
        numbers = shards.astype(self._shard_type)
        if len(shards) == len(rows.borders) - 1 and len(shards) and lowest != NO_SHARD:  # windows
            return _Windows(self, numbers, self._first_token[shards] + tokens, int(counts[0]), dtype, extents)
        itemsizes, fills = self._itemsizes[shards], []
        starts, sizes = self._begins[shards] + tokens * itemsizes, counts * itemsizes
        if (ends := np.flatnonzero(shards == NO_SHARD)).size:
            counts, tokens = counts[ends], self.end_token(tokens[ends])
            numbers[ends], sizes[ends] = len(self.shards), counts * dtype.itemsize
            for token in np.unique(tokens).tolist():
                here = tokens == token
                fills.append(self._fill(token, dtype, int(counts[here].max())))
                starts[ends[here]] = places_in(fills[-1].ctypes.data)
        return _Joined(self, numbers, starts, sizes, dtype, rows, fills, extents)

    def end_token(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what stands in rows where no piece is, given the tokens there."""
        return tokens

    def _fill(self, token: int, dtype: np.dtype[np.integer], num_tokens: int) -> NDArray[np.integer]:
        """Return memory that holds a token at least so many times: of rows' ends."""
        fill = self._fills.get((token, dtype))
        if fill is None or fill.size < num_tokens:
            fill = self._fills[token, dtype] = np.full(1 << num_tokens.bit_length(), token, dtype)
        return fill

    def tokens_at(
        self, shards: NDArray[np.integer], starts: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return what lies at places in memory, `(k, 3)`: shard number, start token, tokens."""
        itemsizes = self._itemsizes[shards]
        return np.stack((shards, (starts - self._begins[shards]) // itemsizes, sizes // itemsizes), axis=1)

    def gather(
        self, locations: NDArray[np.int64], length: int, dtype: np.dtype[np.integer]
    ) -> NDArray[np.integer]:
        """Return windows at `(k, 2) int64`, shard number and start token: `(k, length)`.

        `select`, `check_unchanged` and `read` in one.
        """
        places = np.insert(locations, 2, length, axis=1)
        selection = self.select(Pieces(places, np.arange(len(places) + 1)), dtype)
        selection.check_unchanged(slice(None))
        return selection.read(slice(None))

    def starts(
        self, shard_numbers: NDArray[np.unsignedinteger], numbers: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the start tokens `(k,)` of windows given by shard and number in the span."""
        starts: NDArray[np.int64] = numbers - self._first_token[shard_numbers]
        return starts

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


class _Extents(NamedTuple):
    """Which extents hold windows or pieces, see `Extents.numbered`; and those extents as they are mapped."""

    which: NDArray[np.intp]
    numbers: NDArray[np.intp]
    extents: list[Extent]
    mapped: MappedSpans

    def numbers_of(self, own: slice) -> list[int]:
        """Return the numbers of the extents that hold some windows or pieces."""
        low, high = self.which.searchsorted((own.start or 0, _NO_BOUND if own.stop is None else own.stop))
        if high - low == len(self.numbers):
            return list(range(len(self.extents)))
        return np.flatnonzero(np.bincount(self.numbers[low:high])).tolist()


class Selection:
    """Rows that were checked to lie inside their shards; safe to use from several threads.

    A reader that stalls keeps its selection: one takes 9 to 12 bytes a window, 17 to 20 a piece; of a store
    24 more.

    Args:
        shard_numbers: `(k,)`, the shards of windows or pieces; of pieces in none the number of all shards.

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
        self._found: _Extents | None = None

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
        with self._held(own):
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
        return tokens

    def check_unchanged(self, part: slice) -> None:
        """Raise `CorpusChanged` or `ReadFailed` if a shard of these rows is not what was opened."""
        shards, numbers = self._gatherer.shards, self._shard_numbers[self._own(part)]
        # With one shard, the common case, a large array need not become a list.
        for number in {0} if len(shards) == 1 and len(numbers) else set(numbers.tolist()):
            if number < len(shards):
                shards[number].file.check_unchanged()

    def _all_extents(self) -> _Extents:
        """Return the extents of all windows or pieces."""
        if self._found is None:  # for all at once: a third of the time of a piece, if it were for each piece
            which, numbers, extents = self._staged.numbered(self._places(slice(None)))
            self._found = _Extents(which, numbers, extents, MappedSpans(extents))
        return self._found

    def _held(self, own: slice) -> AbstractContextManager[None]:
        """Keep the extents mapped that hold windows or pieces; there are none where nothing is staged."""
        if not self._gatherer.is_staged:
            return nullcontext()
        if (whole := self.whole) is not None and whole.are_mapped():
            return whole.held(lambda: self._own_extents(own))
        return self._all_extents().mapped.held(lambda: self._own_extents(own))

    @property
    def whole(self) -> MappedSpans | None:
        """All extents of the plan, if windows or pieces are as many: nobody looks up which of them they read.

        That would take a twentieth of the CPU of a response.
        """
        staged = self._staged
        return staged.whole if staged.num_extents <= len(self._shard_numbers) else None

    def _own_extents(self, own: slice) -> list[Extent]:
        """Return the extents that hold some windows or pieces."""
        found = self._all_extents()
        return [found.extents[number] for number in found.numbers_of(own)]

    def _places(self, own: slice) -> NDArray[np.int64]:
        """Return where windows or pieces lie, `(k, 3)`: shard number or `NO_SHARD`, start token, tokens."""
        raise NotImplementedError

    def extents(self, part: slice, masks: Extents) -> Sequence[Extent]:
        """Return the extents that hold some rows, and those of their loss masks."""
        own, its = self._own(part), list[Extent]()
        if self._gatherer.is_staged:
            its = self._own_extents(own)
        return [*its, *masks.of(self._places(own))] if masks else its

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
        gatherer, places = self._gatherer, self._places(slice(first, None))
        rest = places[places[:, 0] != NO_SHARD]
        if gatherer.are_resident(rest[:: max(1, len(rest) // _SAMPLE_WINDOWS), :2]):
            gatherer.cold = False
        else:
            gatherer.read_ahead(rest[:, :2], rest[:, 2])


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

    def _places(self, own: slice) -> NDArray[np.int64]:
        shards = self._shard_numbers[own]
        columns = np.empty((3, len(shards)), dtype=np.int64)
        columns[0], columns[2] = shards, self._length
        columns[1] = self._gatherer.starts(shards, self._numbers[own])
        return columns.T


class _Joined(Selection):
    """Rows that join pieces.

    Args:
        starts, sizes: `(k,)` each, of the pieces: places in `MEMORY` and bytes.
        rows: that the pieces make.
        fills: memory of the rows' ends, which lives as long as the selection.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        shard_numbers: NDArray[np.unsignedinteger],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        dtype: np.dtype[np.integer],
        rows: Pieces,
        fills: Sequence[NDArray[np.integer]],
        extents: Extents | None,
    ) -> None:
        super().__init__(gatherer, shard_numbers, dtype, extents)
        self._starts, self._sizes, self._borders, self._fills = starts, sizes, rows.borders, fills
        self._row_tokens = int(rows.places[:, 2].sum()) // max(1, rows.num_rows)
        arrays = shard_numbers, starts, sizes, rows.borders
        self.num_bytes = sum(each.nbytes for each in arrays)

    def first_shards(self, part: slice) -> NDArray[np.unsignedinteger]:
        """See `Selection.first_shards`."""
        own = np.flatnonzero(self._shard_numbers < len(self._gatherer.shards))
        return self._shard_numbers[own[own.searchsorted(self._borders[:-1][part])]]

    def _own(self, part: slice) -> slice:
        start, stop, _ = part.indices(len(self._borders) - 1)
        return slice(int(self._borders[start]), int(self._borders[max(start, stop)]))

    def _copy(self, part: slice, own: slice) -> NDArray[np.integer]:
        gatherer, starts = self._gatherer, self._starts[own]
        stops = starts + self._sizes[own]
        num_rows = len(self._borders[:-1][part])
        row_bytes = self._row_tokens * self._dtype.itemsize
        bounds = zip(starts.tolist(), stops.tolist(), strict=True)
        if num_rows * row_bytes <= _JOINED_BYTES and all(s.dtype == self._dtype for s in gatherer.spans):
            touch(starts, stops)
            tokens = np.frombuffer(b"".join([MEMORY[begin:end] for begin, end in bounds]), self._dtype)
        else:
            dtypes = [*(shard.dtype for shard in gatherer.shards), self._dtype]
            shards = self._shard_numbers[own].tolist()
            arrays: list[NDArray[Any]] = [
                np.frombuffer(MEMORY[begin:end], dtypes[shard])
                for shard, (begin, end) in zip(shards, bounds, strict=True)
            ]
            tokens = np.concatenate([np.empty(0, self._dtype), *arrays], dtype=self._dtype, casting="unsafe")
        return tokens.reshape(num_rows, self._row_tokens)

    def _places(self, own: slice) -> NDArray[np.int64]:
        shards = self._shard_numbers[own].astype(np.int64)
        shards[shards == len(self._gatherer.shards)] = NO_SHARD
        return self._gatherer.tokens_at(shards, self._starts[own], self._sizes[own])
