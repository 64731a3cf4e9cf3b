"""The plan: which windows every row of every step holds, as pure arithmetic, and back again."""

from corpus_server.plan.document import Plan, Stage
from corpus_server.plan.megatron import MegatronSampler
from corpus_server.plan.orders import BoundedShuffle, MegatronOrder, Order
from corpus_server.plan.sampler import Sampler

__all__ = ["BoundedShuffle", "MegatronOrder", "MegatronSampler", "Order", "Plan", "Sampler", "Stage"]
