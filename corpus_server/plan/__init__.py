"""The plan: which windows every row of every step holds, as pure arithmetic."""

from corpus_server.plan.document import Plan, Stage
from corpus_server.plan.sampler import Sampler, Source

__all__ = ["Plan", "Sampler", "Source", "Stage"]
