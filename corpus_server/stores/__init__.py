"""Corpora in object stores: extents of their shards become local files before they are mapped."""

from __future__ import annotations

from corpus_server.stores.attached import MappedSpans
from corpus_server.stores.cache import Cache, bytes_of
from corpus_server.stores.extents import Blocks, Extents, ShardExtents
from corpus_server.stores.mirror import Mirror
from corpus_server.stores.staged import Extent, StagedFile, is_staged

__all__ = [
    "Blocks",
    "Cache",
    "Extent",
    "Extents",
    "MappedSpans",
    "Mirror",
    "ShardExtents",
    "StagedFile",
    "bytes_of",
    "is_staged",
]
