"""Programs beside the server: they make corpora, metadata, views and plans. No server loads them."""

from corpus_server.tools.hub import fetched

__all__ = ["fetched"]
