"""Rows that hold pieces of documents, packed by their lengths alone and packed anew in each epoch."""

from corpus_server.plan.packing.packing import Packing
from corpus_server.plan.packing.table import Kind, Table, build

__all__ = ["Kind", "Packing", "Table", "build"]
