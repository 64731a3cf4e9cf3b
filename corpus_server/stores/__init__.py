"""Corpora in object stores: their shards become local files before they are mapped."""

from __future__ import annotations

from corpus_server.stores.cache import Cache
from corpus_server.stores.mirror import Mirror
from corpus_server.stores.staged import StagedFile, is_staged

__all__ = ["Cache", "Mirror", "StagedFile", "is_staged"]
