"""The orders that a plan may have. Code outside an order's file never names the order."""

from __future__ import annotations

from typing import Final

from corpus_server.plan.named import Registry
from corpus_server.plan.orders.bounded import BoundedShuffle
from corpus_server.plan.orders.megatron import MegatronOrder
from corpus_server.plan.orders.neox import NeoxOrder
from corpus_server.plan.orders.olmo import OlmoOrder
from corpus_server.plan.orders.order import Order
from corpus_server.plan.orders.random import Random
from corpus_server.plan.orders.sequential import Sequential
from corpus_server.plan.orders.shuffle import Shuffle

__all__ = ["ORDERS", "BoundedShuffle", "MegatronOrder", "Order"]

ORDERS: Final = Registry[Order](
    Shuffle, Sequential, Random, BoundedShuffle, MegatronOrder, NeoxOrder, OlmoOrder
)
