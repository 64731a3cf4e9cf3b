"""The rows of one source whose documents are packed: which pieces a row holds, and back again.

Rows, slots and pieces are numbered through the source. A row has the same slots in every epoch. The pieces of
a class are dealt to the slots of that class by a keyed permutation, another one in each epoch:

    row  ->  pattern, number in it  ->  slots  ->  class, place  ->  pieces  ->  (pieces.py)
         <-  (sort, search)         <-         <-  (inverse)     <-
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from corpus_server.pieces import Int64Array, UInt64Array, at_or_below, expanded
from corpus_server.plan.mixture import grouped
from corpus_server.plan.numbers import Epochs, RowNumbers, UnitNumbers
from corpus_server.plan.packing.lists import Lists
from corpus_server.plan.packing.pieces import CutDocuments
from corpus_server.plan.packing.table import Table, room_of
from corpus_server.plan.permutation import Grid, invert, mix64, permute, round_keys, uniform


class Packing(CutDocuments):
    """The packed rows of one source, whose pieces they hold; there are as many slots as pieces.

    Args:
        table: from `build`.
        key: from `stream_key("documents", seed, source)`.

    Attributes:
        num_rows: of the source.
        num_bytes: memory of the table.
        class_first: also the first slot of each class.
    """

    def __init__(self, table: Table, *, key: int) -> None:
        super().__init__(table)
        self.key, self.num_rows = key, int(table.pattern_row[-1])
        self.num_bytes = sum(array.nbytes for array in table)
        self._slots = Lists(table.slot_low, table.pattern_entry, table.slot_splits)
        self._turn_key = int(mix64(np.array([key], dtype=np.uint64))[0])

    def slots(self, rows: RowNumbers, epochs: Epochs) -> tuple[UInt64Array, Int64Array]:
        """Return the slots of rows, each row's in the order of its tokens.

        A row's longest piece comes first but for a rotation, another one in each epoch. If each row begins
        with a document, those that do so rotate, and the others follow.

        Args:
            rows: `(k,)`.
            epochs: `(k,)` or `(1,)`; of this source.

        Returns:
            `(p,) uint64` slots, and `(k + 1,) int64`: the first one of each row; then p.
        """
        table = self.table
        patterns = at_or_below(table.pattern_row, rows)
        counts = self._slots.sizes(patterns)
        borders = np.append(0, counts.cumsum())
        blocks = at_or_below(table.block_pattern, patterns)
        first_slots = table.class_first[table.block_class[blocks]]
        turned = counts
        if self.begin:
            wholes = (table.class_first[table.block_whole[blocks]] - first_slots).astype(np.int64)
            turned = counts - self._slots.places(patterns, wholes)
        turns = uniform(self._turn_key, epochs * np.uint64(self.num_rows) + rows, turned.astype(np.uint64))
        row = np.repeat(np.arange(rows.size), counts)
        places = np.arange(borders[-1]) - (borders[:-1] - turns.astype(np.int64))[row]
        sizes, limits = counts[row], turned[row]
        places -= np.where(places >= limits, limits, 0)
        if self.begin:
            still = np.arange(borders[-1]) - borders[:-1][row]
            places = np.where(still < limits, places, still)
        first = first_slots + (rows - table.pattern_row[patterns])
        slots = self._slots.at(patterns[row], sizes - 1 - places)  # a longer piece has a higher slot
        return first[row] + slots.astype(np.uint64), borders

    def costs(self, rows: RowNumbers) -> Int64Array:
        """Return what attention within documents costs for rows: the sum of squares of their slots' room.

        Args:
            rows: `(k,)`.

        Returns:
            `(k,) int64`, of tokens squared; the same in every epoch.
        """
        patterns = at_or_below(self.table.pattern_row, rows)
        new = np.unique(patterns[self._pattern_costs[patterns] == 0])
        if new.size:
            slots, borders = self.slots(self.table.pattern_row[new], np.zeros(1, np.uint64))
            tokens = self.rooms(self.classes(slots))
            self._pattern_costs[new] = np.add.reduceat(tokens * tokens, borders[:-1])
        return self._pattern_costs[patterns]

    @cached_property
    def _pattern_costs(self) -> Int64Array:
        """The cost of a row of each pattern, 0 until it is needed; threads may find the same ones at once."""
        return np.zeros(self.table.pattern_row.size - 1, dtype=np.int64)

    def kinds(self, classes: Int64Array) -> Int64Array:
        """Return the `Kind` of classes."""
        blocks = self.table.block_class.searchsorted(classes, side="right") - 1
        kinds: Int64Array = (classes >= self.table.block_tail[blocks]).astype(np.int64)
        kinds += classes >= self.table.block_whole[blocks]
        return kinds

    def rooms(self, classes: Int64Array) -> Int64Array:
        """Return how many tokens of a row the slots of classes take."""
        return room_of(self.table.class_longest[classes], self.kinds(classes), self.table.shape)

    def pieces_at(self, slots: UInt64Array, epochs: Epochs, classes: Int64Array | None = None) -> UnitNumbers:
        """Return the pieces that slots hold: `(p,) uint64`; epochs are `(p,)` or `(1,)`.

        Args:
            classes: of the slots, if they are known; to find them takes a fifth of the time of all.
        """
        first, sizes, keys = self._domains(slots, epochs, classes)
        return first + permute(slots - first, sizes, keys)

    def slots_of(self, pieces: UnitNumbers, epochs: Epochs) -> UInt64Array:
        """Return the slots that hold pieces: the inverse of `pieces_at`."""
        first, sizes, keys = self._domains(pieces, epochs)
        return first + invert(pieces - first, sizes, keys)

    def rows_of(self, slots: UInt64Array) -> RowNumbers:
        """Return the row that each slot belongs to: `(p,) uint64`.

        Sorts the entries of each block that a slot lies in: 0.4 ms at a `seq_len` of 2k, 14 ms at 128k. To
        keep them sorted would take 1.6 bytes a document at 128k.
        """
        table = self.table
        rows = np.empty_like(slots)
        blocks = table.block_class.searchsorted(self.classes(slots), side="right") - 1
        for block, here in grouped(blocks):
            patterns = np.arange(*table.block_pattern[block : block + 2])
            which, at = expanded(np.zeros_like(patterns), self._slots.sizes(patterns))
            first = self._slots.at(patterns[which], at)
            order = first.argsort()
            places = (slots[here] - table.class_first[table.block_class[block]]).astype(np.int64)
            entries = order[first[order].searchsorted(places, side="right") - 1]
            numbers = (places - first[entries]).astype(np.uint64)
            rows[here] = table.pattern_row[patterns[which[entries]]] + numbers
        return rows

    def extent(self, row_start: int, row_stop: int) -> list[tuple[int, int]]:
        """Return the ranges of tokens of the blocks that hold rows [row_start, row_stop), at least one."""
        table = self.table
        patterns = table.pattern_row.searchsorted(
            np.array([row_start, row_stop - 1], np.uint64), side="right"
        )
        low, high = (table.block_pattern.searchsorted(patterns - 1, side="right") - 1).tolist()
        found = []
        for block in range(low, high + 1):
            end = int(table.block_document[block + 1]) + block
            start = int(table.block_token[block])
            found.append((start, start + int(table.document_token[end])))
        return found

    def _domains(
        self, pieces: UnitNumbers, epochs: Epochs, classes: Int64Array | None = None
    ) -> tuple[UInt64Array, Grid, UInt64Array]:
        """Return each piece's class: its first piece, its grid, and the round keys of the epoch."""
        if classes is None:
            classes = self.classes(pieces)
        first = self.class_first[classes]
        numbers = epochs * np.uint64(self.num_classes) + classes.astype(np.uint64)
        return first, Grid.over(self.class_first[classes + 1] - first), round_keys(self.key, numbers)
