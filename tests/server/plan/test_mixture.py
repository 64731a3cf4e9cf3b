"""Mixtures: exact weights, exact shares of every block, every source in its own order."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus_server.errors import InvalidPlan
from corpus_server.plan import Plan
from corpus_server.plan.mixture import Mixture, quantise
from tests.arithmetic import chi_square_p_value
from tests.plans import FAR_BLOCK, Case, source_numbers
from tests.reference import BLOCK, units_of

WEIGHTS = {
    "even": {"a": 1, "b": 1},
    "thirds": {"c": 1, "b": 1, "a": 1},
    "one in 65,536": {"a": 65535, "b": 1},
    "sixteen": {f"source-{k:02}": 1.0 + k / 7 for k in range(16)},
    "three hundred": {f"source-{k:03}": 1.0 + k / 7 for k in range(300)},  # an index needs more than a byte
    "tenths": {"web": 0.7, "code": 0.2, "math": 0.1},
}


def mixed(mixture: dict[str, float], **fields: Any) -> Case:
    """1,024 rows a step, so that 64 steps are a block; sources of different sizes."""
    stage = {"from_step": 0, "global_batch_size": 1024, "mixture": mixture}
    tokens = {name: [8 * (1000 * k + 700) + 1] for k, name in enumerate(mixture)}
    return Case({"seq_len": 8, "stages": [stage], **fields}, tokens)


@settings(deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=4),
        st.integers(1, 1000) | st.floats(0.1, 50),
        min_size=1,
        max_size=16,
    )
)
def test_the_canonical_document_is_a_fixed_point(mixture: dict[str, float]) -> None:
    """A client posts what it was answered: its weights, and so the id, must not drift."""
    plan = Plan.from_json(mixed(mixture).document).bind(dict.fromkeys(mixture, "sampled-00"))
    again = Plan.from_json(json.loads(plan.canonical_json))
    assert again.canonical_json == plan.canonical_json
    assert again.id == plan.id
    reordered = dict(reversed(mixture.items()))
    assert Plan.from_json(mixed(reordered).document).bind(plan.fingerprints).id == plan.id
    assert sum(plan.to_json()["stages"][0]["mixture"].values()) == pytest.approx(1.0)


def test_rows_are_placed_in_any_order() -> None:
    """As ranks that are balanced have them: others before the last one of the first one's block."""
    mixture = Mixture({"a": 40_000, "b": 25_536}, key=7)
    rows = np.array([5, BLOCK, 2 * BLOCK + 7, 3], dtype=np.uint64)
    sources, numbers = mixture.place(rows)
    for row, source, number in zip(rows, np.atleast_1d(sources), numbers, strict=True):
        one, its = mixture.place(np.array([row]))
        assert (np.atleast_1d(one)[0], its[0]) == (source, number)


@pytest.mark.parametrize("block", [0, 1, FAR_BLOCK])
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_block_holds_exactly_the_shares(name: str, block: int) -> None:
    """Catalogue row 6."""
    case = mixed(WEIGHTS[name], seed=block)
    located = case.sampler().locate(64 * block, count=64)
    counts = np.bincount(source_numbers(case, located).reshape(-1), minlength=len(WEIGHTS[name]))
    units = units_of(WEIGHTS[name])
    assert counts.tolist() == [units[source] for source in case.names()]
    assert counts.sum() == BLOCK


def test_shares_are_spread_over_the_block() -> None:
    """Also of a part of a block, as the permutation is a good one: 64 steps, four sources."""
    case = mixed({"a": 1, "b": 1, "c": 1, "d": 1})
    numbers = source_numbers(case, case.sampler().locate(0, count=64)).reshape(64, 1024)
    for number in range(4):
        assert chi_square_p_value((numbers == number).sum(axis=1)) > 1e-4
    follows = 4 * numbers.reshape(-1)[:-1] + numbers.reshape(-1)[1:]
    assert chi_square_p_value(np.bincount(follows, minlength=16)) > 1e-4


@pytest.mark.parametrize("order", ["sequential", "shuffle"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_every_source_is_read_in_its_own_order(name: str, order: str) -> None:
    """The i-th row of a source takes its i-th position: what a plan of that source alone gives."""
    case = mixed(WEIGHTS[name], order=order, seed=3)
    located = case.sampler().locate(0, count=70).reshape(-1, 2)
    numbers = source_numbers(case, located)
    for number, source in enumerate(case.names()):
        alone = mixed({source: 1}, order=order, seed=3)
        starts = located[numbers == number][:, 1]
        sampler = Case(alone.document, {source: case.shard_tokens[source]}).sampler()
        expected = sampler.locate(0, count=-(-len(starts) // 1024)).reshape(-1, 2)[: len(starts), 1]
        assert (starts == expected).all()


@pytest.mark.parametrize("web_windows", [1, 5, 300])
def test_sources_in_epochs_far_apart_agree_with_the_reference(web_windows: int) -> None:
    stage = {"from_step": 0, "global_batch_size": 2048, "mixture": {"web": 1, "code": 1}}
    tokens = {"web": [4 * web_windows + 1], "code": [40_001]}
    case = Case({"seq_len": 4, "stages": [stage]}, tokens)
    reference = case.reference()
    assert case.sampler().locate(31)[0].tolist() == [reference.located(31, row) for row in range(2048)]


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"), st.floats(1e-6, 10) | st.sampled_from([1.0, 1e-5]), min_size=1
    )
)
def test_weights_are_quantised_by_largest_remainder(mixture: dict[str, float]) -> None:
    """And one that is left without a unit is refused, by name."""
    units = units_of(mixture)
    if 0 not in units.values():
        assert Plan.from_json(mixed(mixture).document).stages[0].units == units
        return
    with pytest.raises(InvalidPlan, match="less than the smallest share of 1/65536") as caught:
        Plan.from_json(mixed(mixture).document)
    assert caught.value.parameter in {
        f"stages[0].mixture.{name}" for name, share in units.items() if not share
    }


@pytest.mark.parametrize(
    "weights", [(1e308, 1e308), (10**400, 10**400), (10**400, 0.5e308), (5e-324, 5e-324)]
)
def test_weights_of_any_magnitude_are_quantised_exactly(weights: tuple[float, float]) -> None:
    """Their sum need not fit a float."""
    mixture = dict(zip("ab", weights, strict=True))
    if 0 in units_of(mixture).values():
        with pytest.raises(InvalidPlan, match="smallest share"):
            Plan.from_json(mixed(mixture).document)
    else:
        assert Plan.from_json(mixed(mixture).document).stages[0].units == units_of(mixture)


@pytest.mark.parametrize("name", [*WEIGHTS, "alone"])
def test_rows_are_found_again_by_source_and_number(name: str) -> None:
    """Over three blocks; and so is the block that this computes, which is none if there is one source."""
    units = units_of(WEIGHTS.get(name, {"web": 1}))
    mixture = Mixture(units, key=5)
    assert mixture.names == tuple(sorted(units))
    rows = np.arange(3 * BLOCK, dtype="uint64")
    placed = mixture.place(rows)
    assert isinstance(placed[0], int) == (len(units) == 1)  # one number for all
    sources, numbers = (np.broadcast_to(each, rows.shape) for each in placed)
    for source, share in enumerate(units.values()):
        own = rows[sources == source]
        assert numbers[sources == source].tolist() == list(range(3 * share))
        assert (mixture.find(source, numbers[sources == source]) == own).all()
        blocks = mixture.block_of(source, numbers[sources == source])
        assert (blocks == (own // BLOCK if len(units) > 1 else 0)).all()


def test_a_weight_that_is_too_small_is_refused_with_its_share() -> None:
    with pytest.raises(InvalidPlan) as caught:
        quantise({"web": 5, "code": 1e-6})
    assert (caught.value.detail, caught.value.parameter, caught.value.received, caught.value.accepted) == (
        "stages[].mixture.code: weight 1e-06 is 2e-07 of the sum, less than the smallest share of 1/65536; "
        "raise it or leave the source out",
        "stages[].mixture.code",
        1e-6,
        "at least 1/65536 of the sum of weights",
    )
