"""Megatron's choices of sources: against choosing row by row."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from corpus_server.plan.blend import BLOCK_ROWS, Blend, choose

Choices = list[tuple[int, int]]

WEIGHTS = {
    "three": (0.5, 0.3, 0.2),
    "alone": (1.0,),
    "even": (0.25,) * 4,
    "rare": (0.9, 0.0999, 0.0001),
    "many": (1 / 70,) * 70,
}
ROWS = {"three": 3 * BLOCK_ROWS + 5, "alone": 1, "even": BLOCK_ROWS, "rare": 2 * BLOCK_ROWS + 1, "many": 1500}


def one_by_one(weights: tuple[float, ...], num_rows: int) -> Choices:
    counts, chosen = [0] * len(weights), []
    for row in range(num_rows):
        errors = [weight * max(row, 1) - had for weight, had in zip(weights, counts, strict=True)]
        source = errors.index(max(errors))
        chosen.append((source, counts[source]))
        counts[source] += 1
    return chosen


@lru_cache
def blend_of(name: str, first: int) -> tuple[Blend, Choices]:
    """Return the choices from a row on, and what they must be."""
    weights, num_rows = WEIGHTS[name], ROWS[name]
    names = tuple(f"source-{number}" for number in range(len(weights)))
    chosen = one_by_one(weights, num_rows)
    before = np.bincount([source for source, _ in chosen[:first]], minlength=len(weights))
    left = [(source, number - int(before[source])) for source, number in chosen[first:]]
    blend = Blend(names, choose(weights, num_rows))
    return blend.since(first) if first else blend, left


@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_are_chosen_one_after_another(name: str) -> None:
    """The counts of the last block are those of a full one."""
    weights, num_rows = WEIGHTS[name], ROWS[name]
    table = choose(weights, num_rows)
    assert list(zip(table.sources.tolist(), table.positions.tolist(), strict=True)) == one_by_one(
        weights, num_rows
    )
    num_blocks = -(-num_rows // BLOCK_ROWS)
    sources = [source for source, _ in one_by_one(weights, num_blocks * BLOCK_ROWS)]
    counts = [np.bincount(sources[: k * BLOCK_ROWS], minlength=len(weights)) for k in range(num_blocks + 1)]
    assert table.counts.tolist() == np.array(counts).tolist()
    assert (table.sources.dtype, table.positions.dtype, table.counts.dtype) == (np.int16, np.uint32, np.int64)


@pytest.mark.parametrize("first", [0, 1, 700, BLOCK_ROWS, BLOCK_ROWS + 300])
@pytest.mark.parametrize("name", ["three", "even", "rare"])
def test_rows_are_placed_and_found_again_from_any_row_on(name: str, first: int) -> None:
    blend, left = blend_of(name, first)
    rows = np.arange(len(left), dtype="uint64")
    sources, numbers = blend.place(rows)
    assert list(zip(sources.tolist(), numbers.tolist(), strict=True)) == left
    for source in range(len(blend.names)):
        own = sources == source
        assert blend.find(source, numbers[own]).tolist() == rows[own].tolist()
        blocks = (rows[own] + np.uint64(first)) // np.uint64(BLOCK_ROWS)
        assert blend.block_of(source, numbers[own]).tolist() == blocks.tolist()


@pytest.mark.parametrize("first", [0, 700, BLOCK_ROWS])
@pytest.mark.parametrize("name", ["three", "rare"])
def test_rows_are_counted_before_any_row(name: str, first: int) -> None:
    """Rows beyond the run count as none; of several numbers it is the sum."""
    blend, left = blend_of(name, first)
    places = [0, 1, 2, 324, 1000, BLOCK_ROWS, BLOCK_ROWS + 1, len(left) - 1, len(left), len(left) + 9]
    sources = [source for source, _ in left]
    expected = [np.bincount(sources[:place], minlength=len(blend.names)).tolist() for place in places]
    assert [blend.count(np.array([place], dtype="uint64")).tolist() for place in places] == expected
    assert blend.count(np.array(places, dtype="uint64")).tolist() == np.sum(expected, axis=0).tolist()
    whole = np.bincount([source for source, _ in blend_of(name, 0)[1]], minlength=len(blend.names))
    assert blend.num_used.tolist() == whole.tolist()


def test_beyond_the_run_there_are_no_rows() -> None:
    blend = blend_of("three", 0)[0].since(ROWS["three"] + 7)
    assert blend.count(np.array([0, 5], dtype="uint64")).tolist() == [0, 0, 0]
