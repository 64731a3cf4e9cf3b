"""Orders with parameters: what they take, how they spell it, and what they refuse."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest

from corpus_server.errors import InvalidPlan
from corpus_server.plan.orders import ORDERS_ACCEPTED, BoundedShuffle, MegatronOrder, order_from_json


def test_a_bounded_shuffle() -> None:
    order = BoundedShuffle(block_windows=16384, group_blocks=64)
    document = {"shuffle": {"block_windows": 16384, "group_blocks": 64}}
    assert (order.to_json(), str(order)) == (document, "shuffle 64 x 16384")
    assert order_from_json(MappingProxyType(document)) == order


@pytest.mark.parametrize(
    ("fields", "spelled"),
    [
        ({}, {}),
        ({"blend": ("b", "a"), "weights": (1, 3)}, {"blend": ["b", "a"], "weights": [1.0, 3.0]}),
        ({"blend": ["a"]}, {"blend": ["a"]}),
        ({"weights": [2]}, {"weights": [2.0]}),
        ({"split": [99, 1], "part": "valid"}, {"split": [99.0, 1.0], "part": "valid"}),
        ({"documents": {"a": "12"}}, {"documents": {"a": "12"}}),
    ],
)
def test_an_order_of_megatron(fields: dict[str, Any], spelled: dict[str, Any]) -> None:
    """Equal numbers are spelled alike, so that equal plans have one id."""
    order = MegatronOrder(num_samples=7, **fields)
    expected = {"num_samples": 7, "blend": [], "split": [1.0], "part": "train", **spelled}
    assert (order.to_json(), str(order)) == ({"megatron": expected}, "megatron 7")
    assert order_from_json({"megatron": {"num_samples": 7, **fields}}) == order
    assert order_from_json(order.to_json()) == order
    kinds = {type(share) for share in (*order.split, *(order.weights or ()))}
    assert kinds == {float}


@pytest.mark.parametrize("number", [1, 3])
def test_an_order_of_megatron_takes_as_many_numbers_as_there_are_parts(number: int) -> None:
    assert MegatronOrder(num_samples=1, split=(0.5,) * number).split == (0.5,) * number


def test_a_blend_may_have_1024_corpora() -> None:
    names = tuple(f"c{number}" for number in range(1024))
    order = MegatronOrder(num_samples=1, blend=names, weights=(1,) * 1024)
    assert (order.blend, order.weights) == (names, (1.0,) * 1024)
    assert MegatronOrder(num_samples=1, weights=(1,) * 1024).weights == (1.0,) * 1024


WEIGHTS = "a list of numbers above 0, one for each corpus of blend"
SPLIT = "a list of 1 to 3 numbers, not all 0"
BLEND = "a list of at most 1024 corpus names, each once"


@pytest.mark.parametrize(
    ("fields", "name", "accepted"),
    [
        pytest.param({"blend": "ab"}, "blend", BLEND, id="blend-text"),
        pytest.param({"blend": {"a": 1}}, "blend", BLEND, id="blend-object"),
        pytest.param({"blend": ["a", 1]}, "blend", BLEND, id="blend-number"),
        pytest.param({"blend": ["a", "b", "a"], "weights": [1, 1, 1]}, "blend", BLEND, id="blend-twice"),
        pytest.param({"blend": list(map(str, range(1025)))}, "blend", BLEND, id="blend-long"),
        pytest.param({"blend": ["a", "b"]}, "weights", WEIGHTS, id="weights-none"),
        pytest.param({"blend": ["a", "b"], "weights": [1]}, "weights", WEIGHTS, id="weights-few"),
        pytest.param({"blend": ["a"], "weights": [1, 2]}, "weights", WEIGHTS, id="weights-many"),
        pytest.param({"weights": []}, "weights", WEIGHTS, id="weights-empty"),
        pytest.param({"weights": [1] * 1025}, "weights", WEIGHTS, id="weights-long"),
        pytest.param({"weights": 1}, "weights", WEIGHTS, id="weights-number"),
        pytest.param({"weights": "1"}, "weights", WEIGHTS, id="weights-text"),
        pytest.param({"weights": ["1"]}, "weights", WEIGHTS, id="weights-texts"),
        pytest.param({"weights": [True]}, "weights", WEIGHTS, id="weights-true"),
        pytest.param({"weights": [2, -1]}, "weights", WEIGHTS, id="weights-negative"),
        pytest.param({"weights": [0.0]}, "weights", WEIGHTS, id="weights-zero"),
        pytest.param({"weights": [1.0, 0.0]}, "weights", WEIGHTS, id="weights-a-zero"),
        pytest.param({"weights": [float("inf")]}, "weights", WEIGHTS, id="weights-infinite"),
        pytest.param({"weights": [1e308, 1e308]}, "weights", WEIGHTS, id="weights-infinite-sum"),
        pytest.param({"weights": [float("nan")]}, "weights", WEIGHTS, id="weights-nan"),
        pytest.param({"split": []}, "split", SPLIT, id="split-empty"),
        pytest.param({"split": [1, 1, 1, 1]}, "split", SPLIT, id="split-four"),
        pytest.param({"split": [0, 0]}, "split", SPLIT, id="split-zero"),
        pytest.param({"split": [2, -1]}, "split", SPLIT, id="split-negative"),
        pytest.param({"split": None}, "split", SPLIT, id="split-none"),
        pytest.param({"part": "dev"}, "part", "one of train, valid, test", id="part"),
        pytest.param({"documents": ["a"]}, "documents", "an object of strings", id="documents-list"),
        pytest.param({"documents": {"a": 1}}, "documents", "an object of strings", id="documents-int"),
    ],
)
def test_what_is_no_order_of_megatron_is_refused(fields: dict[str, Any], name: str, accepted: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        order_from_json({"megatron": {"num_samples": 7, **fields}})
    field = f"order.megatron.{name}"
    assert caught.value.detail == f"{field} must be {accepted}, got {fields.get(name)!r:.200}"
    assert (caught.value.parameter, caught.value.accepted) == (field, accepted)


@pytest.mark.parametrize("part", ["train", "valid", "test"])
def test_a_part_may_have_no_share(part: str) -> None:
    order = order_from_json({"megatron": {"num_samples": 1, "split": [0, 1], "part": part}})
    assert isinstance(order, MegatronOrder)
    assert (order.split, order.part) == ((0.0, 1.0), part)


@pytest.mark.parametrize(
    ("document", "message", "parameter"),
    [
        ({}, f"order must be {ORDERS_ACCEPTED}, got {{}}", "order"),
        ({"random": {}}, f"order must be {ORDERS_ACCEPTED}, got {{'random': {{}}}}", "order"),
        (
            {"shuffle": 1, "megatron": 2},
            f"order must be {ORDERS_ACCEPTED}, got {{'shuffle': 1, 'megatron': 2}}",
            "order",
        ),
        ({"shuffle": []}, "order.shuffle must be a JSON object, got list", "order.shuffle"),
        ({"shuffle": {}}, "order.shuffle lacks block_windows, group_blocks", "block_windows"),
        ({"megatron": []}, "order.megatron must be a JSON object, got list", "order.megatron"),
        ({"megatron": {}}, "order.megatron lacks num_samples", "num_samples"),
        (
            {"megatron": {"samples": 1}},
            "order.megatron has an unknown field 'samples'; did you mean 'num_samples'?",
            "samples",
        ),
    ],
    ids=str,
)
def test_what_is_no_order_is_refused(document: dict[str, Any], message: str, parameter: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        order_from_json(document)
    assert (caught.value.detail, caught.value.parameter) == (message, parameter)


def test_the_orders_are_named_where_none_fits() -> None:
    assert ORDERS_ACCEPTED == (
        'one of shuffle, sequential, random, or {"shuffle": {"block_windows": ..., "group_blocks": ...}}, '
        'or {"megatron": {"num_samples": ...}}'
    )
