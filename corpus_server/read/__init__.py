"""From windows to bytes: gather, prefetch, text, the wire."""

from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.gather import Gatherer, Selection
from corpus_server.read.prefetch import Prefetcher

__all__ = ["BoundPlan", "Gatherer", "Prefetcher", "Selection"]
