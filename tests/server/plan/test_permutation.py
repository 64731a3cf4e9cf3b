"""The keyed permutation: one to one for every n, invertible, and without visible order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_server.plan.permutation import (
    MAX_SIZE,
    Grid,
    invert,
    mix64,
    permute,
    permute_block,
    round_keys,
    stream_key,
    uniform,
)
from tests.arithmetic import chi_square_p_value, drawn, shuffled

SIZES = st.one_of(
    st.integers(1, 5000),
    st.integers(1, MAX_SIZE),
    st.integers(2, 2**31).map(lambda side: side * side),
    st.integers(2, 2**31).map(lambda side: side * side + 1),
    st.sampled_from([MAX_SIZE, MAX_SIZE - 1, 2**62, 2**32, 2**32 + 1]),
)
SEEDS = st.integers(0, 2**64 - 1)


def keys_of(seed: int, epoch: int = 0) -> np.ndarray:
    return round_keys(stream_key("shuffle", seed, "web"), np.array([epoch], "uint64"))


def values(*numbers: int) -> np.ndarray:
    return np.array(numbers, "uint64")


def test_mix64_gives_the_published_outputs_of_splitmix64() -> None:
    """The first outputs of Vigna's splitmix64.c for seed 1234567, as its users' test suites list them."""
    golden = 0x9E3779B97F4A7C15
    states = values(*((1234567 + n * golden) % 2**64 for n in range(1, 6)))
    assert mix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**64 - 1])
def test_every_small_size_is_permuted_onto_itself(seed: int) -> None:
    keys = keys_of(seed)
    for size in [*range(1, 300), 1023, 1024, 1025, 4096, 4097]:
        positions = np.arange(size, dtype="uint64")
        images = permute(positions, size, keys)
        assert np.sort(images).tolist() == list(range(size)), f"size {size}"
        assert (invert(images, size, keys) == positions).all(), f"size {size}"


@given(size=SIZES, seed=SEEDS, epoch=st.integers(0, 2**40), data=st.data())
def test_invert_undoes_permute_for_any_size(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    position = st.one_of(st.integers(0, size - 1), st.sampled_from([0, size - 1]))
    positions = values(*data.draw(st.lists(position, min_size=1, max_size=50, unique=True)))
    keys = keys_of(seed, epoch)
    images = permute(positions, size, keys)
    assert (images < size).all()
    assert np.unique(images).size == positions.size
    assert (invert(images, size, keys) == positions).all()
    assert (permute(invert(positions, size, keys), size, keys) == positions).all()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("shuffle", 1, "web"), ("shuffle", 2, "web")),
        (("shuffle", 1, "web"), ("shuffle", 1, "code")),
        (("shuffle", 1, "web"), ("random", 1, "web")),
        (("shuffle", 1, "2/web"), ("shuffle", 12, "web")),
    ],
    ids=["seed", "source", "purpose", "no-concatenation"],
)
def test_streams_differ(first: tuple[str, int, str], second: tuple[str, int, str]) -> None:
    assert stream_key(*first) != stream_key(*second)


@pytest.mark.parametrize("num_positions", [1, 64, 2000])
@pytest.mark.parametrize("size", [5000, 2**60 - 1, 2**60, 2**60 + 1, MAX_SIZE], ids=str)
def test_few_and_many_positions_get_what_plain_integers_give(size: int, num_positions: int) -> None:
    """Coordinates reach 2^30 beyond a size of 2^60."""
    key = stream_key("shuffle", 5, "web")
    positions = np.linspace(0, size - 1, num_positions).astype("uint64") % np.uint64(size)
    images = permute(positions, size, keys_of(5, 3))
    assert images.tolist() == [shuffled(position, size, key, 3) for position in positions.tolist()]
    assert (invert(images, size, keys_of(5, 3)) == positions).all()


@pytest.mark.parametrize("sizes", [(3, 1000, 2**60), (3, 2**60 + 1, MAX_SIZE)], ids=["flat", "not-flat"])
def test_positions_of_several_domains_get_what_each_gives_alone(sizes: tuple[int, ...]) -> None:
    which = np.arange(1000) % len(sizes)
    positions = np.arange(1000, dtype="uint64") % np.array(sizes, "uint64")[which]
    grids = Grid.over(sizes).take(which)
    together = permute(positions, grids, keys_of(5))
    for k, size in enumerate(sizes):
        assert (together[which == k] == permute(positions[which == k], size, keys_of(5))).all()
    assert (invert(together, grids, keys_of(5)) == positions).all()


def test_epochs_have_orders_of_their_own() -> None:
    positions = np.arange(1000, dtype="uint64")
    orders = [permute(positions, 1000, keys_of(0, epoch)) for epoch in range(4)]
    for a in range(4):
        for b in range(a):
            # Two random orders of n agree in one place on average, in more than 12 never.
            assert (orders[a] == orders[b]).sum() <= 12


@pytest.mark.parametrize("size", [10_000, 65_536, 1_000_003])
def test_the_image_of_a_stretch_is_uniform(size: int) -> None:
    """Catalogue row 6: 10,000 neighbouring positions fall evenly over 50 stretches of the domain."""
    for seed in range(5):
        images = permute(np.arange(size // 4, size // 4 + 2500, dtype="uint64"), size, keys_of(seed))
        observed = np.bincount((images * np.uint64(50) // np.uint64(size)).astype(int), minlength=50)
        assert chi_square_p_value(observed) > 1e-4


@pytest.mark.parametrize("size", [9_999, 65_536, 1_000_003])
def test_neighbours_are_uncorrelated(size: int) -> None:
    """Catalogue row 6: with 8,000 pairs a correlation has a deviation of 1/sqrt(8000); 4.5 are allowed."""
    for lag in (1, 2, 16):
        images = permute(np.arange(8000 + lag, dtype="uint64"), size, keys_of(3)).astype(float)
        correlation = np.corrcoef(images[:8000], images[lag:])[0, 1]
        assert abs(correlation) < 4.5 / math.sqrt(8000)


def test_every_order_of_three_is_equally_likely() -> None:
    counts = np.zeros(27)
    for seed in range(1200):
        a, b, c = permute(values(0, 1, 2), 3, keys_of(seed)).tolist()
        counts[9 * a + 3 * b + c] += 1
    orders = counts[counts > 0]
    assert orders.size == 6
    assert chi_square_p_value(orders) > 1e-4


@given(seed=SEEDS, bound=SIZES, counter=st.integers(0, 2**61))
def test_uniform_draws_below_its_bound_by_key_and_counter_alone(seed: int, bound: int, counter: int) -> None:
    key = stream_key("random", seed, "web")
    counters = np.arange(counter, counter + 20, dtype="uint64")
    draws = uniform(key, counters, bound)
    assert (draws < bound).all()
    assert uniform(key, counters[7:8], bound)[0] == draws[7]


@pytest.mark.parametrize("bound", [2, 7, 100, 3 * 2**61], ids=str)
def test_uniform_is_unbiased(bound: int) -> None:
    """Without the redraw of 3 * 2^61 the lower third would come twice as often as each other."""
    draws = uniform(stream_key("random", 0, "web"), np.arange(30_000, dtype="uint64"), bound)
    cells = min(bound, 50)
    cell = [int(draw) * cells // bound for draw in draws]
    assert chi_square_p_value(np.bincount(cell, minlength=cells)) > 1e-4


def test_draws_that_are_drawn_again_are_those_of_the_reference() -> None:
    """A quarter of them for this bound; for a corpus's it is hardly ever one, so golden rows hold none."""
    key, bound = stream_key("random", 3, "web"), 3 * 2**61
    draws = uniform(key, np.arange(1000, dtype="uint64"), bound)
    assert draws.tolist() == [drawn(counter, bound, int(key)) for counter in range(1000)]


GOLDEN = 0x9E3779B97F4A7C15


def unmixed(value: int) -> int:
    """Return what `mix64` makes `value` of."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        value ^= value >> shift ^ value >> 2 * shift
        value = value * pow(factor, -1, 2**64) % 2**64
    return value


@pytest.mark.parametrize("bound", [1, 3, 2**32, 3 * 2**61])
def test_exactly_the_draws_above_the_last_whole_multiple_are_drawn_again(bound: int) -> None:
    """Hardly any seed meets that border, but a key can be made that does."""
    last = 2**64 - 2**64 % bound - 1
    for draw in (last, (last + 1) % 2**64):
        key = (unmixed((unmixed(draw) - GOLDEN) % 2**64) - GOLDEN) % 2**64
        (found,) = uniform(key, np.zeros(1, "uint64"), bound).tolist()
        assert found == drawn(0, bound, key)
        if draw == last:
            assert found == bound - 1


@given(SEEDS, st.integers(0, 2**63), st.integers(0, 65536))
def test_a_block_is_permuted_as_any_domain(seed: int, epoch: int, stop: int) -> None:
    keys = keys_of(seed, epoch)
    expected = permute(np.arange(stop, dtype="uint64"), 65536, keys)
    assert (permute_block(keys, stop) == expected).all()


@given(st.lists(SIZES, min_size=1, max_size=5))
def test_grids_of_several_domains_are_the_smallest_near_square_ones(sizes: list[int]) -> None:
    grids = Grid.over(sizes)
    for size, height, width in zip(sizes, grids.height.tolist(), grids.width.tolist(), strict=True):
        assert (height - 1) ** 2 < size <= height**2
        assert (width - 1) * height < size <= width * height
