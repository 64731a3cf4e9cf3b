"""How many rows of two plans differ, by source: exactly where few can differ, else by a sample of rows.

Two plans may give the same rows of the same steps to sources that are not the same: to a corpus and to a view
of it, or with other exclusions. Then the n-th row of a source is the same row of the same step in both, and
rows are compared without a look at any step. A source that is the same in both has no row that differs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Sequence
from math import ceil, floor, sqrt
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.described import described
from corpus_server.plan.document import Plan
from corpus_server.plan.questions.compared import Compared, unlike_rows
from corpus_server.plan.questions.suspects import excluded_units
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows import UInt64Array
from corpus_server.plan.sampler import Sampler
from corpus_server.plan.stage import MAX_STEP

MAX_COMPARED: Final = 1 << 16
"""Rows that may differ are all compared up to this number. Of more a sample of a quarter as many is compared;
a share of a half is then right within 1 %."""
MAX_SKIPS: Final = 256
"""Ranges of skipped steps at most; to count the rows on both sides of one takes up to 0.8 ms."""

_AT_ONCE: Final = 1 << 12
_DEVIATIONS: Final = 2.576  # of a normal distribution; 99 % lie within


@described
class SourceTotal:
    """The rows of a source of the first plan, which those of a source of the second one stand against."""

    a: str
    b: str
    num_rows: int
    """Rows that training sees of either."""
    num_differ: int
    """Exact if `at_least` and `at_most` are equal, else estimated from a sample of rows."""
    at_least: int
    """With a probability of 99 %."""
    at_most: int


@described
class RowTotals:
    """How many rows differ in steps [0, until), of all sources together."""

    until: int
    """Training step; by default the first before which every source that differs showed each of its rows."""
    num_rows: int
    num_differ: int
    """Exact if `at_least` and `at_most` are equal, else estimated from a sample of rows."""
    at_least: int
    """With a probability of 99 %."""
    at_most: int
    sources: tuple[SourceTotal, ...]


class _Pair(NamedTuple):
    a: int  # number of a source of each plan, which give the same rows of the same steps
    b: int
    num_rows: int  # that training sees
    skipped: Ranges  # numbers of the rows that it does not see
    suspects: UInt64Array | None  # numbers of the rows that may differ; None: any may


class _Count(NamedTuple):
    num_rows: int
    num_known: int  # of which it is known whether they differ
    num_differ: int

    def bounds(self) -> dict[str, int]:
        """Return an estimate of the rows that differ, and the ends of Wilson's interval for it."""
        num_rows, known, differ = self
        if known == num_rows:
            return dict.fromkeys(("num_differ", "at_least", "at_most"), differ)
        share, more = differ / max(known, 1), _DEVIATIONS**2 / max(known, 1)
        middle, half = share + more / 2, sqrt(more * (share * (1 - share) + more / 4))
        low, high = ((middle + sign * half) / (1 + more) for sign in (-1, 1))
        least = max(differ, min(floor(low * num_rows), num_rows))
        most = min(num_rows - (known - differ), ceil(high * num_rows))
        estimate = min(max(round(share * num_rows), least), most)
        return {"num_differ": estimate, "at_least": least, "at_most": most}


def total_slices(
    a: Sampler, b: Sampler, *, until: int | None = None, max_compared: int = MAX_COMPARED
) -> Generator[None, None, RowTotals | None]:
    """Count the rows that differ, in slices; None if sources do not give the same rows of the same steps.

    Args:
        a, b: of plans bound to the same corpora.
        until: see `RowTotals`.
        max_compared: if more rows than these may differ, they are estimated.
    """
    paired = _paired(a, b)
    if not paired:
        return None
    if until is None:
        until = _shown_once(a, b, paired)
    pairs = _counted(a, b, paired, until, max_compared)
    if pairs is None:
        return None
    yield
    sides, counts = (Compared(a, b), Compared(b, a)), []
    sampled = _sampled([each.num_rows if each.suspects is None else 0 for each in pairs], max_compared)
    for pair, numbers in zip(pairs, sampled, strict=True):
        rows = pair.skipped.nth_outside(numbers) if pair.suspects is None else pair.suspects
        others = 0 if pair.suspects is None else pair.num_rows - rows.size  # known to be the same
        num_differ = 0
        for at in range(0, rows.size, _AT_ONCE):
            num_differ += int(unlike_rows(sides, (pair.a, pair.b), rows[at : at + _AT_ONCE]).sum())
            yield
        counts.append(_Count(pair.num_rows, others + rows.size, num_differ))
    # Of the sources that are sampled one sample is taken, which says more of their sum than of each.
    exact = [each for each in counts if each.num_known == each.num_rows]
    whole = _summed([each for each in counts if each.num_known < each.num_rows]).bounds()
    return RowTotals(
        until=until,
        num_rows=_summed(counts).num_rows,
        **{name: number + _summed(exact).num_differ for name, number in whole.items()},
        sources=tuple(
            SourceTotal(
                a=a.plan.sources[pair.a],
                b=b.plan.sources[pair.b],
                num_rows=pair.num_rows,
                **count.bounds(),
            )
            for pair, count in zip(pairs, counts, strict=True)
        ),
    )


def _summed(counts: Sequence[_Count]) -> _Count:
    return _Count(*(sum(column) for column in zip(_Count(0, 0, 0), *counts, strict=True)))


def _paired(a: Sampler, b: Sampler) -> list[tuple[int, int]]:
    """Return the numbers of the sources that give the same rows of the same steps; none if not all do."""
    plans = a.plan, b.plan
    # Digests of documents' lengths are those of a source, like its fingerprint.
    one, other = (each if each.tabled is None else each.with_digests({}) for each in plans)
    if one.arithmetic != other.arithmetic or one.skip_steps != other.skip_steps:
        return []
    if a.num_steps is not None or len(a.plan.sources) != len(b.plan.sources):
        return []  # Megatron's order chooses rows by the sizes of its sources
    # A mixture has its sources by name; what it decides depends on their shares in this order.
    by_name = [sorted(range(len(plan.sources)), key=plan.sources.__getitem__) for plan in plans]
    decided = [
        (
            each.timeline.from_steps,
            each.timeline.sizes,
            each.timeline.seq_lens,
            plan.log.units[: len(plan.stages), its],
        )
        for each, plan, its in zip((a, b), plans, by_name, strict=True)
    ]
    same = all(np.array_equal(*columns) for columns in zip(*decided, strict=True))
    return list(zip(*by_name, strict=True)) if same else []


def _is_same(a: Plan, b: Plan, source: int, other: int, *, with_exclusions: bool) -> bool:
    """Return whether two sources give the same rows."""
    name = a.sources[source]
    if name != b.sources[other] or a.fingerprints[name] != b.fingerprints[name]:
        return False
    excluding = range(len(a.stages))
    return not with_exclusions or all(
        a.log.exclude.get(number, {}).get(name) == b.log.exclude.get(number, {}).get(name)
        for number in {*a.log.exclude, *b.log.exclude}
        if number in excluding
    )


def _shown_once(a: Sampler, b: Sampler, paired: Sequence[tuple[int, int]]) -> int:
    """Return the first step before which the sources that differ, or all, have shown each of their rows."""
    unlike = [each for each in paired if not _is_same(a.plan, b.plan, *each, with_exclusions=True)] or paired
    sources, others = map(list, zip(*unlike, strict=True))
    timeline = a.timeline

    def positions(step: int) -> NDArray[np.uint64]:
        found: NDArray[np.uint64] = timeline.given_before(timeline.plan_step(step))[0][sources]
        return found

    # A source that no later stage uses may never show all.
    needed = np.minimum(np.maximum(a.num_windows[sources], b.num_windows[others]), positions(MAX_STEP))
    return bisect_left(range(MAX_STEP), True, key=lambda step: bool((positions(step) >= needed).all()))


def _counted(
    a: Sampler, b: Sampler, paired: Sequence[tuple[int, int]], until: int, max_compared: int
) -> list[_Pair] | None:
    """Count the rows that training sees before a step, and find those that may differ."""
    timeline = a.timeline
    last = timeline.plan_step(until) if until else 0
    skips = timeline.skips.within(0, last).bounds
    if len(skips) > MAX_SKIPS:
        return None
    given = timeline.given_before(last)
    unseen = np.array([timeline.given_before(step)[1] for step in skips.ravel().tolist()], dtype=np.uint64)
    unseen = unseen.reshape(-1, 2, given.shape[1])
    pairs = []
    for source, other in paired:
        skipped = Ranges(unseen[:, :, source])
        suspects: UInt64Array | None = None
        if _is_same(a.plan, b.plan, source, other, with_exclusions=True):
            suspects = np.empty(0, dtype=np.uint64)
        elif _is_same(a.plan, b.plan, source, other, with_exclusions=False):
            suspects = _excluding(((a, source), (b, other)), int(given[0, source]), max_compared)
        if suspects is not None:
            suspects = suspects[~skipped.contains(suspects)]
        pairs.append(_Pair(source, other, int(given[1, source]) - skipped.total, skipped, suspects))
    return pairs


def _excluding(sides: Sequence[tuple[Sampler, int]], stop: int, most: int) -> UInt64Array | None:
    """Return the rows before a position that hold what one of two plans excludes; None if they are many."""
    found = [np.empty(0, dtype=np.uint64)]
    for sampler, source in sides:
        if not sampler.plan.order.has_epochs:
            return None
        units = excluded_units(sampler)[source]
        num_epochs = -(-stop // int(sampler.rows.num_rows[source]))
        if units.size * num_epochs > most:
            return None
        if units.size and num_epochs:
            epochs = np.arange(num_epochs, dtype=np.uint64).repeat(units.size)
            found.append(sampler.positions_of(source, np.tile(units, num_epochs), epochs))
    positions = np.unique(np.concatenate(found))
    sampler, source = sides[0]
    return sampler.timeline.rows_at(source, positions[positions < stop])


def _sampled(num_rows: Sequence[int], max_compared: int) -> list[UInt64Array]:
    """Return numbers of rows of each source: all rows if they are few, else one of each of equal parts."""
    total = sum(num_rows)
    if total <= max_compared:
        return [np.arange(each, dtype=np.uint64) for each in num_rows]
    num_parts = max_compared // 4
    bounds = np.array([k * total // num_parts for k in range(num_parts + 1)], dtype=np.int64)
    chosen = np.random.default_rng(0).integers(
        bounds[:-1], bounds[1:]
    )  # anywhere in a part: rows may be periodic
    borders = np.cumsum([0, *num_rows], dtype=np.int64)
    parts = np.split(chosen, chosen.searchsorted(borders[1:-1]))
    return [(part - first).astype(np.uint64) for part, first in zip(parts, borders[:-1], strict=True)]
