"""What a worker process counts, and the sums over several (`metrics.shared`)."""

from corpus_server.metrics.declared import *  # noqa: F403 - all of them: a metric is declared in one place

__all__ = [name for name in globals() if not name.startswith("_")]
