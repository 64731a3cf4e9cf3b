"""Servers that hold the same corpora, and loaders of one plan on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from corpus_client import CorpusLoader
from tests.conftest import ServedCorpus
from tests.loaders import open_loader
from tests.serving import RunningServer


class Replicas(Mapping[str, list[str]]):
    """URLs by deployment: one process, four processes, three replicas.

    A deployment is started when a test first asks for it: most files ask for one process alone.
    """

    WORKERS: Final = {"1 worker": (1,), "4 workers": (4,), "3 replicas": (1, 1, 1)}

    def __init__(self, start: Callable[[int], str]) -> None:
        self._start, self._urls = start, dict[str, list[str]]()

    def __getitem__(self, name: str) -> list[str]:
        if name not in self._urls:
            self._urls[name] = [self._start(workers) for workers in self.WORKERS[name]]
        return self._urls[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.WORKERS)

    def __len__(self) -> int:
        return len(self.WORKERS)


@pytest.fixture(scope="session")
def replicas(
    corpora: dict[str, ServedCorpus], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    """Deployments of the same corpora; tests must leave them as they are."""
    paths = {name: corpora[name].path for name in ("web", "mixed")}
    with ExitStack() as stack:

        def start(workers: int) -> str:
            folder = tmp_path_factory.mktemp("replica")
            return stack.enter_context(RunningServer(paths, folder, workers=workers)).url

        yield Replicas(start)


def make_loader(urls: str | list[str], **changes: Any) -> CorpusLoader:
    """A loader of a small plan over `web`, whole global batch, on the CPU."""
    options: dict[str, Any] = {
        "corpus": "web",
        "seq_len": 16,
        "global_batch_size": 24,
        "seed": 7,
        "device": "cpu",
        "rank": 0,
        "world_size": 1,
        "deadline_seconds": 60,
    }
    return open_loader(urls, **{**options, **changes})


def take(loader: CorpusLoader, count: int) -> list[tuple[int, np.ndarray]]:
    """Return (step, tokens) of the next batches, copied."""
    return [(batch.step, batch.tokens.numpy().copy()) for _, batch in zip(range(count), loader, strict=False)]


def local_root(corpora: dict[str, ServedCorpus], name: str = "web") -> Path:
    """Return the folder with the shards of a corpus."""
    return corpora[name].path
