"""What the client tests share: a corpus, a server that speaks the contract, and the CUDA switch."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from corpus_client import errors
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import Fault, ReferenceServer
from tests.serving import wait_until

if TYPE_CHECKING:
    from corpus_client import CorpusLoader

# torch is imported late: some of these tests run in an environment that has none.


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let no warning of torch's about a GPU fail a test; those of the client do."""
    if item.get_closest_marker("needs_cuda") is not None:
        item.add_marker(pytest.mark.filterwarnings("error:::corpus_client"), append=False)
        item.add_marker(pytest.mark.filterwarnings("default"), append=False)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_cuda") is None:
        return
    assert item.path.parent.name == "cuda", (
        "a needs_cuda test is in tests/client/cuda: scripts/gpu runs no other"
    )
    import torch

    if torch.cuda.is_available():
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


DAY = 86_400.0
PATIENT = {"deadline_seconds": 5 * DAY, "progress_seconds": DAY}
"""Of a loader: no wait of its own ends while a test lasts."""


def assert_close_wakes(loader: CorpusLoader, server: ReferenceServer) -> None:
    """Close a `PATIENT` loader whose loop and fetcher wait for the server's response; both end."""
    server.next_fault = lambda: Fault("hole")
    found: list[type[Exception]] = []

    def train() -> None:
        try:
            next(loader)
        except errors.CorpusClientError as error:
            found.append(type(error))

    trainer = threading.Thread(target=train)
    asked = server.num_arrays
    trainer.start()
    wait_until(lambda: server.num_arrays > asked)
    loader.close()
    # Else `close` returns after `JOIN_SECONDS`, and the fetcher waits until the hole ends.
    assert "corpus-fetcher" not in {thread.name for thread in threading.enumerate()}
    trainer.join()
    assert found == [errors.LoaderClosed]


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
    pytest.importorskip("torch", reason="torch is not installed here")
    from tests.loaders import open_loader

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
            "deadline_seconds": 200,
        }
        loaders.append(open_loader(urls or server.url, **{**options, **changes}))
        return loaders[-1]

    make.made = loaders  # type: ignore[attr-defined]  # a test that drops its loader clears this
    yield make
    for loader in loaders:
        loader.close()


@pytest.fixture
def black_hole() -> Iterator[str]:
    """URL of a port whose backlog is full: connecting hangs, as through a firewall that drops."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = []
    for _ in range(4):
        peer = socket.socket()
        peer.setblocking(False)
        peer.connect_ex(listener.getsockname())
        waiting.append(peer)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    for peer in (*waiting, listener):
        peer.close()
