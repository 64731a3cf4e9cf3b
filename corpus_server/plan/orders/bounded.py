"""Bounded shuffle: an order that is random within a working set of two groups of blocks.

A source of n windows falls into blocks of B consecutive windows. In each epoch the blocks come in a keyed
order. G blocks that are neighbours in this order form a group, and a keyed permutation mixes the windows of
the group. With 10 windows, B = 3, G = 2, in an epoch that orders the blocks 2, 3, 0, 1:

    offset in the epoch    0  1  2  3  |  4  5  6  7  8  9
    group                  0           |  1
    blocks                 2, 3        |  0, 1
    laid end to end        6  7  8  9  |  0  1  2  3  4  5
    permuted               8  6  9  7  |  3  0  5  2  1  4   the windows, in the order in which rows take them

The last block of a source, here block 3, may be shorter than B by `gap` windows. It comes at a place of its
own in each epoch. So all offsets behind its group are `gap` less than they would be with a full block, and
so are all places behind it in its group. Both corrections need no table.

Groups are numbered through all epochs: group g of epoch e is number e * groups + g.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, Self

import numpy as np

from corpus_server.pieces import Int64Array, UInt64Array
from corpus_server.plan.declared import declared, integer
from corpus_server.plan.numbers import Epochs, Offsets, RowNumbers, SourceNumbers
from corpus_server.plan.orders.order import ExtentSizes, Order, WorkingSet
from corpus_server.plan.permutation import Grid, invert, is_one, permute, round_keys

MAX_BLOCK_WINDOWS: Final = 2**40
MAX_GROUP_BLOCKS: Final = 2**16
"""Reading ahead looks at each block of a group."""

_ONE = np.uint64(1)
_TABLE_BLOCKS = 512
"""Blocks of a group whose order is kept in a table, 4 kB; of larger groups it is computed for each row."""


class _Place(NamedTuple):
    """Where windows come: arrays `(k,)`, or `(1,)` where all windows have the same."""

    keys: UInt64Array  # round keys of the epoch's order of blocks
    short: UInt64Array  # place of the source's last block in that order
    group: UInt64Array  # in its epoch
    slot: UInt64Array  # in the group's windows laid end to end


class _Shape(NamedTuple):
    """What follows from an order's blocks and the sizes of sources, `(sources,) uint64` each."""

    block: np.uint64  # windows of a block
    group: np.uint64  # blocks of a group
    full: np.uint64  # windows of a full group
    num_blocks: UInt64Array
    block_grids: Grid
    gap: UInt64Array  # windows that the last block lacks
    num_groups: UInt64Array
    # Windows of each source's groups: without and with the short block, then of the last group.
    sizes: UInt64Array  # (4 * sources,)
    grids: Grid
    block_keys: UInt64Array
    window_keys: UInt64Array
    circle_keys: UInt64Array


# Kept, because most steps lie in one group: without both tables, 64 rows take 2.6 times as long.
@lru_cache(maxsize=256)
def _of_epoch(key: int, num_blocks: int, epoch: int) -> tuple[UInt64Array, UInt64Array]:
    keys = round_keys(key, np.array([epoch], dtype=np.uint64))
    return keys, invert(np.array([num_blocks - 1], dtype=np.uint64), num_blocks, keys)


@lru_cache(maxsize=256)
def _blocks(key: int, num_blocks: int, epoch: int, first: int, stop: int) -> UInt64Array:
    keys, _ = _of_epoch(key, num_blocks, epoch)
    blocks = permute(np.arange(first, stop, dtype=np.uint64), num_blocks, keys)
    blocks.setflags(write=False)  # the cache shares the array
    return blocks


class BoundedShuffle(Order):
    """An order that is random within groups of blocks, for corpora larger than memory."""

    name = "shuffle"
    sentence = "random within groups of blocks, for corpora larger than memory or in an object store"
    has_groups = True

    block_windows: int = declared(
        integer(1, MAX_BLOCK_WINDOWS),
        "With `group_blocks`, shuffle is bounded: consecutive windows of a block.",
    )
    group_blocks: int = declared(
        integer(1, MAX_GROUP_BLOCKS), "Blocks whose windows are permuted among themselves."
    )

    def of_parts(self, num_parts: int) -> Self:
        """See `Order.of_parts`: with blocks of as many tokens."""
        return replace(self, block_windows=min(self.block_windows * num_parts, MAX_BLOCK_WINDOWS))

    @cached_property
    def _shape(self) -> _Shape:
        num_windows = self.num_rows
        block, group = np.uint64(self.block_windows), np.uint64(self.group_blocks)
        full = block * group
        num_blocks = (num_windows - _ONE) // block + _ONE
        gap = num_blocks * block - num_windows
        num_groups = (num_blocks - _ONE) // group + _ONE
        last = (num_blocks - (num_groups - _ONE) * group) * block
        every = np.full_like(last, full)
        sizes = np.stack((every, every - gap, last, last - gap), axis=1).reshape(-1)
        keys = map(self.sources.keys, ("blocks", "windows", "circle"))
        grids = Grid.over(num_blocks.tolist()), Grid.over(sizes.tolist())
        return _Shape(block, group, full, num_blocks, grids[0], gap, num_groups, sizes, grids[1], *keys)

    @property
    def block_rows(self) -> int | None:
        """See `Order.block_rows`."""
        return self.block_windows

    def largest_group(self, source: int) -> int:
        """See `Order.largest_group`."""
        return min(int(self._shape.full), int(self.num_rows[source]))

    def group_at(self, source: int, position: int) -> int:
        """See `Order.group_at`."""
        epoch, offset = divmod(position, int(self.num_rows[source]))
        epochs, offsets = (np.array([number], dtype=np.uint64) for number in (epoch, offset))
        return epoch * int(self._shape.num_groups[source]) + int(self._at(source, epochs, offsets).group[0])

    def group_rows(self, source: int, number: int) -> UInt64Array:
        """See `Order.group_rows`."""
        epoch, group = divmod(number, int(self._shape.num_groups[source]))
        starts = self._blocks(source, epoch, group) * self._shape.block
        return np.stack((starts, np.minimum(starts + self._shape.block, self.num_rows[source])), axis=1)

    def rows_at(self, source: SourceNumbers, epochs: Epochs, offsets: Offsets) -> RowNumbers:
        """See `Order.rows_at`."""
        place = self._at(source, epochs, offsets)
        mixed = permute(place.slot, *self._domain(source, epochs, place, self._shape.window_keys[source]))
        return self._window(source, epochs, place._replace(slot=mixed))

    def offsets_of(self, source: SourceNumbers, epochs: Epochs, rows: RowNumbers) -> Offsets:
        """See `Order.offsets_of`; rows may be none."""
        if not rows.size:
            return rows.copy()
        place = self._place(source, epochs, rows)
        within = invert(place.slot, *self._domain(source, epochs, place, self._shape.window_keys[source]))
        behind = place.group > place.short // self._shape.group
        offsets: Offsets = place.group * self._shape.full + within - self._shape.gap[source] * behind
        return offsets

    def beside(
        self,
        source: SourceNumbers,
        epochs: Epochs,
        rows: RowNumbers,
        distance: int | Int64Array,
        keys: UInt64Array | int | None = None,
    ) -> RowNumbers:
        """See `Order.beside`: so many places further in the group's circle, another permutation of it."""
        place = self._place(source, epochs, rows)
        if keys is None:
            keys = self._shape.circle_keys[source]
        size, keys = self._domain(source, epochs, place, keys)
        num_windows = np.int64(size) if isinstance(size, int) else size.size.astype(np.int64)
        at = (invert(place.slot, size, keys).astype(np.int64) + distance) % num_windows
        return self._window(source, epochs, place._replace(slot=permute(at.astype(np.uint64), size, keys)))

    def _at(self, source: SourceNumbers, epochs: Epochs, offsets: Offsets) -> _Place:
        """Return the groups of offsets and their places in them, before the windows are permuted."""
        (keys, short), gap = self._of_epochs(source, epochs), self._shape.gap[source]
        behind = offsets >= (short // self._shape.group + _ONE) * self._shape.full - gap
        group, within = np.divmod(offsets + gap * behind, self._shape.full)
        return _Place(keys, short, group, within)

    def _of_epochs(self, source: SourceNumbers, epochs: Epochs) -> tuple[UInt64Array, UInt64Array]:
        """Return the round keys of the order of blocks, and the place of each source's last block in it."""
        if isinstance(source, int) and is_one(epochs):
            return _of_epoch(
                int(self._shape.block_keys[source]), int(self._shape.num_blocks[source]), int(epochs[0])
            )
        keys = round_keys(self._shape.block_keys[source], epochs)
        last = np.broadcast_to(self._shape.num_blocks[source] - _ONE, epochs.shape)
        return keys, invert(last, self._block_domain(source), keys)

    def _blocks(self, source: int, epoch: int, group: int) -> UInt64Array:
        """Return the blocks of a group in the epoch's order; read-only."""
        first, size = group * int(self._shape.group), int(self._shape.num_blocks[source])
        return _blocks(
            int(self._shape.block_keys[source]), size, epoch, first, min(first + int(self._shape.group), size)
        )

    def _place(self, source: SourceNumbers, epochs: Epochs, windows: RowNumbers) -> _Place:
        keys, short = self._of_epochs(source, epochs)
        block, within = np.divmod(windows, self._shape.block)
        ranks = invert(block, self._block_domain(source), keys)
        group = ranks // self._shape.group
        slot = (ranks - group * self._shape.group) * self._shape.block + within
        behind = (group == short // self._shape.group) & (ranks > short)
        return _Place(keys, short, group, slot - self._shape.gap[source] * behind)

    def _window(self, source: SourceNumbers, epochs: Epochs, place: _Place) -> RowNumbers:
        first = place.group * self._shape.group  # place of the group's first block in the epoch's order
        gap = self._shape.gap[source]
        behind = place.slot >= (place.short + _ONE - first) * self._shape.block - gap
        behind &= place.group == place.short // self._shape.group
        ranks, within = np.divmod(place.slot + gap * behind, self._shape.block)
        if (
            isinstance(source, int)
            and self._shape.group <= _TABLE_BLOCKS
            and is_one(epochs)
            and is_one(first)
        ):
            blocks = self._blocks(source, int(epochs[0]), int(place.group[0]))[ranks]
        else:
            blocks = permute(first + ranks, self._block_domain(source), place.keys)
        blocks *= self._shape.block
        blocks += within
        return blocks

    def _block_domain(self, source: SourceNumbers) -> Grid | int:
        return (
            int(self._shape.num_blocks[source])
            if isinstance(source, int)
            else self._shape.block_grids.take(source)
        )

    def _domain(
        self, source: SourceNumbers, epochs: Epochs, place: _Place, keys: UInt64Array | int
    ) -> tuple[Grid | int, UInt64Array]:
        """Return the number of windows of each group and its round keys, as `permute` takes them."""
        num_groups, group = self._shape.num_groups[source], place.group
        kinds = (group == place.short // self._shape.group) + 2 * (group + _ONE == num_groups) + 4 * source
        size = int(self._shape.sizes[kinds[0]]) if is_one(kinds) else self._shape.grids.take(kinds)
        return size, round_keys(keys, epochs * num_groups + group)

    def working_set(self, extents: ExtentSizes) -> WorkingSet:
        """Return the extents of the group that is read, and of the next: those of the largest two."""
        blocks = _block_bytes(extents, self.block_windows)
        total, left = 0, self.group_blocks
        for num_bytes, number in sorted(blocks.items(), reverse=True):
            total += num_bytes * min(number, left)
            left -= min(number, left)
        most = min(int(extents.num_bytes.sum()), 2 * total)
        return WorkingSet(
            most,
            f"two groups of {self.group_blocks} blocks touch together extents of",
            "fewer group_blocks, block_windows of a shard's windows",
        )

    def __str__(self) -> str:
        return f"{self.name} {self.group_blocks} x {self.block_windows}"


def _block_bytes(extents: ExtentSizes, block_windows: int) -> Counter[int]:
    """Return how many blocks read extents of so many bytes together, without a look at each block.

    A block reads every extent from the one in which its first window begins to the last one that its last
    window reads of. Blocks that lie within one extent are counted; of others there are at most twice as many
    as extents.
    """
    sizes, begins, ends = extents
    total = int(ends[-1])
    before = np.concatenate(([0], np.cumsum(sizes)))
    borders = np.concatenate((ends[:-1], begins[1:], [total]))
    numbers = np.unique(np.minimum(borders, total - 1) // block_windows)  # of blocks with a border
    starts = numbers * block_windows
    lasts = np.minimum(starts + block_windows, total) - 1
    low, high = np.searchsorted(ends, starts, side="right"), np.searchsorted(begins, lasts, side="right") - 1
    found = Counter((before[high + 1] - before[low]).tolist())
    # Between two of them all blocks lie in one extent: that of the first window behind the earlier one.
    between = np.diff(numbers, prepend=-1) - 1
    its = np.searchsorted(ends, np.concatenate(([0], lasts[:-1] + 1)), side="right")
    for number, size in zip(between.tolist(), sizes[np.minimum(its, sizes.size - 1)].tolist(), strict=True):
        found[size] += number
    return +found
