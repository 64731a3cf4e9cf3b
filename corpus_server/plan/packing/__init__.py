"""Rows that hold pieces of documents, packed by their lengths alone and packed anew in each epoch."""

from corpus_server.plan.packing.packing import Packing
from corpus_server.plan.packing.table import Table, build

__all__ = ["Packing", "Table", "build"]
