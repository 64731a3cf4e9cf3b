"""Reused memory: within its budget whatever is asked of it, and never handed out twice."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_server.web.buffers import MAX_WHOLE_BYTES, PIECE_BYTES, BufferPool

MIB = 2**20


@pytest.mark.parametrize(
    ("wanted", "unit", "size"),
    [
        (0, 2, 4096),
        (1, 1, 4096),
        (4097, 2, 8192),
        (MIB, 2050, MIB),
        (MAX_WHOLE_BYTES, 2, MAX_WHOLE_BYTES),
        (MAX_WHOLE_BYTES + 1, 2, PIECE_BYTES),
        (64 * MIB, 2**21 + 2, 2**22),
    ],
)
def test_sizes(wanted: int, unit: int, size: int) -> None:
    assert BufferPool(64 * MIB).lease(wanted, unit_bytes=unit).nbytes == size


def test_a_released_buffer_is_used_again() -> None:
    pool = BufferPool(MIB)
    first = pool.lease(100_000, unit_bytes=2)
    pool.release(first)
    assert np.shares_memory(pool.lease(70_000, unit_bytes=2), first)


def test_over_the_budget_there_are_pieces() -> None:
    pool = BufferPool(2 * MIB)
    assert [pool.lease(MIB, unit_bytes=2).nbytes for _ in range(4)] == [MIB, MIB, PIECE_BYTES, PIECE_BYTES]
    assert pool.lease(MIB, unit_bytes=PIECE_BYTES + 1).nbytes == 2 * PIECE_BYTES


def kept_bytes(pool: BufferPool) -> int:
    return sum(buffer.nbytes for kept in pool._free.values() for buffer in kept)


@given(
    budget=st.integers(MIB, 16 * MIB),
    turns=st.lists(
        st.tuples(st.booleans(), st.integers(1, 12 * MIB), st.sampled_from([1, 2050, 400_000])), max_size=60
    ),
)
def test_memory_stays_bounded_and_apart(budget: int, turns: list[tuple[bool, int, int]]) -> None:
    """Bounded by the budget, but for one piece for each answer under way."""
    pool = BufferPool(budget)
    leased: list[np.ndarray] = []
    for give_back, wanted, unit in turns:
        if give_back and leased:
            pool.release(leased.pop(0))
        else:
            buffer = pool.lease(wanted, unit_bytes=unit)
            assert buffer.nbytes >= min(unit, wanted)
            leased.append(buffer)
        pieces = sum(buffer.nbytes for buffer in leased if buffer.nbytes <= 2**19)
        assert pool.leased_bytes == sum(buffer.nbytes for buffer in leased)
        assert pool.leased_bytes + kept_bytes(pool) <= budget + pieces
        assert pool._free_bytes == kept_bytes(pool)
        assert not any(np.shares_memory(a, b) for a, b in combinations(leased, 2))
    for buffer in leased:
        pool.release(buffer)
    assert pool.leased_bytes == 0
    assert kept_bytes(pool) <= budget
