"""Token files on disk: recognised, opened, mapped, checked."""

from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.shards import Shard

__all__ = ["Corpus", "Shard"]
