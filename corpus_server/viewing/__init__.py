"""Making views: what users say about documents -> a multiplicity of each."""

from corpus_server.viewing.create import Selection, create

__all__ = ["Selection", "create"]
