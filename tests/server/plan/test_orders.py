"""Orders: what they take, how they spell it, what they refuse, and what the registry requires of them."""

from __future__ import annotations

from typing import Any

import pytest

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan.declared import declared_fields
from corpus_server.plan.named import Registry
from corpus_server.plan.orders import ORDERS, BoundedShuffle, MegatronOrder
from corpus_server.plan.orders.order import Order
from corpus_server.plan.orders.sequential import Sequential
from tests.plans import PLAIN_ORDERS


def order_from_json(document: object) -> Order:
    return ORDERS.kind.take("order", document)  # type: ignore[no-any-return]


def test_a_bounded_shuffle() -> None:
    order = BoundedShuffle(block_windows=16384, group_blocks=64)
    document = {"shuffle": {"block_windows": 16384, "group_blocks": 64}}
    assert (order.to_json(), str(order)) == (document, "shuffle 64 x 16384")
    assert order_from_json(document) == order == ORDERS.spelled(None, document["shuffle"])


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
        pytest.param({"blend": ["a", "b"], "weights": [1.0]}, "weights", WEIGHTS, id="weights-few"),
        pytest.param({"blend": ["a"], "weights": [1.0, 2.0]}, "weights", WEIGHTS, id="weights-many"),
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
        pytest.param({"weights": [10**400]}, "weights", WEIGHTS, id="weights-beyond-floats"),
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


ACCEPTED = (
    f"one of {', '.join(PLAIN_ORDERS)}, olmo, "
    'or {"shuffle": {"block_windows": ..., "group_blocks": ...}}, '
    'or {"megatron": {"num_samples": ...}}, or {"neox": {"num_samples": ...}}'
)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, f"order must be {ACCEPTED}, got {{}}"),
        ("no-order", f"order must be {ACCEPTED}, got 'no-order'"),
        ({"random": {}}, f"order must be {ACCEPTED}, got {{'random': {{}}}}"),
        ({"shuffle": 1, "megatron": 2}, f"order must be {ACCEPTED}, got {{'shuffle': 1, 'megatron': 2}}"),
        ({"shuffle": []}, "order.shuffle must be a JSON object, got list"),
        ({"shuffle": {}}, "order.shuffle lacks block_windows, group_blocks"),
        ({"megatron": {}}, "order.megatron lacks num_samples"),
        (
            {"megatron": {"samples": 1}},
            "order.megatron has an unknown field 'samples'; did you mean 'num_samples'?",
        ),
    ],
    ids=str,
)
def test_what_is_no_order_is_refused(document: object, message: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        order_from_json(document)
    assert caught.value.detail == message


@pytest.mark.parametrize("order", [each for each in ORDERS if not declared_fields(each)], ids=PLAIN_ORDERS)
def test_an_order_without_fields_is_its_name(order: type[Order]) -> None:
    assert order_from_json(order.name) == order() == ORDERS.spelled(order.name, {})
    assert (order().to_json(), str(order()), order.name in ORDERS.inline) == (
        order.name,
        order.name,
        order.is_inline,
    )


@pytest.mark.parametrize("name", ["megatron", "no-order"])
def test_a_query_spells_only_orders_that_it_can_say_all_of(name: str) -> None:
    with pytest.raises(InvalidParameter, match=r"order must be one of shuffle, .*, got"):
        ORDERS.spelled(name, {})


def test_an_order_that_lacks_a_method_cannot_be_registered() -> None:
    class Unfinished(Order):
        name = "unfinished"
        rows_at = Sequential.rows_at
        working_set = Sequential.working_set

    with pytest.raises(TypeError, match=r"order Unfinished lacks offsets_of, sentence$"):
        Registry(Unfinished)
