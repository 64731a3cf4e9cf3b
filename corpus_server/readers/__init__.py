"""Who reads which plan, and what is read ahead or staged for them."""

from corpus_server.readers.prefetch import Prefetcher
from corpus_server.readers.staging import Stager

__all__ = ["Prefetcher", "Stager"]
