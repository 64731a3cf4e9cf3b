"""Train from a corpus-server: pinned slots, non-blocking copies, exact resume.

Names are imported when they are first used: `ArrayLoader` and the errors need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from corpus_client.arrays import ArrayBatch as ArrayBatch
    from corpus_client.arrays import ArrayLoader as ArrayLoader
    from corpus_client.batch import Batch as Batch
    from corpus_client.dataset import CorpusIterableDataset as CorpusIterableDataset
    from corpus_client.errors import CorpusClientError as CorpusClientError
    from corpus_client.loader import CorpusLoader as CorpusLoader
    from corpus_client.network.options import Network as Network
    from corpus_client.observe.attribution import LoaderStats as LoaderStats
    from corpus_client.observe.attribution import SourceLoss as SourceLoss
    from corpus_client.plan.document import make_plan as make_plan
    from corpus_client.plan.world import Placement as Placement
    from corpus_client.sampling import RemoteCorpus as RemoteCorpus
    from corpus_client.sampling import get_batch as get_batch
    from corpus_client.staging.options import Staging as Staging
    from corpus_client.trained import TrainedLog as TrainedLog

__version__ = "0.1.0"

_HOMES = {
    "ArrayBatch": "arrays",
    "ArrayLoader": "arrays",
    "Batch": "batch",
    "CorpusClientError": "errors",
    "CorpusIterableDataset": "dataset",
    "CorpusLoader": "loader",
    "LoaderStats": "observe.attribution",
    "Network": "network.options",
    "Placement": "plan.world",
    "RemoteCorpus": "sampling",
    "SourceLoss": "observe.attribution",
    "Staging": "staging.options",
    "TrainedLog": "trained",
    "get_batch": "sampling",
    "make_plan": "plan.document",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(
            f"{name} needs torch, which is not installed; pip install 'corpus-client[torch]', "
            "or use ArrayLoader, which yields NumPy arrays"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
