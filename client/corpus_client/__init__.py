"""Train from a corpus-server: pinned slots, non-blocking copies, exact resume.

Names are imported when they are first used, so that `corpus_client.transport`, `.wire` and `.errors`
can be had without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corpus_client.attribution import LoaderStats as LoaderStats
    from corpus_client.batch import RemoteCorpus as RemoteCorpus
    from corpus_client.batch import get_batch as get_batch
    from corpus_client.dataset import CorpusIterableDataset as CorpusIterableDataset
    from corpus_client.errors import CorpusClientError as CorpusClientError
    from corpus_client.loader import CorpusLoader as CorpusLoader
    from corpus_client.yielded import Batch as Batch

__version__ = "0.1.0"

_HOMES = {
    "Batch": "yielded",
    "CorpusClientError": "errors",
    "CorpusIterableDataset": "dataset",
    "CorpusLoader": "loader",
    "LoaderStats": "attribution",
    "RemoteCorpus": "batch",
    "get_batch": "batch",
}

__all__ = [
    "Batch",
    "CorpusClientError",
    "CorpusIterableDataset",
    "CorpusLoader",
    "LoaderStats",
    "RemoteCorpus",
    "get_batch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
