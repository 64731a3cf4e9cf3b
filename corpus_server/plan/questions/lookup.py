"""Look-ups: which rows of a run hold a token, found backwards over stages, skips and substitutes.

A position of a source says when a row comes: ascending positions are ascending plan steps and rows. So a
look-up first finds all positions whose units (windows, or pieces of documents) hold the token, then keeps
the earliest, and only for those does it work out the steps and rows, which needs a mixture's blocks. Where a
stage reads windows in parts, only the parts that hold a token of the range count; they are neighbours. Rows
of several lengths are looked through length by length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.described import DOCSTRINGS
from corpus_server.errors import InvalidParameter
from corpus_server.pieces import NO_SHARD, Pieces, UInt64Array, expanded
from corpus_server.plan.exclusion import Replacing
from corpus_server.plan.laid import Laid
from corpus_server.plan.mixture import BLOCK_COST
from corpus_server.plan.numbers import Positions, UnitNumbers
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.sampler import Sampler
from corpus_server.plan.stage import MAX_GLOBAL_BATCH_SIZE, MAX_STEP
from corpus_server.work import Budget

_MAX_POSITION: Final = MAX_STEP * MAX_GLOBAL_BATCH_SIZE
_PAIRS_AT_ONCE: Final = 1 << 16
_BLOCKS_AT_ONCE: Final = 64
_ROWS_AT_ONCE: Final = 1 << 12
_REMEDY: Final = "ask for fewer tokens"


@dataclass(slots=True)  # not frozen, because there may be 100,000, and making one would take twice as long
class Sighting:
    """One row that holds what was looked for."""

    __pydantic_config__ = DOCSTRINGS

    epoch: int
    """Pass over the source."""
    step: int | None
    """Training step; null if training skips it."""
    plan_step: int
    row: int
    """Row of the global batch."""
    shard: int
    """Number in the plan's shard list."""
    start: int
    """First token of the row in its shard."""
    offset: int
    """Place in the row of the first token held."""
    held: int
    """Tokens that were looked for, of the piece of the row that holds most of them, the first of several."""
    held_at: int
    """Tokens that were looked for and come before those held; of a view that repeats them, of all copies."""
    substitute: bool
    """Whether the window, or a piece that was looked for, stands in for an excluded one."""


class Sightings(NamedTuple):
    """The rows that hold what was looked for."""

    num_found: int
    rows: list[Sighting]  # by plan step and row; as many as the limit allows


class _Search(NamedTuple):
    """Units to look for in some epochs, at positions of their length below `stop`.

    Without an exclusion: rows that hold the units if nothing is excluded. With one: rows that would hold an
    excluded unit, at positions [start, stop), so that one of `units` stands in for it.
    """

    units: UnitNumbers
    epochs: range
    exclusion: Replacing | None = None
    start: int = 0
    stop: int = 0
    num_laps: int = 1  # see `Replacing.num_laps`

    @property
    def num_pairs(self) -> int:
        return self.units.size * len(self.epochs) * self.num_laps


def look_up(
    sampler: Sampler,
    corpus: str,
    start: int,
    stop: int,
    budget: Budget,
    *,
    epochs: int = 1,
    limit: int | None = None,
) -> Sightings:
    """Return the rows of the first epochs that hold a token of [start, stop).

    The range is corpus-wide, of a view in its corpus, inside the corpus and not empty. Without a `limit`, all
    rows are returned.

    Raises:
        InvalidParameter: the plan's order has no epochs.
        ResponseTooLarge: the units that hold the tokens, times the epochs and with those that they stand in
            for, are more than the question may compute.
    """
    source = sampler.plan.sources.index(corpus)
    ranges = sampler.own_ranges(source, Ranges([[start, stop]]))
    if not ranges.total:  # a view without them
        return Sightings(num_found=0, rows=[])
    budget.check(rows=len(ranges.starts), parameter="stop", remedy=_REMEDY)
    parts = []
    for laid in sampler.laid:
        parts += _found(sampler, laid, source, ranges, epochs, budget)
    if not parts:
        return Sightings(num_found=0, rows=[])
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    del parts  # as large as the columns: 30 MB for a million pairs
    if sampler.rows.holds_several:
        columns = _each_row_once(columns)
        budget.spend()
    positions, num_parts = columns[0], columns[-1]
    num_found = int(num_parts.sum())
    earliest = np.arange(positions.size)
    if limit is not None and limit < positions.size:  # sorting a million takes 100 ms, finding the least 15
        earliest = np.flatnonzero(positions <= np.partition(positions, limit)[limit])
        budget.spend()
    order = earliest[np.lexsort((columns[-2][earliest], positions[earliest]))]
    # A window may have a million parts: those beyond the limit are not made.
    before = np.cumsum(num_parts[order]) - num_parts[order]
    order = order[: limit if limit is None else np.searchsorted(before, limit)]
    positions, *rest = (column[order] for column in columns)
    del columns, num_parts, before, earliest
    rows: list[Sighting] = []
    for here, num_blocks in row_slices(sampler, source, positions, budget):
        budget.spend(rows=num_blocks * BLOCK_COST)
        left = None if limit is None else limit - len(rows)
        its = (column[here] for column in rest)
        rows += _rows(sampler, source, ranges, positions[here], *its, limit=left)
    return Sightings(num_found=num_found, rows=rows)


def _found(
    sampler: Sampler, laid: Laid, source: int, ranges: Ranges, epochs: int, budget: Budget
) -> list[tuple[NDArray[Any], ...]]:
    """Return where rows of one length hold tokens of ranges, unit by unit: columns, `(m,)` each.

    Position of the timeline, whether the row holds the unit as a substitute, epoch, first part, number of
    parts.
    """
    epochs = min(epochs, _MAX_POSITION // int(laid.rows.epoch_rows[source]) + 1)
    held = Ranges(laid.rows.within(source, ranges, budget))
    budget.check(rows=held.total, parameter="stop", remedy=_REMEDY)
    units = expanded(held.starts, held.stops - held.starts)[1].astype(np.uint64)
    parameter, remedy = "epochs" if epochs > 1 else "stop", "ask for fewer epochs or tokens"
    end = laid.num_positions(source, epochs)
    passes = -(-end // int(laid.rows.num_rows[source]))
    num_pairs = units.size * passes
    budget.check(rows=num_pairs, parameter=parameter, remedy=remedy)
    searches = [_Search(units, range(passes), stop=end)]
    for search in _substitute_searches(sampler, laid, source, units, epochs):
        num_pairs += units.size + search.num_pairs  # making the search went through all units, too
        budget.spend()
        budget.check(rows=num_pairs, parameter=parameter, remedy=remedy)
        searches.append(search)
    parts: list[tuple[NDArray[Any], ...]] = []
    for search in searches:
        for first in range(0, search.num_pairs, _PAIRS_AT_ONCE):
            indices = np.arange(first, min(first + _PAIRS_AT_ONCE, search.num_pairs), dtype=np.uint64)
            at, is_substitute, shown = _positions(sampler, laid, source, search, indices)
            number = at // laid.rows.epoch_rows[source]
            positions, part = laid.of_timeline(at)
            touched = part, np.ones(part.shape, dtype=np.int64)
            if not laid.rows.own_lengths:
                touched = _parts_touched(sampler, source, ranges, positions, shown)
            parts.append((positions, is_substitute, number, *touched))
            budget.spend(rows=indices.size)
    return parts


def _each_row_once(columns: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Join the columns of units that lie in one row: it is a substitute's if one of them is a substitute."""
    positions, is_substitute, _, part, _ = columns
    order = np.lexsort((~is_substitute, part, positions))
    first = np.diff(positions[order], prepend=np.uint64(2**64 - 1)) != 0
    first |= np.diff(part[order], prepend=-1) != 0
    return [column[order[first]] for column in columns]


def _substitute_searches(
    sampler: Sampler, laid: Laid, source: int, units: UnitNumbers, epochs: int
) -> Iterator[_Search]:
    """Yield for each stage what to look for where units stand in for excluded ones."""
    size, num_parts = int(laid.rows.epoch_rows[source]), laid.num_parts
    begins, num_stages = sampler.timeline.begins(source), len(sampler.plan.stages)
    # Where the last stage does not use the source, there is a last position.
    end = epochs * size if sampler.timeline.uses(source)[-1] else int(begins[-1]) * num_parts
    for stages, exclusion in laid.replacing:
        # Those of them that do not use the source give none of its positions.
        start = int(begins[stages.start]) * num_parts
        stop = int(begins[stages.stop]) * num_parts if stages.stop < num_stages else end
        stop = min(stop, epochs * size)
        if start >= stop:
            continue
        left = units[~exclusion.contains(units)]
        its = range(start // size, -(-stop // size))
        yield _Search(left, its, exclusion, start, stop, exclusion.num_laps(left))


def _positions(
    sampler: Sampler, laid: Laid, source: int, search: _Search, indices: UInt64Array
) -> tuple[Positions, NDArray[np.bool_], UnitNumbers]:
    """Return for some pairs of a search, numbered from 0 to `num_pairs`, the positions that they are at.

    `(m,)` each: position in `laid`, whether its row holds the unit as a substitute, the unit.
    """
    rest, which = np.divmod(indices, np.uint64(search.units.size))
    laps, epochs = np.divmod(rest, np.uint64(len(search.epochs)))
    shown, epochs = search.units[which], epochs + np.uint64(search.epochs.start)
    if search.exclusion is not None:
        held, which = search.exclusion.stood_in_for(shown, epochs, laps)
        positions = laid.positions_of(source, held, epochs[which])
        kept = (positions >= np.uint64(search.start)) & (positions < np.uint64(search.stop))
        kept &= sampler.has_at(laid, source, laid.of_timeline(positions)[0])
        return positions[kept], np.ones(np.count_nonzero(kept), dtype=bool), shown[which][kept]
    positions = laid.positions_of(source, shown, epochs)
    kept = positions < np.uint64(search.stop)
    places = laid.of_timeline(positions)[0]
    numbers = sampler.timeline.stage_numbers(source, places)
    kept &= sampler.timeline.uses(source)[numbers] & sampler.has_at(laid, source, places)
    for stages, exclusion in laid.replacing:
        here = np.flatnonzero((numbers >= stages.start) & (numbers < stages.stop))
        kept[here] &= ~exclusion.contains(shown[here])
    return positions[kept], np.zeros(np.count_nonzero(kept), dtype=bool), shown[kept]


def row_slices(
    sampler: Sampler, source: int, positions: Positions, budget: Budget
) -> Iterator[tuple[slice, int]]:
    """Yield parts of ascending positions with a bounded number of pairs and of blocks, and that of blocks."""
    blocks = sampler.timeline.blocks_of(source, positions)
    distinct = np.diff(blocks, prepend=-1) != 0
    budget.check(
        rows=BLOCK_COST * int(distinct.sum()),
        parameter="limit",
        remedy="the rows lie in many blocks of the mixture: ask for fewer epochs or a lower limit",
    )
    piece = blocks // _BLOCKS_AT_ONCE + np.arange(blocks.size) // _ROWS_AT_ONCE
    borders = [0, *(np.flatnonzero(np.diff(piece)) + 1).tolist(), blocks.size]
    return ((slice(start, stop), int(distinct[start:stop].sum())) for start, stop in pairwise(borders))


def _parts_touched(
    sampler: Sampler, source: int, ranges: Ranges, positions: Positions, shown: UnitNumbers
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which parts of the windows at some positions hold a token of a range: first, number.

    `(m,)` each; part k of a window holds its tokens k * seq_len to (k + 1) * seq_len, both included.
    """
    timeline = sampler.timeline
    if (timeline.seq_lens == sampler.plan.seq_len).all():
        return np.zeros(positions.shape, dtype=np.int64), np.ones(positions.shape, dtype=np.int64)
    if len(ranges.starts) > 1:
        raise InvalidParameter(
            "the tokens come in several places of the view, and stages of this plan read windows in parts; "
            "look up a document that the view holds once, or a shorter range",
            parameter="stop",
        )
    ((start, stop),) = ranges.bounds.tolist()
    seq_lens = timeline.seq_lens[timeline.stage_numbers(source, positions)]
    begins, _ = sampler.rows.tokens_of(source, shown)
    first = np.maximum(0, -((begins + seq_lens - start) // seq_lens))
    last = np.minimum(sampler.plan.seq_len // seq_lens - 1, (stop - 1 - begins) // seq_lens)
    return first, last - first + 1


def _rows(
    sampler: Sampler,
    source: int,
    ranges: Ranges,
    positions: Positions,
    substitute: NDArray[np.bool_],
    epochs: UInt64Array,
    first_part: NDArray[np.int64],
    num_parts: NDArray[np.int64],
    *,
    limit: int | None,
) -> list[Sighting]:
    timeline = sampler.timeline
    of, parts = (each[:limit] for each in expanded(first_part, num_parts))  # of each row, its window
    plan_steps, first_rows, _ = timeline.rows_of(source, positions)
    skipped = timeline.skips.contains(plan_steps)[of].tolist()
    steps = timeline.skips.num_outside_below(plan_steps)[of].tolist()
    pieces, borders = sampler.pieces_at(source, positions, first_part)
    if not sampler.rows.own_lengths and len(borders) - 1 == len(pieces):  # of windows rows may be parts
        seq_lens = timeline.seq_lens[timeline.stage_numbers(source, positions)][of]
        pieces, borders = pieces[of], np.arange(of.size + 1)
        pieces[:, 1] += parts * seq_lens
        pieces[:, 2] = np.minimum(pieces[:, 2], seq_lens + 1)
    places, borders_of = sampler.resolved(Pieces(pieces, borders))
    columns = (
        epochs[of].tolist(),
        [None if is_skipped else step for is_skipped, step in zip(skipped, steps, strict=True)],
        plan_steps[of].tolist(),
        (first_rows[of].astype(np.int64) + parts).tolist(),
        *places[borders_of[:-1], :2].T.tolist(),
        *(each.tolist() for each in _places(sampler, source, ranges, Pieces(pieces, borders))),
        substitute[of].tolist(),
    )
    return [Sighting(*fields) for fields in zip(*columns, strict=True)]


def _places(
    sampler: Sampler, source: int, ranges: Ranges, rows: Pieces
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return `Sighting.offset`, `held` and `held_at` of each row: all three of the same piece."""
    (pieces, borders), windows = rows, sampler.windows
    shards, within, counts = pieces.T
    begins = (windows.shard_token[shards] - windows.first_token[source]).astype(np.int64) + within
    before = counts.cumsum() - counts
    below = ranges.num_inside_below(np.stack((begins, begins + counts)).astype(np.uint64)).astype(np.int64)
    held = np.where(shards == NO_SHARD, 0, below[1] - below[0])
    most = np.repeat(np.maximum.reduceat(held, borders[:-1]), np.diff(borders))
    first = np.minimum.reduceat(np.where(held == most, np.arange(held.size), held.size), borders[:-1])
    starts, stops = ranges.bounds.astype(np.int64).T
    start = starts[stops.searchsorted(begins[first], side="right")]  # of the first range behind its begin
    places = before[first] - before[borders[:-1]] + np.maximum(0, start - begins[first])
    return places, held[first], below[0][first]
