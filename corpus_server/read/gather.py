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

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import NO_SHARD, Pieces
from corpus_server.read.memory import READS, Mapped, Span, num_major_faults, strided, touch
from corpus_server.read.readahead import read_ahead

# bytes; NumPy's limit. Maps lie within 2^47 bytes, so only windows of more than 65,536 tokens get
# there. They are so large that copying them one by one costs nothing extra.
_MAX_VIEW_BYTES = 2**63

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
        memory: the bytes from the lowest map to the end of the highest one; never read between the maps.
        span_of_shard: `(num_shards,)`, the number of each shard's span.
        cold: a copy waited for the disk, and the windows since were not found in the page cache.
        num_faults: how often a copy waited for the disk, for a page that nobody had asked for.
    """

    def __init__(self, shards: Sequence[Mapped], *, reads_ahead: bool = True) -> None:
        self.shards = shards
        self.reads_ahead = reads_ahead
        self.cold = False
        self.num_faults = 0
        self._staged = {n for n, shard in enumerate(shards) if not shard.file.is_local}
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

    def select(self, locations: NDArray[np.int64], length: int, dtype: np.dtype[np.integer]) -> Selection:
        """Return windows that can be read as a whole or in parts, after `Selection.check_unchanged`.

        Args:
            locations: `(k, 2) int64` or more: shard number, start token; every window inside its shard.
            length: tokens of a window.
            dtype: type of the result; must hold the tokens of the shards.
        """
        return Selection(self, *self._places(locations, length), length, dtype)

    def select_rows(self, rows: Pieces, dtype: np.dtype[np.integer]) -> Selection:
        """Return rows of pieces, as `select` returns windows; all have the same number of tokens."""
        pieces, borders = rows
        lengths = pieces[:, 2]
        if len(pieces) == rows.num_rows and len(pieces) and pieces[:, 0].min() != NO_SHARD:
            return self.select(pieces, int(lengths[0]), dtype)
        is_own = pieces[:, 0] != NO_SHARD
        own, ends = pieces, None
        if not is_own.all():
            which = np.flatnonzero(~is_own)
            _, tokens, counts = pieces[which].T
            ends = _Ends(borders.searchsorted(which, side="right") - 1, self.end_token(tokens), counts)
            own, borders = pieces[is_own], np.concatenate(([0], is_own.cumsum()))[borders]
        lengths = own[:, 2].copy()  # a view would keep the whole array alive
        return Selection(self, *self._places(own, lengths), lengths, dtype, borders, ends)

    def end_token(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what stands at the end of rows that no piece fills, given the tokens there."""
        return tokens

    def byte_ranges(
        self, spans: NDArray[np.intp], numbers: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where numbers in spans lie in `memory`, and the bytes of so many tokens: `(k,)` each."""
        itemsizes = self._itemsizes[spans]
        return self._span_bytes[spans] + numbers * itemsizes, lengths * itemsizes

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

    def check_unchanged(self, shard_numbers: NDArray[np.unsignedinteger]) -> None:
        """Raise `CorpusChanged` or `ReadFailed` if one of the shards is not what was opened."""
        # With one shard, the common case, a large array need not become a list.
        numbers = shard_numbers[:1] if len(self.shards) == 1 else shard_numbers
        for number in set(numbers.tolist()):
            self.shards[number].file.check_unchanged()

    @contextmanager
    def held(self, shard_numbers: NDArray[np.unsignedinteger]) -> Iterator[None]:
        """Keep shards mapped while their windows are copied; NotStaged if one is not on this machine."""
        with ExitStack() as stack:
            # Local shards, the usual case, cost nothing.
            for number in self._staged.intersection(shard_numbers.tolist()) if self._staged else ():
                stack.enter_context(self.shards[number].file.held())
            yield

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
    """Ends of rows that no piece fills, `(k,)` each: the row, ascending; the token there, and how often."""

    rows: NDArray[np.int64]
    tokens: NDArray[np.int64]
    counts: NDArray[np.int64]


class Selection:
    """Rows that were checked to lie inside their shards; safe to use from several threads.

    Args:
        shard_numbers, numbers: `(k,)` each: the shards of windows or pieces, and their numbers in the shards'
            spans. They take 9 to 12 bytes a window, because a reader that stalls keeps its selection.
        lengths: tokens of a window, or `(k,)` of each piece.
        borders: `(rows + 1,)`, the first piece of each row; then k. None: each row is a window.

    Attributes:
        num_bytes: memory of the arrays.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        shard_numbers: NDArray[np.unsignedinteger],
        numbers: NDArray[np.int64],
        lengths: NDArray[np.int64] | int,
        dtype: np.dtype[np.integer],
        borders: NDArray[np.int64] | None = None,
        ends: _Ends | None = None,
    ) -> None:
        self._gatherer = gatherer
        self._shard_numbers, self._numbers = shard_numbers, numbers
        self._lengths, self._dtype = lengths, dtype
        self._borders, self._ends = borders, ends
        self._row_tokens = lengths if isinstance(lengths, int) else self._count_row_tokens()
        self._views: dict[int, NDArray[np.integer]] = {}  # by the number of the span, all its windows
        arrays = (shard_numbers, numbers, lengths, borders, *(ends or ()))
        self.num_bytes = sum(each.nbytes for each in arrays if isinstance(each, np.ndarray))
        self._asked_ahead = not gatherer.reads_ahead

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
        with gatherer.held(self._shard_numbers[own]):
            before = num_major_faults()
            tokens = self._copy(part)
            num_faults = num_major_faults() - before
            READS.add(num_faults)
            if num_faults > 0:
                gatherer.num_faults += num_faults
                gatherer.cold = True
            # A file that is truncated during the copy reads as zeros. Only a check after the copy proves
            # that every copied token was the file's.
            gatherer.check_unchanged(self._shard_numbers[own])
        return tokens

    def check_unchanged(self, part: slice) -> None:
        """Raise `CorpusChanged` or `ReadFailed` if a shard of these rows is not what was opened."""
        self._gatherer.check_unchanged(self._shard_numbers[self._own(part)])

    def first_shards(self, part: slice) -> NDArray[np.unsignedinteger]:
        """Return the shard in which each of some rows begins, `(k,)`."""
        return self._shard_numbers[part if self._borders is None else self._borders[:-1][part]]

    def _own(self, part: slice) -> slice:
        """Return which windows or pieces some rows consist of."""
        if self._borders is None:
            return part
        start, stop, _ = part.indices(len(self._borders) - 1)
        return slice(int(self._borders[start]), int(self._borders[max(start, stop)]))

    def _copy(self, part: slice) -> NDArray[np.integer]:
        if isinstance(self._lengths, int) or self._borders is None:
            return self._windows(self._shard_numbers[part], self._numbers[part], self._row_tokens)
        start, stop, _ = part.indices(len(self._borders) - 1)
        own = self._own(part)
        ends = self._ends_of(start, stop)
        tokens = self._joined(self._shard_numbers[own], self._numbers[own], self._lengths[own], ends)
        return tokens.reshape(max(0, stop - start), self._row_tokens)

    def _count_row_tokens(self) -> int:
        assert self._borders is not None
        of_ends = 0 if self._ends is None else int(self._ends.counts.sum())
        return (int(np.sum(self._lengths)) + of_ends) // max(1, len(self._borders) - 1)

    def _ends_of(self, start: int, stop: int) -> list[tuple[int, bytes]]:
        """Return the ends of rows [start, stop), the last one first: how many pieces lie before each."""
        if self._ends is None or self._borders is None:
            return []
        low, high = self._ends.rows.searchsorted((start, stop)).tolist()
        places = self._borders[self._ends.rows[low:high] + 1] - self._borders[start]
        tokens, counts = (each[low:high].tolist() for each in self._ends[1:])
        stored = {token: np.array(token, self._dtype).tobytes() for token in set(tokens)}
        ends = zip(places.tolist(), tokens, counts, strict=True)
        return [(place, stored[token] * count) for place, token, count in ends][::-1]

    def _joined(
        self,
        shard_numbers: NDArray[np.unsignedinteger],
        numbers: NDArray[np.int64],
        lengths: NDArray[np.int64],
        ends: list[tuple[int, bytes]],
    ) -> NDArray[np.integer]:
        """Return the tokens of pieces and of ends, one after another."""
        gatherer = self._gatherer
        spans = gatherer.span_of_shard[shard_numbers]
        starts, sizes = gatherer.byte_ranges(spans, numbers, lengths)
        touch(gatherer.memory, starts, sizes)
        stops = starts + sizes
        is_stored = all(span.dtype == self._dtype for span in gatherer.spans)
        if is_stored and sizes.sum() <= _JOINED_BYTES:
            memory = gatherer.memory.data
            bounds = zip(starts.tolist(), stops.tolist(), strict=True)
            parts: list[memoryview | bytes] = [memory[start:stop] for start, stop in bounds]
            for place, end in ends:
                parts.insert(place, end)
            return np.frombuffer(b"".join(parts), self._dtype)
        dtypes = [gatherer.spans[span].dtype for span in spans.tolist()]
        typed = zip(map(slice, starts.tolist(), stops.tolist()), dtypes, strict=True)
        arrays: list[NDArray[Any]] = [gatherer.memory[its].view(dtype) for its, dtype in typed]
        for place, end in ends:
            arrays.insert(place, np.frombuffer(end, self._dtype))
        return np.concatenate([np.empty(0, self._dtype), *arrays], dtype=self._dtype, casting="unsafe")

    def _windows(
        self, shard_numbers: NDArray[np.unsignedinteger], numbers: NDArray[np.int64], length: int
    ) -> NDArray[np.integer]:
        """Return windows, `(k, length)`; every one of them must lie inside its shard.

        A selection always asks for the same length.
        """
        spans = self._gatherer.spans
        if len(spans) == 1 and spans[0].dtype == self._dtype:
            return self._copy_span(0, numbers, length)
        of_span = self._gatherer.span_of_shard[shard_numbers]
        tokens = np.empty((len(numbers), length), dtype=self._dtype)
        for span in np.unique(of_span).tolist():
            rows = np.flatnonzero(of_span == span)
            tokens[rows] = self._copy_span(span, numbers[rows], length)
        return tokens

    def _copy_span(self, number: int, numbers: NDArray[np.int64], length: int) -> NDArray[np.integer]:
        """Return windows of one span, `(k, length)`."""
        span = self._gatherer.spans[number]
        if (span.end - span.lowest) * length >= _MAX_VIEW_BYTES:
            window_bytes = length * span.dtype.itemsize
            starts = span.addresses(numbers).tolist()
            return np.concatenate(
                [strided(start, start + window_bytes, span.dtype, length) for start in starts]
            )
        if (view := self._views.get(number)) is None:
            view = self._views[number] = strided(span.lowest, span.end, span.dtype, length)
        return view[numbers]

    def _ask_ahead(self, first: int) -> None:
        """Ask the kernel for all windows or pieces from `first` on, unless a sample of them is resident."""
        self._asked_ahead = True
        gatherer, lengths = self._gatherer, self._lengths
        rest = gatherer.locations(self._shard_numbers[first:], self._numbers[first:])
        if gatherer.are_resident(rest[:: max(1, len(rest) // _SAMPLE_WINDOWS)]):
            gatherer.cold = False
        else:
            gatherer.read_ahead(rest, lengths if isinstance(lengths, int) else lengths[first:])
