"""Formats of token files: one file each, listed in `registry`."""

from corpus_server.corpus.formats import layout, registry

__all__ = ["layout", "registry"]
