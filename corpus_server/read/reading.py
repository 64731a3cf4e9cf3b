"""What a token response is made of, readable piece by piece.

A reading is a sequence of units of equal size: rows of a batch, or tokens of a range. All of it is decided
before a byte is read, so its size can be checked first, and any part of it can be read again: a large
response with its checksum in the header is hashed in one pass and sent in a second one.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.formats.masks import sent_as
from corpus_server.errors import InvalidParameter, StateUnavailable
from corpus_server.pieces import Pieces
from corpus_server.plan.numbers import BatchRows
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.gather import Gatherer, Selection
from corpus_server.stores import Extent
from corpus_server.work import Budget

MAX_LOCATED_ROWS = 8192
"""Rows located at once, which are a loader's whole request at 64 x 1,025: NumPy's calls cost much the same
for any number. Half as many take 1.5 times the CPU a window. Each costs 9 to 12 bytes while the response is
read."""

_STAGED_TOKENS = 1 << 16  # of a range whose extents are looked up at once: a view may hold a document in each
_LOCATED_TOKENS = 1 << 23
"""Predictions in rows that join pieces of documents: each piece has a location, and many are short. Counted
without the token that each row has besides, 4,096 rows of 2,049 are located together, in 5 ms; half as many
take 1.2 times the CPU a row."""

BLOCK_ROWS = 1024
"""Windows that are located together for small requests; half as many bring a tenth less. Of rows that join
pieces, which cost more, half of what a large request locates: one of the small ones waits for all."""

MAX_BLOCKS = 512
MAX_BLOCK_BYTES = 12 << 20
"""Blocks that are kept, those used last, and their bytes."""

PIECE_BYTES = 896 * 1024
"""Bytes gathered, hashed and sent at once: together with what else a thread touches they stay in 1 MiB of L2
cache between the three. 1.23 times the throughput of 256 KiB; of 1 MiB 1.08 to 1.13 times at 64 x 1,025, and
about the same at 512 x 2,049."""

ALIGNMENT = 8
"""Where a body holds several arrays, each begins at a multiple of so many bytes, behind zeros."""


class Reading(Protocol):
    """Tokens that can be read in pieces.

    Attributes:
        shape: of the whole array.
        num_units, unit_tokens: units in the whole array, and tokens of each.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    num_units: int
    unit_tokens: int

    def read(self, first: int, num_units: int) -> NDArray[np.integer]:
        """Return the tokens from unit `first` on, in C order: of at least one unit and at most `num_units`.

        Blocks while the disk is read.

        Raises:
            CorpusChanged: a shard was truncated or written to.
            ReadFailed: the disk did not deliver.
        """


class WindowReading:
    """A rank's rows of consecutive steps; for one thread at a time.

    `rows` is the number of rows of a step that belong to a rank, from `Sampler.check_part`. `world_size`
    matters to plans that balance ranks. With `masks`, the loss masks are read in place of the tokens: 0 where
    a token is no target of training, else 1 or the token's weight; ones for a shard without a mask. They are
    uint8, or float16 if a source of the plan has weights. `budget`, of who reads, is told how long locating
    takes.

    Attributes:
        step_rows: of each step, that must be located to find those of the rank.
    """

    def __init__(
        self,
        bound: BoundPlan,
        budget: Budget,
        *,
        step: int,
        count: int,
        rank: int,
        rows: int,
        world_size: int = 1,
        masks: bool = False,
    ) -> None:
        self.bound = bound
        self._budget = budget
        self._masks = masks
        self._step = step
        self._first_place = rank * rows
        self._world_size = world_size
        self.step_rows = bound.sampler.num_located(rows, world_size)
        self.unit_tokens = bound.sampler.seq_len(step) + 1
        self.shape: tuple[int, ...] = (count, rows, self.unit_tokens)
        self.num_units = count * rows
        self.dtype = np.dtype(sent_as(bound.mask_dtype)) if masks else bound.dtype
        self._most_rows = MAX_LOCATED_ROWS
        if not bound.sampler.is_window:
            self._most_rows = max(1, min(MAX_LOCATED_ROWS, _LOCATED_TOKENS // (self.unit_tokens - 1)))
        # The rows located last, the selection that holds them, and the number of the first one there.
        self._located: tuple[range, Selection, int] | None = None

    def masks(self) -> WindowReading:
        """Return a reading of the loss masks of the same rows, of the same shape."""
        count, rows, _ = self.shape
        part = {"rank": self._first_place // rows, "rows": rows, "world_size": self._world_size}
        return WindowReading(self.bound, self._budget, step=self._step, count=count, **part, masks=True)

    def row_numbers(self, first: int, num_units: int) -> BatchRows:
        """Return which rows of the global batch those from `first` on are, `(k,)`: as many as `selected`."""
        group, step, places, count = self._group(first)
        found = self.bound.sampler.row_numbers(step, places, count=count, world_size=self._world_size)
        numbers = np.broadcast_to(found, (count, len(places))).reshape(-1)
        return numbers[first - group.start :][:num_units]

    def read(self, first: int, num_units: int) -> NDArray[np.integer]:
        """Return rows from `first` on, `(k, unit_tokens)`: at most those that are located together."""
        selection, part = self.selected(first, num_units)
        return selection.read(part).view(self.dtype)  # masks of 0 and 1 are read as bool

    def selected(self, first: int, num_units: int) -> tuple[Selection, slice]:
        """Return a selection that holds the rows from `first` on, and which of its rows they are.

        They are at most `num_units`, and at most those that are located together.
        """
        if self._located is None or first not in self._located[0]:
            group, step, places, count = self._group(first)
            began = time.monotonic()
            try:
                selection, number = select(
                    self.bound, step, places, count, world_size=self._world_size, masks=self._masks
                )
            except (ArithmeticError, LookupError, MemoryError, ValueError):  # of numbers that fit nothing
                self._check_tables()
                raise
            self._budget.locate_seconds += time.monotonic() - began
            self._check_tables()
            selection.check_unchanged(slice(number, number + len(group)))
            self._located = group, selection, number
        group, selection, number = self._located
        begin = number + first - group.start
        return selection, slice(begin, begin + min(num_units, group.stop - first))

    def _check_tables(self) -> None:
        """Raise StateUnavailable if the rows may have been looked up in a table that was changed."""
        if self.bound.has_changed_tables():
            raise StateUnavailable("a table of the plan was changed in the state folder; it is built again")

    def pieces(self) -> Iterator[Pieces]:
        """Yield what the rows are made of, a group of rows at a time; windows are one piece each."""
        first = 0
        while first < self.num_units:
            numbers, step, places, count = self._group(first)
            yield self.bound.pieces(step, places, count=count, world_size=self._world_size)
            first = numbers.stop

    def _group(self, row: int) -> tuple[range, int, range, int]:
        """Return the rows to locate together with `row`: whole steps where several fit, else a part of one.

        Returns:
            Their numbers in this reading, and how a plan calls them: step, places of each step, steps.
        """
        steps, rows, _ = self.shape
        step, within = divmod(row, rows)
        count = min(max(1, self._most_rows // self.step_rows), steps - step)
        first = within - within % self._most_rows
        number = min(self._most_rows, rows - first)
        start = step * rows + first
        wanted = range(self._first_place + first, self._first_place + first + number)
        return range(start, start + count * number), self._step + step, wanted, count


class _Blocks:
    """Blocks of rows that were located together, those used last, up to a number of bytes; thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[tuple[object, ...], Selection | None] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: tuple[object, ...], before: tuple[object, ...]) -> tuple[bool, Selection | None]:
        """Return whether a block is worth locating, and the block if it was located already.

        It is if somebody has asked for it, or for the block `before` it, which leads here.
        """
        with self._lock:
            is_expected, block = key in self._kept or before in self._kept, self._kept.pop(key, None)
            self._keep(key, block)
            return is_expected, block

    def put(self, key: tuple[object, ...], block: Selection) -> None:
        """Keep a block."""
        with self._lock:
            if (before := self._kept.pop(key, None)) is not None:
                self._num_bytes -= before.num_bytes
            self._num_bytes += block.num_bytes
            self._keep(key, block)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    def _keep(self, key: tuple[object, ...], block: Selection | None) -> None:
        self._kept[key] = block
        while self._num_bytes > self._max_bytes or len(self._kept) > MAX_BLOCKS:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes if oldest is not None else 0


_blocks = _Blocks(MAX_BLOCK_BYTES)


def select(
    bound: BoundPlan, step: int, rows: range, count: int, *, world_size: int = 1, masks: bool = False
) -> tuple[Selection, int]:
    """Return a selection that holds rows of the global batch of steps, and the number of the first one in it.

    NumPy's calls cost much the same for 64 rows as for 512, and for a response of 64 x 1,025 they are half of
    the work. For a client that asks step after step the rows of the steps around are located together. It
    halves the p99 of 64 paced workers, and the p50 of one request is 1.4 times lower:

        asked for     5                6                           7, 8 ... 15    16
        located       5    (a first)   0 to 15  (a second one)     nothing        16 to 31

    `Sampler.check_part` must have allowed `step` and `count`.

    Args:
        rows: with a `world_size`, places; see `Sampler.row_numbers`.
        masks: whether their loss masks are read in place of the tokens.
    """
    first, num_steps, key = step, count, None  # that are located; the key of a block
    most = BLOCK_ROWS
    if not bound.sampler.is_window:
        most = min(MAX_LOCATED_ROWS, _LOCATED_TOKENS // bound.plan.seq_len) // 2
    size = most // (bound.sampler.num_located(len(rows), world_size) * count) * count
    begin = step - step % max(size, 1)
    if size > count and step + count <= begin + size:
        # By the plan's key and not by the plan, which may be large and must not be kept alive.
        part = (bound.key, masks, world_size, size, rows.start, rows.stop)
        is_expected, block = _blocks.find((begin, *part), (begin - size, *part))
        if block is not None:
            return block, (step - begin) * len(rows)
        if is_expected:
            with suppress(InvalidParameter):  # a stage ends within the block, or the steps end
                bound.sampler.check_part(begin, count=size)
                first, num_steps, key = begin, size, (begin, *part)
    gatherer, dtype = (bound.masks, bound.mask_dtype) if masks else (bound.gatherer, bound.dtype)
    pieces = bound.pieces(first, rows, count=num_steps, world_size=world_size)
    selection = gatherer.select(pieces, dtype, bound.staged[masks])
    if key is not None:
        _blocks.put(key, selection)
    return selection, (step - first) * len(rows)


class RangeReading:
    """Tokens [start, stop) of a corpus, across the borders of its shards; `gatherer` is over those."""

    unit_tokens = 1

    def __init__(self, corpus: Corpus, gatherer: Gatherer, *, start: int, stop: int) -> None:
        corpus.check_range(start, stop - start)
        self._corpus = corpus
        self._gatherer = gatherer
        self._start = start
        self.num_units = stop - start
        self.shape: tuple[int, ...] = (self.num_units,)
        self.dtype: np.dtype[np.integer] = corpus.dtype

    def extents(self) -> Iterator[Extent]:
        """Yield what of an object store must be staged before, some of it several times.

        In parts, because a range of a view may hold very many documents.
        """
        if self._gatherer.is_staged:
            for first in range(0, self.num_units, _STAGED_TOKENS):
                pieces = self._pieces(first, min(_STAGED_TOKENS, self.num_units - first))
                yield from self._gatherer.extents.of(pieces.places)

    def read(self, first: int, num_units: int) -> NDArray[np.integer]:
        """Return tokens from `first` on: `(num_units,)`."""
        selection = self._gatherer.select(self._pieces(first, num_units), self.dtype)
        selection.check_unchanged(slice(None))
        return selection.read(slice(None)).reshape(-1)

    def _pieces(self, first: int, num_units: int) -> Pieces:
        start = self._start + first
        return self._corpus.pieces(np.array([start]), np.array([start + num_units]))


def num_bytes(*readings: Reading) -> int:
    """Return the bytes of the whole array, or of a body of several."""
    size = 0
    for reading in readings:
        size += -size % ALIGNMENT + reading.num_units * reading.unit_tokens * reading.dtype.itemsize
    return size


def read_pieces(*readings: Reading) -> Iterator[memoryview]:
    """Yield the bytes of the array or of a body of several, little-endian.

    In pieces of at most `PIECE_BYTES` or one unit, none empty. The caller must drop a piece before it asks
    for the next one, which then takes the same memory.
    """
    for number, reading in enumerate(readings):
        if number and (padding := -num_bytes(*readings[:number]) % ALIGNMENT):
            yield memoryview(bytes(padding))
        most = max(1, PIECE_BYTES // (reading.unit_tokens * reading.dtype.itemsize))
        first = 0
        while first < reading.num_units:
            array = reading.read(first, min(most, reading.num_units - first))
            first += len(array)
            piece = array.reshape(-1).view(np.uint8).data
            del array
            yield piece
            del piece


def read_arrays(reading: Reading) -> Iterator[NDArray[np.integer]]:
    """Yield the tokens, `(k,)`, in pieces as `read_pieces` yields their bytes; drop each as these."""
    pieces = read_pieces(reading)
    while (piece := next(pieces, None)) is not None:
        array = np.frombuffer(piece, reading.dtype)
        del piece
        yield array
        del array


def hash_arrays(digest: xxhash.xxh3_64, budget: Budget, *readings: Reading) -> None:
    """Add a whole body to a digest."""
    for piece in read_pieces(*readings):
        digest.update(piece)
        num_bytes = len(piece)
        del piece  # before the next one is read: a response costs the memory of one
        budget.spend(num_bytes=num_bytes)
