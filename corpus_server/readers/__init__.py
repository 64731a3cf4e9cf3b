"""Who reads which plan, and what is prefetched or staged for them."""

from corpus_server.readers.prefetch import Prefetcher
from corpus_server.readers.registry import Reader, Registry
from corpus_server.readers.staging import Stager

__all__ = ["Prefetcher", "Reader", "Registry", "Stager"]
