"""Loss by source over steps, and the rows that lost most, of a recording: in two passes over its parts.

A row is compared with the other rows of its source in the same steps: a source that is hard, or a model that
is young, makes no spike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from corpus_server.recordings.parts import Part, Recording, Rows, read_rows
from corpus_server.work import Budget

SAMPLED_ROWS = 1 << 24
"""Where there are more rows, only those of every k-th rank are read."""

MIN_PEERS = 64
"""Rows that a row is compared with; where a source has fewer in a bin, neighbouring bins count, too."""

_BINS = 2048  # of spikes: steps are compared with their neighbours


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Losses summed by source and bin of steps; bin b has steps from `start + b * width` on.

    counts, sums, squares: `(sources, bins) float64`, of losses that are finite.
    num_rows: rows that were read; ranks_apart: those of every so many-th rank.
    """

    start: int
    width: int
    counts: NDArray[np.float64]
    sums: NDArray[np.float64]
    squares: NDArray[np.float64]
    num_rows: int
    ranks_apart: int

    def means(self) -> NDArray[np.float64]:
        """Return `(sources, bins)`: the mean loss, NaN where there is no row."""
        with np.errstate(invalid="ignore"):
            return self.sums / np.where(self.counts, self.counts, np.nan)


class Spike(NamedTuple):
    """A row that lost much.

    usual: the mean of its peers; score: by how many of their standard deviations it lost more.
    """

    part: Part
    step: int
    row: int
    source: int
    loss: float
    usual: float
    score: float


def sum_losses(recording: Recording, start: int, stop: int, num_bins: int, budget: Budget) -> Sums:
    """Sum the losses of steps [start, stop) in at most `num_bins` bins."""
    width = max(1, -(-(stop - start) // num_bins))
    shape = len(recording.sources), max(1, -(-(stop - start) // width))
    counts, sums, squares = np.zeros((3, shape[0] * shape[1]))
    num_rows, apart = 0, _ranks_apart(recording, start, stop, budget)
    for _, rows in _read(recording, start, stop, apart):
        num_rows += len(rows.step)
        finite = np.isfinite(rows.loss)
        cell = (rows.source * shape[1] + (rows.step - start) // width)[finite]
        loss = rows.loss[finite].astype(np.float64)
        for total, weights in ((counts, None), (sums, loss), (squares, loss * loss)):
            total += np.bincount(cell, weights, minlength=total.size)
        budget.spend(rows=len(rows.step))
    return Sums(
        start=start,
        width=width,
        counts=counts.reshape(shape),
        sums=sums.reshape(shape),
        squares=squares.reshape(shape),
        num_rows=num_rows,
        ranks_apart=apart,
    )


def find_spikes(
    recording: Recording, start: int, stop: int, count: int, budget: Budget
) -> tuple[list[Spike], Sums]:
    """Return the rows of steps [start, stop) with the highest scores, and what they were compared with."""
    sums = sum_losses(recording, start, stop, _BINS, budget)
    peers = _widened(sums)
    found: list[Spike] = []
    for part, rows in _read(recording, start, stop, sums.ranks_apart):
        loss = rows.loss.astype(np.float64)
        num, total, squares = peers[:, rows.source, (rows.step - start) // sums.width]
        # Of the others: a spike must not hide itself in the mean of a rare source.
        own = np.isfinite(loss)
        num, total, squares = num - own, total - np.where(own, loss, 0), squares - np.where(own, loss, 0) ** 2
        with np.errstate(invalid="ignore", divide="ignore"):
            usual = total / num
            deviation = np.sqrt(np.maximum(squares / num - usual**2, 0))
            score = (loss - usual) / np.maximum(deviation, 1e-3 * np.maximum(np.abs(usual), 1e-6))
        score[~(num >= 2)] = 0  # nothing to compare with
        best = np.argpartition(-score, min(count, len(score) - 1))[:count] if len(score) else slice(0)
        columns = [column[best].tolist() for column in (*rows[:3], loss, usual, score)]
        found += [Spike(part, *each) for each in zip(*columns, strict=True) if each[-1] > 0]
        found = sorted(found, key=lambda spike: (-spike.score, spike.step, spike.row))[:count]
        budget.spend()
    return found, sums


def _read(recording: Recording, start: int, stop: int, apart: int) -> Iterator[tuple[Part, Rows]]:
    sources = recording.sources
    for part in recording.parts:
        if part.rank % apart == 0 and part.start < stop and start < min(part.stop, part.counts_until):
            for rows in read_rows(part, sources, start, stop):
                yield part, rows


def _ranks_apart(recording: Recording, start: int, stop: int, budget: Budget) -> int:
    """Return 1, or a larger k where only the parts of every k-th rank are to be read.

    Raises:
        ResponseTooLarge: those are too many, too.
    """
    num_rows = np.zeros(1 + max((part.rank for part in recording.parts), default=0))
    for part in recording.parts:
        share = max(0, min(part.stop, stop) - max(part.start, start)) / (part.stop - part.start)
        num_rows[part.rank] += part.num_rows * share
    apart: int = max(1, math.ceil(num_rows.sum() / SAMPLED_ROWS))
    number = int(num_rows[::apart].sum())
    budget.check(rows=number, parameter="stop", remedy="ask for fewer steps, by start and stop")
    return apart


def _widened(sums: Sums) -> NDArray[np.float64]:
    """Return counts, sums and squares `(3, sources, bins)`, of enough neighbouring bins together."""
    own = np.stack((sums.counts, sums.sums, sums.squares))
    before = np.concatenate((np.zeros_like(own[:, :, :1]), own.cumsum(axis=2)), axis=2)
    bins, reach = np.arange(own.shape[2]), 1
    while reach < 2 * own.shape[2] and (few := own[0] <= MIN_PEERS).any():
        low, high = np.maximum(bins - reach, 0), np.minimum(bins + reach + 1, own.shape[2])
        own = np.where(few, before[:, :, high] - before[:, :, low], own)
        reach *= 2
    return own
