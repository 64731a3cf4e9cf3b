"""The orders that a plan may have. Code outside an order's file never names the order."""

from __future__ import annotations

from typing import Final

from corpus_server.plan.named import Registry
from corpus_server.plan.orders.bounded import BoundedShuffle
from corpus_server.plan.orders.megatron import MegatronOrder
from corpus_server.plan.orders.order import Order
from corpus_server.plan.orders.random import Random
from corpus_server.plan.orders.sequential import Sequential
from corpus_server.plan.orders.shuffle import Shuffle

__all__ = [
    "INLINE",
    "INLINE_FIELDS",
    "ORDERS",
    "BoundedShuffle",
    "MegatronOrder",
    "Order",
    "inline_order",
    "order_kind",
]

_REGISTRY: Final = Registry[Order](
    "order",
    Shuffle,
    Sequential,
    Random,
    BoundedShuffle,
    MegatronOrder,
)

ORDERS: Final = _REGISTRY.kinds
"""In the order in which help and messages list them."""

DEFAULT: Final = _REGISTRY.default

INLINE: Final = _REGISTRY.inline
"""What the query parameter `order` may be."""

INLINE_FIELDS: Final = _REGISTRY.inline_fields
"""Schemas of the query parameters that orders have besides."""

order_kind: Final = _REGISTRY.kind
"""The kind of a plan's field `order`."""

inline_order: Final = _REGISTRY.spelled
"""Make the order that query parameters spell: its name, None for the default, and its fields."""
