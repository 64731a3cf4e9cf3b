"""The orders that a plan may have. Code outside an order's file never names the order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan.declared import Kind, Schema
from corpus_server.plan.orders.bounded import BoundedShuffle
from corpus_server.plan.orders.megatron import MegatronOrder
from corpus_server.plan.orders.order import Arrangement, Order, check_order
from corpus_server.plan.orders.random import Random
from corpus_server.plan.orders.sequential import Sequential
from corpus_server.plan.orders.shuffle import Shuffle

__all__ = [
    "INLINE",
    "INLINE_FIELDS",
    "ORDERS",
    "Arrangement",
    "BoundedShuffle",
    "MegatronOrder",
    "Order",
    "inline_order",
    "order_kind",
]

ORDERS: Final[tuple[type[Order], ...]] = tuple(
    map(check_order, (Shuffle, Sequential, Random, BoundedShuffle, MegatronOrder))
)
"""In the order in which help and messages list them. The first is the default, and must have no fields."""

DEFAULT: Final = ORDERS[0]()

_PLAIN: Final = {each.name: each for each in ORDERS if not fields(each)}
_WITH_FIELDS: Final = {each.name: each for each in ORDERS if fields(each)}

INLINE: Final = tuple(dict.fromkeys(each.name for each in ORDERS if each.is_inline))
"""What the query parameter `order` may be."""

INLINE_FIELDS: Final[dict[str, Schema]] = {
    name: schema for order in ORDERS if order.is_inline for name, schema in order.properties().items()
}
"""Schemas of the query parameters that orders have besides."""


def _accepted() -> str:
    spelled = [f"one of {', '.join(_PLAIN)}"]
    for name, order in _WITH_FIELDS.items():
        required = ", ".join(f'"{each}": ...' for each in order.schema()["properties"][name]["required"])
        spelled.append(f'{{"{name}": {{{required}}}}}')
    return ", or ".join(spelled)


def _take(what: str, value: object) -> Order:
    if isinstance(value, Order):
        return value
    if isinstance(value, str) and value in _PLAIN:
        return _PLAIN[value]()
    if isinstance(value, Mapping) and len(value) == 1 and (name := next(iter(value))) in _WITH_FIELDS:
        return _WITH_FIELDS[name].from_json(value[name])
    raise InvalidPlan.expected(what, _accepted(), value)


order_kind: Final = Kind({"anyOf": [each.schema() for each in ORDERS]}, _take)
"""The kind of a plan's field `order`."""


def inline_order(name: str | None, given: Mapping[str, Any]) -> Order:
    """Make the order that query parameters spell.

    Args:
        name: None for the default.
        given: parameters of `INLINE_FIELDS`.

    Raises:
        InvalidParameter: no order of that name has these parameters.
    """
    name = name or DEFAULT.name
    for order in filter(lambda each: each.is_inline, ORDERS):
        wanted = order.properties().keys()
        if wanted & given.keys() if given else order.name == name:
            break
    else:
        raise InvalidParameter.expected("order", f"one of {', '.join(INLINE)}", name)
    if order.name == name and wanted == given.keys():
        return order(**given)
    received = ", ".join(f"{each} {given.get(each)}" for each in wanted)
    raise InvalidParameter(
        f"{' and '.join(wanted)} must be given together, with order {order.name}; got {received}, "
        f"order {name}",
        parameter="order" if order.name != name else next(iter(wanted)),
    )
