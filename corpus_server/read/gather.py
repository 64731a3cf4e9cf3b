"""Copy windows from the maps of shards into one array.

All maps of a process lie in one address space, so windows of any number of shards are one fancy
index over one strided view that begins at the lowest map:

    address of a window   = address of its shard's token 0 + start * itemsize
    row of the view       = (address - lowest address) / itemsize

NumPy releases the GIL during that copy, for any number of windows and shards. The response is sent from
the array that the copy made: a second copy, into a buffer of the server's own, would cost half as much again.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from corpus_server.corpus.shards import Shard
from corpus_server.read.readahead import read_ahead

# bytes; NumPy's limit. Maps lie within 2^47 bytes, so only windows of more than 65,536 tokens get
# there. They are so large that copying them one by one costs nothing extra.
_MAX_VIEW_BYTES = 2**63

_SAMPLE_WINDOWS = 16  # looked up in the page cache before all windows of a selection are prefetched


class Reads:
    """What a process has read from its maps.

    Attributes:
        num_hits: pieces whose windows were copied from the page cache.
        num_misses: those that had to wait for the disk, as major page faults tell.
        num_faults: major page faults in them.
    """

    def __init__(self) -> None:
        self.num_hits = self.num_misses = self.num_faults = 0
        self._lock = threading.Lock()

    def add(self, num_faults: int) -> None:
        """Count a piece that was copied."""
        with self._lock:
            if num_faults > 0:
                self.num_misses += 1
                self.num_faults += num_faults
            else:
                self.num_hits += 1


READS = Reads()


def num_major_faults() -> int:
    """Return how often this thread has waited for the disk because it touched a page of a map."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


class Gatherer:
    """Gathers windows of a fixed list of open shards; safe to use from several threads.

    The shards must stay open for as long as the gatherer and its selections are used.

    Args:
        shards: numbered as in locations.
        reads_ahead: once a copy had to wait for the disk, ask the kernel for the remaining windows of
            the selection, all at once. Without it, each window is read when the copy reaches it.

    Attributes:
        shards, spans: the shards, and the address ranges that they lie in.
        span_of_shard: `(num_shards,)`, the number of each shard's span.
        last_token: `(num_shards,)`, the end of each shard, in tokens from the lowest map of its span.
        cold: a copy waited for the disk, and the windows since were not found in the page cache.
        num_faults: how often a copy waited for the disk, for a page that nobody had asked for.
    """

    def __init__(self, shards: Sequence[Shard], *, reads_ahead: bool = True) -> None:
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
            _Span([shard for shard, its in zip(shards, kinds, strict=True) if its == kind])
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
        self.last_token = self._first_token + self._num_tokens

    def select(self, locations: NDArray[np.int64], length: int, dtype: np.dtype[np.integer]) -> Selection:
        """Return windows that can be read as a whole or in parts, after `Selection.check_unchanged`.

        Args:
            locations: `(k, 2) int64`: shard number, start token; every window inside its shard.
            length: tokens of a window.
            dtype: type of the result; must hold the tokens of the shards.
        """
        return Selection(self, self.places(locations, length), length, dtype)

    def places(
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


class Selection:
    """Windows that were checked to lie inside their shards; safe to use from several threads.

    Args:
        places: `(k,)` each: the windows' shards, and their numbers in the shards' spans. They take 9 to 12
            bytes a window, because a reader that stalls keeps its selection.
        lengths: tokens of a window, or what copying each piece touches.
    """

    def __init__(
        self,
        gatherer: Gatherer,
        places: tuple[NDArray[np.unsignedinteger], NDArray[np.int64]],
        lengths: NDArray[np.int64] | int,
        dtype: np.dtype[np.integer],
    ) -> None:
        self._gatherer = gatherer
        self._shard_numbers, self._numbers = places
        self._lengths, self._dtype = lengths, dtype
        self._views: dict[int, NDArray[np.integer]] = {}  # by the number of the span, all its windows
        self._asked_ahead = not gatherer.reads_ahead

    def read(self, part: slice) -> NDArray[np.integer]:
        """Return some of the rows, `(k, length)`, C order, owned by the caller.

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
        return self._shard_numbers[part]

    def _own(self, part: slice) -> slice:
        """Return which of the arrays' elements some rows consist of."""
        return part

    def _copy(self, part: slice) -> NDArray[np.integer]:
        assert isinstance(self._lengths, int)
        return self._windows(self._shard_numbers[part], self._numbers[part], self._lengths)

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
                [_strided(start, start + window_bytes, span.dtype, length) for start in starts]
            )
        if (view := self._views.get(number)) is None:
            view = self._views[number] = _strided(span.lowest, span.end, span.dtype, length)
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


class _Span:
    """The address range that holds all shards of one token type and alignment."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.dtype = shards[0].dtype
        mapped = [shard for shard in shards if shard.num_tokens]
        self.lowest = min((shard.address for shard in mapped), default=0)
        self.end = max((shard.address + shard.data_bytes for shard in mapped), default=0)

    def addresses(self, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return byte addresses of tokens, numbered from the lowest map."""
        return np.uint64(self.lowest) + numbers.astype(np.uint64) * np.uint64(self.dtype.itemsize)


def _strided(lowest: int, end: int, dtype: np.dtype[np.integer], length: int) -> NDArray[np.integer]:
    """Return the view `(starts, length)` whose row k begins k tokens after `lowest`.

    Memory between the maps is in the view, and never indexed.
    """
    described = {
        "version": 3,
        "data": (lowest, True),
        "shape": ((end - lowest) // dtype.itemsize - length + 1, length),
        "strides": (dtype.itemsize, dtype.itemsize),
        "typestr": dtype.str,
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))
