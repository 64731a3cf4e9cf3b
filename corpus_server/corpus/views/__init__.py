"""Views: a corpus's documents with a multiplicity each, as a small file, served like a corpus."""

from corpus_server.corpus.views.view import View, open_corpus

__all__ = ["View", "open_corpus"]
