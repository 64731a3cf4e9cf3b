"""A DataLoader pins the dataset's batches, and they reach the device whole."""

from __future__ import annotations

import copy
import multiprocessing
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from corpus_client import CorpusIterableDataset, CorpusLoader, Placement
from tests.client.cuda.conftest import Accelerator
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer
from tests.simulated_device import backend

NUM_SPAWNED = int(os.environ.get("CORPUS_SPAWNED_WORKERS", "2"))
"""Each imports torch; the long form has 16."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # fewer cores than workers
]


@pytest.mark.parametrize(
    ("method", "num_workers"),
    [(None, 0), ("fork", 2), ("fork", 16), ("forkserver", 2), ("spawn", NUM_SPAWNED)],
)
def test_workers_do_not_touch_the_device(
    server: ReferenceServer,
    corpus: ReferenceCorpus,
    accelerator: Accelerator,
    method: str | None,
    num_workers: int,
) -> None:
    """After the training process has used it: a forked child could not, in others it would cost a context."""
    assert torch.ones(2, device=accelerator.name).sum().item() == 2
    options: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12}
    dataset = CorpusIterableDataset(server.url, **options, num_steps=37, eot_id=7)
    workers: dict[str, Any] = {}
    if method is not None:
        context = multiprocessing.get_context(method)
        if method == "forkserver":
            context.set_forkserver_preload(["torch", "corpus_client"])
        workers = {"multiprocessing_context": context, "num_workers": num_workers}
        if accelerator.name == backend.NAME:
            workers["worker_init_fn"] = backend.refuse_here
    steps = []
    for batch in DataLoader(dataset, batch_size=None, **workers):
        expected = tokens_of_step(corpus, dataset.state_at(0)["plan"], batch.step)
        assert np.array_equal(batch.tokens.numpy(), expected)
        steps.append(batch.step)
    assert steps == list(range(37))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stored_batches_are_pinned_and_widened_on_the_device(
    server: ReferenceServer, accelerator: Accelerator, num_workers: int
) -> None:
    options: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12}
    with CorpusLoader(server.url, **options, device="cpu", num_steps=7) as loader:
        expected = [(batch.step, batch.tokens.tolist()) for batch in loader]
    dataset = CorpusIterableDataset(server.url, **options, dtype=None, num_steps=7)
    found = []
    accelerator.allow_threads()  # the DataLoader pins in one of its own
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
