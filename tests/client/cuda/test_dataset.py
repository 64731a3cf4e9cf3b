"""A DataLoader pins the dataset's batches, and they reach the device whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from corpus_client import CorpusIterableDataset, CorpusLoader, Placement
from tests.client.cuda.conftest import Accelerator
from tests.client.reference_server import ReferenceServer

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stored_batches_are_pinned_and_widened_on_the_device(
    server: ReferenceServer, accelerator: Accelerator, num_workers: int
) -> None:
    options: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12}
    with CorpusLoader(server.url, **options, device="cpu", num_steps=7) as loader:
        expected = [(batch.step, batch.tokens.tolist()) for batch in loader]
    dataset = CorpusIterableDataset(server.url, **options, dtype=None, num_steps=7)
    found = []
    for batch in DataLoader(dataset, batch_size=None, num_workers=num_workers, pin_memory=True):
        assert batch.inputs.is_pinned()
        found.append(batch.to(accelerator.name, dtype=torch.int64, non_blocking=True))
    assert {batch.inputs.device.type for batch in found} == {accelerator.name}
    assert [(batch.step, batch.tokens.tolist()) for batch in found] == expected


def test_a_context_ranks_rows_are_pinned_also_by_torch_2_4(
    server: ReferenceServer, accelerator: Accelerator
) -> None:
    """It copies a list and pins its items; later versions call the list's `pin_memory`."""
    options: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12}
    dataset = CorpusIterableDataset(server.url, **options, placement=Placement(context_parallel=(1, 2)))
    batch = next(iter(dataset))
    clone = copy.copy(batch)
    for index, item in enumerate(batch):
        clone[index] = item.pin_memory()
    for pinned in (clone, batch.pin_memory()):
        assert pinned.inputs.is_pinned()
        assert pinned.tokens.is_pinned()
        assert pinned.tokens.equal(batch.tokens)
