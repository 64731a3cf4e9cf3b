"""The plan: which windows every row of every step holds, as pure arithmetic, and back again."""

from corpus_server.plan.document import Plan, Stage
from corpus_server.plan.sampler import Sampler

__all__ = ["Plan", "Sampler", "Stage"]
