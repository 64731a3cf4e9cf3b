"""From windows to bytes: gather, text, the wire."""

from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.gather import Gatherer, Selection

__all__ = ["BoundPlan", "Gatherer", "Selection"]
