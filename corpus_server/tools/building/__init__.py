"""Text or token ids -> a corpus: parts, which any process may run, then shards."""

from corpus_server.tools.building.driver import build
from corpus_server.tools.building.job import BuildOptions, Split

__all__ = ["BuildOptions", "Split", "build"]
