"""Rows that are not a rank's own are noticed before the first batch, also without the frameworks at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from corpus_client import CorpusIterableDataset, CorpusLoader, errors
from tests.client.reference_server import ReferenceServer

PLAN: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12}


@pytest.fixture
def dataset(server: ReferenceServer) -> CorpusIterableDataset:
    return CorpusIterableDataset(server.url, **PLAN, num_steps=4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_several_steps_are_refused(dataset: CorpusIterableDataset, num_workers: int) -> None:
    with pytest.raises(errors.InvalidArgument, match="batch_size=None"):
        next(iter(DataLoader(dataset, batch_size=2, num_workers=num_workers)))


@pytest.fixture
def late_group(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Sets up torch.distributed as the only rank there, which believes to be rank 1 of 2."""

    def set_up() -> None:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("fake", store=store, rank=1, world_size=2)

    yield set_up
    torch.distributed.destroy_process_group()


def test_a_process_group_that_comes_later_is_noticed(
    server: ReferenceServer, dataset: CorpusIterableDataset, late_group: Callable[[], None]
) -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

    loader = CorpusLoader(server.url, **PLAN, device="cpu")
    late_group()
    for batches in (loader, DataLoader(dataset, batch_size=None)):
        with pytest.raises(errors.WrongRows, match=r"rank 0 of 1, and torch.distributed.*rank 1 of 2"):
            next(iter(batches))
    loader.close()
