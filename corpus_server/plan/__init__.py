"""The plan: which rows every step holds, as pure arithmetic, and back again."""

from corpus_server.plan.document import Plan
from corpus_server.plan.orders import ORDERS, BoundedShuffle, MegatronOrder, Order
from corpus_server.plan.rows import ROWS
from corpus_server.plan.sampler import Sampler
from corpus_server.plan.stage import Stage

__all__ = ["ORDERS", "ROWS", "BoundedShuffle", "MegatronOrder", "Order", "Plan", "Sampler", "Stage"]
