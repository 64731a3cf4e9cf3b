"""The rows of one length over the sources of a plan, in the plan's order.

Most plans have rows of one length. Where a stage of another `seq_len` has rows of its own, see
`Rows.own_lengths`, each length is laid over the sources by itself. Positions here count rows of this length;
those of the timeline count rows of the plan's `seq_len`, of which each is `num_parts` here:

    position of the timeline    5                   6
    positions here              10 (part 0)  11     12  13
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus_server.pieces import Int64Array
from corpus_server.plan.exclusion import Exclusion, Replacing
from corpus_server.plan.left_out import LeftOut
from corpus_server.plan.numbers import Epochs, Positions, RowNumbers, SourceNumbers, UnitNumbers
from corpus_server.plan.orders import Order
from corpus_server.plan.rows.rows import Rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Laid:
    """Rows of one length, what replaces some of what they hold, and their order.

    Attributes:
        seq_len: inputs of a row.
        num_parts: rows that stand for one of the plan's `seq_len`.
        rows, order: over the sources.
        exclusions: what is excluded, with the stages in which it is, ascending.
        left_out: what a member of a family leaves out, in all stages.
        num_stages: of the plan.
    """

    seq_len: int
    num_parts: int
    rows: Rows
    order: Order
    exclusions: Sequence[tuple[range, Exclusion]]
    left_out: LeftOut | None
    num_stages: int

    @property
    def replacing(self) -> Sequence[tuple[range, Replacing]]:
        """What is replaced, with the stages in which it is, ascending."""
        if self.left_out is not None:
            return [(range(self.num_stages), self.left_out)]
        return self.exclusions

    def exclusion_at(self, number: int) -> Replacing | None:
        """Return what a stage excludes, with what was excluded before it; or what a member leaves out."""
        if self.left_out is not None:
            return self.left_out
        at = bisect_right(self.exclusions, number, key=lambda each: each[0].start)
        return self.exclusions[at - 1][1] if at else None

    def positions(self, positions: Positions, parts: Int64Array | Positions) -> Positions:
        """Return the positions here of those of the timeline, `(k,)`, and the parts of these."""
        if self.num_parts == 1:
            return positions
        return positions * np.uint64(self.num_parts) + parts.astype(np.uint64)

    def of_timeline(self, positions: Positions) -> tuple[Positions, NDArray[np.int64]]:
        """Return the positions of the timeline, and which part of each: the inverse of `positions`."""
        if self.num_parts == 1:
            return positions, np.zeros(positions.shape, dtype=np.int64)
        its, parts = np.divmod(positions, np.uint64(self.num_parts))
        return its, parts.astype(np.int64)

    def rows_at(self, source: SourceNumbers, positions: Positions) -> tuple[RowNumbers, Epochs]:
        """Return the rows at positions, before excluded ones are replaced, and their epochs.

        Args:
            source: `(k,)`, or one for all.
            positions: `(k,) uint64`, at least one.
        """
        if self.order.has_epochs:
            epochs, offsets = np.divmod(positions, self.rows.num_rows[source])
        else:
            epochs, offsets = np.zeros_like(positions), positions
        rows = self.order.rows_at(source, epochs, offsets)
        return rows + self.rows.first_row[source], epochs

    def positions_of(self, source: int, units: UnitNumbers, epochs: Epochs) -> Positions:
        """Return the positions whose rows hold units of a source, if nothing is excluded.

        Args:
            units: `(k,) uint64`: windows, where rows are windows.
            epochs: `(k,) uint64`, or `(1,)` for all units.

        Raises:
            InvalidParameter: the order has no epochs, so there is nothing to invert.
        """
        rows = self.rows.holders(source, units, epochs) - self.rows.first_row[source]
        offsets = self.order.offsets_of(source, epochs, rows)
        positions: Positions = offsets + epochs * self.rows.num_rows[source]
        return positions

    def num_positions(self, source: int, epochs: int) -> int:
        """Return how many positions the first epochs of a source have; a plan may end before."""
        positions, used = epochs * int(self.rows.epoch_rows[source]), self.order.num_used
        return positions if used is None else min(positions, int(used[source]))
