"""When a plan reads extents next, in this epoch or the next: what is needed last leaves the cache first.

    epoch e                               epoch e + 1
    |----------|---- step --------------|--------------------------|
       x              read now   y           y        x
                                 |<- y               x ->|

The rows of an extent are neighbours, and an order says at which place of an epoch each row comes. Some of
them stand for all: in a bounded shuffle the rows of a block come in one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.plan.laid import Laid
from corpus_server.plan.rows.rows import Rows
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.stores import is_staged

_SAMPLES: Final = 8  # rows of an extent; it may hold several blocks
_PACE_STEPS: Final = 1024  # over which it is counted how many rows of a source a step takes


class _Place(NamedTuple):
    """A shard in an object store: its source, the first of its rows there, how many, and where they lie.

    With `is_cut`, each extent belongs to one block.
    """

    source: int
    first_row: int
    num_rows: int
    data_offset: int
    row_bytes: float
    is_cut: bool

    def row_at(self, byte: int) -> int:
        """Return about the row of the source that begins at a byte of the file."""
        return self.first_row + min(
            max(0, int((byte - self.data_offset) / self.row_bytes)), self.num_rows - 1
        )


class NextUse:
    """When the extents of a plan are read next; arithmetic of ms for thousands.

    Args:
        bound: a plan over corpora in object stores.
    """

    def __init__(self, bound: BoundPlan) -> None:
        self._sampler = bound.sampler  # not the plan: the next uses of a plan must not keep it alive
        self._places = {laid.seq_len: _places(bound, laid.rows) for laid in bound.sampler.laid}

    def steps_until(self, step: int, keys: Sequence[str]) -> NDArray[np.float64]:
        """Return how many steps after a training step extents are read again, `(k,)`; inf: not known.

        Args:
            keys: of extents in the cache.
        """
        until = np.full(len(keys), np.inf)
        if not self._sampler.plan.order.has_epochs:
            return until
        laid = self._sampler.laid_of(self._sampler.seq_len(step))
        places = self._places[laid.seq_len]
        found: dict[int, list[tuple[int, int, int]]] = {}  # by source: number of the key, first and last row
        for number, key in enumerate(keys):
            name, _, its_range = key.partition("/")
            if (place := places.get(name)) is None:
                continue
            first, last = (place.row_at(int(byte)) for byte in its_range.split("-"))
            if place.is_cut:  # a few rows at its ends may belong to other blocks
                first, last = first + (last - first) // _SAMPLES, last - (last - first) // _SAMPLES
            found.setdefault(place.source, []).append((number, first, last))
        for source, extents in found.items():
            numbers, first, last = np.array(extents).T
            until[numbers] = self._steps(laid, source, step, first, last)
        return until

    def _steps(
        self, laid: Laid, source: int, step: int, first: NDArray[np.int64], last: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        sampler = self._sampler
        plan_step = sampler.timeline.plan_step(step)
        position, later = (
            int(sampler.timeline.given_before(each)[0][source]) * laid.num_parts
            for each in (plan_step, plan_step + _PACE_STEPS)
        )
        if later == position:
            return np.full(first.size, np.inf)
        size = int(laid.rows.num_rows[source])
        epoch, offset = divmod(position, size)
        rows = np.linspace(first, last, _SAMPLES).astype(np.uint64).reshape(-1)
        ahead = []
        for number in (epoch, epoch + 1):
            offsets = laid.order.offsets_of(source, np.array([number], dtype=np.uint64), rows)
            ahead.append(offsets.astype(np.float64) + (number - epoch) * size - offset)
        nearest = np.where(ahead[0] >= 0, *ahead).reshape(_SAMPLES, -1).min(axis=0)
        steps: NDArray[np.float64] = nearest * (_PACE_STEPS / (later - position))
        return steps


def _places(bound: BoundPlan, rows: Rows) -> dict[str, _Place]:
    """Return where rows lie, by the key of the object; of several runs in a file the first."""
    assert rows.shard_row is not None  # a plan of others is not bound to staged corpora
    shard_row, first_row = rows.shard_row.tolist(), rows.first_row.tolist()
    places: dict[str, _Place] = {}
    for number, (_, shard) in enumerate(bound.shards):
        source, num_rows = int(bound.source_of_shard[number]), shard_row[number + 1] - shard_row[number]
        for its, staged in zip((shard, shard.mask), bound.staged, strict=True):
            if its is not None and is_staged(its.file) and num_rows:
                key = its.file.key
                at = shard_row[number] - first_row[source], num_rows
                place = _Place(
                    source, *at, its.data_offset, its.data_bytes / num_rows, bool(staged.is_cut[number])
                )
                places.setdefault(key, place)
    return places
