"""What the client tests share: a corpus, a server that speaks the contract, and the CUDA switch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from corpus_client import CorpusLoader
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_cuda") is None or torch.cuda.is_available():
        return
    reason = "torch sees no CUDA device here"
    if os.environ.get("CORPUS_REQUIRE_CUDA") == "1":
        pytest.fail(f"{reason}, and CORPUS_REQUIRE_CUDA=1 promises one")
    pytest.skip(reason)


def make_corpus(name: str = "web", seed: int = 0, dtype: str = "uint16") -> ReferenceCorpus:
    """Three shards of different lengths whose tokens use the whole range of the dtype."""
    draw = np.random.default_rng(seed)
    high = np.iinfo(dtype).max
    lengths = (4001, 2500, 3333)
    return ReferenceCorpus(name, [draw.integers(0, high, n, dtype, endpoint=True) for n in lengths])


def num_descriptors() -> int:
    """Open files and sockets of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture(scope="session")
def corpus() -> ReferenceCorpus:
    return make_corpus()


@pytest.fixture
def server(corpus: ReferenceCorpus) -> Iterator[ReferenceServer]:
    with ReferenceServer([corpus]) as server:
        yield server


@pytest.fixture
def make_loader(server: ReferenceServer) -> Iterator[Callable[..., CorpusLoader]]:
    """Loaders of a small plan on `server`, closed at the end."""
    loaders: list[CorpusLoader] = []

    def make(urls: str | list[str] | None = None, **changes: Any) -> CorpusLoader:
        options = {
            "corpus": "web",
            "seq_len": 16,
            "global_batch_size": 12,
            "order": "sequential",
            "device": "cpu",
            "rank": 0,
            "world_size": 1,
            "deadline_seconds": 20,
        }
        loaders.append(CorpusLoader(urls or server.url, **{**options, **changes}))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()
