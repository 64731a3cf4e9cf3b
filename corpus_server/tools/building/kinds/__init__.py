"""Kinds of input: how their files are divided, and what a document of them is."""

from corpus_server.tools.building.kinds.kind import Document, Kind

__all__ = ["Document", "Kind"]
