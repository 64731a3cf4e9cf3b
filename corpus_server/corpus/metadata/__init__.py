"""Metadata of documents: Parquet files beside the shards with a row for each document, in their order."""

from corpus_server.corpus.metadata.table import DocumentTable

__all__ = ["DocumentTable"]
