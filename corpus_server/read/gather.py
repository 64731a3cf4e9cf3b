"""Copy rows from the maps of shards into one array.

All maps of a process lie in one address space, so pieces of any number of shards are ranges of one memory:

    place of a piece   = place of its shard's token 0 + start * itemsize

`memory.copied` copies them without the GIL. The response is sent from the array that the copy made: a second
copy, into a buffer of the server's own, would cost half as much again.

The ends of rows that no piece fills are ranges, too, of memory that holds end-of-text.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import NO_SHARD, Pieces
from corpus_server.read.memory import (
    BEYOND,
    READS,
    Mapped,
    addresses_of,
    copied,
    num_major_faults,
    places_in,
    safe_ends,
)
from corpus_server.read.readahead import read_ahead
from corpus_server.stores import Extent, Extents, MappedSpans

_NO_BOUND = 2**62  # tokens; of pieces in no shard

_SAMPLE_WINDOWS = 16  # looked up in the page cache before all windows of a selection are prefetched


class Gatherer:
    """Gathers rows of a fixed list of open shards; safe to use from several threads.

    The shards must stay open for as long as the gatherer and its selections are used.

    Args:
        shards: numbered as in locations.
        reads_ahead: once a copy had to wait for the disk, ask the kernel for the remaining windows of
            the selection, all at once. Without it, each window is read when the copy reaches it.

    Attributes:
        shards: the shards.
        dtypes: all types that they have.
        kinds: which of those each shard has, `(num_shards + 1,)`; last, their number.
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
        # What is read beyond a piece lies on the shard's last page at most; of a store's it may be unmapped.
        self._safe_ends = safe_ends(self._begins + self._itemsizes * self._num_tokens)
        self._safe_ends[-1] = _NO_BOUND
        self._fills: dict[tuple[int, np.dtype[np.integer]], NDArray[np.integer]] = {}
        # A selection keeps a shard number for each window: one byte is enough up to 255 shards.
        self._shard_type = np.min_scalar_type(len(shards))
        self.dtypes = list(dict.fromkeys(shard.dtype for shard in shards))
        kinds = (self.dtypes.index(shard.dtype) for shard in shards)
        self.kinds = np.array([*kinds, len(self.dtypes)], dtype=np.intp)

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
        starts = self._begins[shards] + tokens * self._itemsizes[shards]
        if len(shards) == rows.num_rows and len(shards) and lowest != NO_SHARD:  # windows
            return Selection(self, numbers, starts, int(counts[0]), dtype, extents)
        fills = []
        if (ends := np.flatnonzero(shards == NO_SHARD)).size:
            tokens = self.end_token(tokens[ends])
            numbers[ends] = len(self.shards)
            for token in np.unique(tokens).tolist():
                here = ends[tokens == token]
                fills.append(self._fill(token, dtype, int(counts[here].max())))
                starts[here] = places_in(fills[-1].ctypes.data)
        joined = rows.borders, fills
        return Selection(self, numbers, starts, counts.copy(), dtype, extents, joined)

    def end_token(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what stands in rows where no piece is, given the tokens there."""
        return tokens

    def _fill(self, token: int, dtype: np.dtype[np.integer], num_tokens: int) -> NDArray[np.integer]:
        """Return memory that holds a token at least so many times: of rows' ends."""
        fill = self._fills.get((token, dtype))
        if fill is None or fill.size < num_tokens + BEYOND:
            fill = self._fills[token, dtype] = np.full(1 << (num_tokens + BEYOND).bit_length(), token, dtype)
        return fill

    def safe_ends(self, shards: NDArray[np.integer]) -> NDArray[np.int64] | int:
        """Return where pieces of shards may end that may be read beyond; 0: none, a page may be missing."""
        if self.is_staged or self.cold:
            return 0
        ends: NDArray[np.int64] = self._safe_ends[shards]
        return ends

    def tokens_at(self, shards: NDArray[np.integer], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of shards that lie at places in memory."""
        tokens: NDArray[np.int64] = (starts - self._begins[shards]) // self._itemsizes[shards]
        return tokens

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

    def read_ahead(self, locations: NDArray[np.int64], lengths: NDArray[np.int64] | int) -> None:
        """Start to read windows of so many tokens from disk; blocks only while the disk's queue is full."""
        shards, starts = locations.T
        itemsizes = self._itemsizes[shards]
        read_ahead(addresses_of(self._begins[shards] + starts * itemsizes), lengths * itemsizes)

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
        shard_numbers, starts: `(k,)` each, of windows or pieces: the shard, and the place in `MEMORY`. Of
            pieces in none the number of all shards.
        counts: `(k,)`, tokens of each; of windows the tokens of all.
        joined: which pieces each row has, see `Pieces`, and memory of the rows' ends, which lives as long as
            the selection; None: each row is a window.

    Attributes:
        num_bytes: memory of the arrays.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        shard_numbers: NDArray[np.unsignedinteger],
        starts: NDArray[np.int64],
        counts: NDArray[np.int64] | int,
        dtype: np.dtype[np.integer],
        extents: Extents | None,
        joined: tuple[NDArray[np.int64], Sequence[NDArray[np.integer]]] | None = None,
    ) -> None:
        self._gatherer, self._dtype = gatherer, dtype
        self._shard_numbers, self._starts, self._counts = shard_numbers, starts, counts
        self._borders: NDArray[np.int64] | None = None if joined is None else joined[0]
        self._fills = None if joined is None else joined[1]
        self._row_tokens = counts if isinstance(counts, int) else 0
        self.num_bytes = shard_numbers.nbytes + starts.nbytes
        if not isinstance(counts, int) and self._borders is not None:
            self._row_tokens = int(counts.sum()) // max(1, len(self._borders) - 1)
            self.num_bytes += counts.nbytes + self._borders.nbytes
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
        shards = self._shard_numbers[own]
        columns = np.empty((3, len(shards)), dtype=np.int64)
        columns[0] = shards
        columns[0, shards == len(self._gatherer.shards)] = NO_SHARD
        columns[1] = self._gatherer.tokens_at(columns[0], self._starts[own])
        columns[2] = self._counts if isinstance(self._counts, int) else self._counts[own]
        return columns.T

    def extents(self, part: slice, masks: Extents) -> Sequence[Extent]:
        """Return the extents that hold some rows, and those of their loss masks."""
        own, its = self._own(part), list[Extent]()
        if self._gatherer.is_staged:
            its = self._own_extents(own)
        return [*its, *masks.of(self._places(own))] if masks else its

    def first_shards(self, part: slice) -> NDArray[np.unsignedinteger]:
        """Return the shard in which each of some rows begins, `(k,)`."""
        if self._borders is None:
            return self._shard_numbers[part]
        own = np.flatnonzero(self._shard_numbers < len(self._gatherer.shards))
        return self._shard_numbers[own[own.searchsorted(self._borders[:-1][part])]]

    def _own(self, part: slice) -> slice:
        """Return which windows or pieces some rows consist of."""
        if self._borders is None:
            return part
        start, stop, _ = part.indices(len(self._borders) - 1)
        return slice(int(self._borders[start]), int(self._borders[max(start, stop)]))

    def _copy(self, part: slice, own: slice) -> NDArray[np.integer]:
        """Return some of the rows, which consist of `own`."""
        gatherer, shards, starts = self._gatherer, self._shard_numbers[own], self._starts[own]
        counts = self._counts if isinstance(self._counts, int) else self._counts[own]
        num_rows = len(starts) if self._borders is None else len(self._borders[:-1][part])
        if gatherer.dtypes == [self._dtype]:
            safe = 0 if self._borders is None else gatherer.safe_ends(shards)
            tokens = copied(starts, counts * self._dtype.itemsize, safe).view(self._dtype)
            return tokens.reshape(num_rows, self._row_tokens)
        tokens, kinds = np.empty(num_rows * self._row_tokens, self._dtype), gatherer.kinds[shards]
        for kind, dtype in enumerate((*gatherer.dtypes, self._dtype)):
            here = kinds == kind
            its = counts if isinstance(counts, int) else counts[here]
            tokens[np.repeat(here, counts)] = copied(starts[here], its * dtype.itemsize).view(dtype)
        return tokens.reshape(num_rows, self._row_tokens)

    def _ask_ahead(self, first: int) -> None:
        """Ask the kernel for all windows or pieces from `first` on, unless a sample of them is resident."""
        self._asked_ahead = True
        gatherer, places = self._gatherer, self._places(slice(first, None))
        rest = places[places[:, 0] != NO_SHARD]
        if gatherer.are_resident(rest[:: max(1, len(rest) // _SAMPLE_WINDOWS), :2]):
            gatherer.cold = False
        else:
            gatherer.read_ahead(rest[:, :2], rest[:, 2])
