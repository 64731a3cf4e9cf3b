"""Which members of a family hold a document in their rows, and at which steps, for many members at once.

Where a document's units come is the same for all members. What differs is which units a member replaces, and
by what: both are computed side by side, with a key for each member.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from corpus_server.described import described
from corpus_server.errors import InvalidParameter
from corpus_server.pieces import Int64Array, UInt64Array, expanded
from corpus_server.plan.family import member_keys
from corpus_server.plan.laid import Laid
from corpus_server.plan.mixture import BLOCK_COST
from corpus_server.plan.numbers import Epochs, Positions, UnitNumbers
from corpus_server.plan.questions.lookup import row_slices
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.sampler import Sampler
from corpus_server.work import Budget

_PAIRS_AT_ONCE: Final = 1 << 13


@described
class MemberSightings:
    """What one member holds of a document."""

    member: int
    leaves_out: bool
    """Whether the member leaves the document out; then no row holds it."""
    doubles: bool
    """Whether the member doubles the document."""
    num_rows: int
    """Windows, with rows documents rows, of the first epochs that training sees and that hold it."""
    steps: list[int]
    """Training steps of these, ascending, the first ones."""


def sightings_of_members(
    sampler: Sampler,
    corpus: str,
    document: int,
    tokens: tuple[int, int],
    members: range,
    budget: Budget,
    *,
    epochs: int = 1,
    limit: int = 10,
) -> list[MemberSightings]:
    """Return for each member where the first epochs of its plan hold a document.

    Args:
        sampler: of any member.
        document, tokens: its number, and its tokens start and stop, corpus-wide; of a view in its corpus.
        limit: steps to return of each member.

    Raises:
        InvalidParameter: the plan is no member of a family, or its order has no epochs.
        ResponseTooLarge: the members, times the units that hold the document and the epochs, are too many.
    """
    if (left_out := sampler.left_out) is None:
        raise InvalidParameter(
            "the plan is no member of a family",
            parameter="plan_id",
            remedy='name a plan whose document has "family"; /v1/lookup looks up in all others',
        )
    source = sampler.plan.sources.index(corpus)
    keys = member_keys(left_out.family_keys[source : source + 1], np.array(members, dtype=np.uint64))
    signs = left_out.signs_of(source, keys, np.full(keys.shape, document))
    kept = np.flatnonzero(signs <= 0)
    ranges = sampler.own_ranges(source, Ranges([list(tokens)]) if tokens[0] < tokens[1] else Ranges())
    found_rows = [np.empty((0, 3), np.int64)]
    for laid in sampler.laid if ranges.total else ():
        held = Ranges(laid.rows.within(source, ranges, budget))
        units = expanded(held.starts, held.stops - held.starts)[1].astype(np.uint64)
        end = laid.num_positions(source, epochs)
        num_pairs = kept.size * units.size * epochs
        remedy = "ask for fewer members or epochs"
        budget.check(rows=num_pairs * left_out.cost, parameter="count", remedy=remedy)
        for first in range(0, num_pairs, _PAIRS_AT_ONCE):
            rest, which = np.divmod(np.arange(first, min(first + _PAIRS_AT_ONCE, num_pairs)), units.size)
            its_epochs, at = np.divmod(rest, kept.size)
            budget.spend(rows=which.size * left_out.cost)
            owners, positions = _positions(
                laid, source, units[which], its_epochs.astype(np.uint64), keys[kept[at]]
            )
            some = positions < np.uint64(end)
            places, parts = laid.of_timeline(positions[some])
            some_owners = kept[at[owners[some]]]
            is_there = sampler.has_at(laid, source, places)
            columns = places.astype(np.int64), parts, some_owners
            found_rows.append(np.stack([column[is_there] for column in columns], axis=1))
    rows = np.unique(np.concatenate(found_rows), axis=0)  # each row once
    owners, steps = _seen(sampler, source, rows, budget)
    found = []
    bounds = owners.searchsorted(np.arange(len(members) + 1))
    for number, member in enumerate(members):
        its = steps[bounds[number] : bounds[number + 1]]
        found.append(
            MemberSightings(
                member=member,
                leaves_out=bool(signs[number] > 0),
                doubles=bool(signs[number] < 0),
                num_rows=int(its.size),
                steps=np.unique(its)[:limit].tolist(),
            )
        )
    return found


def _positions(
    laid: Laid, source: int, units: UnitNumbers, epochs: Epochs, keys: UInt64Array
) -> tuple[Int64Array, Positions]:
    """Return where rows of members hold units, itself or as substitutes: which of those given, position."""
    left_out = laid.left_out
    assert left_out is not None
    which = np.flatnonzero(~left_out.holds(source, units, keys))
    own, epochs, keys = units[which], epochs[which], keys[which]
    if not which.size:
        return which, own
    held, at = left_out.stood_in_of(source, own, epochs, keys)
    shown = np.concatenate((own, held))
    positions = laid.positions_of(source, shown, np.concatenate((epochs, epochs[at])))
    return np.concatenate((which, which[at])), positions


def _seen(sampler: Sampler, source: int, rows: Int64Array, budget: Budget) -> tuple[Int64Array, Int64Array]:
    """Return of rows those that training sees: by member, and its step.

    Args:
        rows: `(k, 3)`: position of the timeline, part, member.
    """
    timeline = sampler.timeline
    positions, at = np.unique(rows[:, 0].astype(np.uint64), return_inverse=True)
    steps = np.full(positions.size, -1, dtype=np.int64)
    for here, num_blocks in row_slices(sampler, source, positions, budget) if positions.size else ():
        budget.spend(rows=num_blocks * BLOCK_COST)
        plan_steps, _, given = timeline.rows_of(source, positions[here])
        given &= ~timeline.skips.contains(plan_steps)
        steps[here] = np.where(given, timeline.skips.num_outside_below(plan_steps).astype(np.int64), -1)
    steps, owners = steps[at.reshape(-1)], rows[:, 2]
    order = np.lexsort((steps, owners))
    order = order[steps[order] >= 0]
    return owners[order], steps[order]
