"""The loader on a device: the same tokens, of any type, on any stream, with their document structure."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from corpus_client import Batch, CorpusLoader, get_batch
from corpus_client.plan.world import Context
from corpus_client.staging.ring import open_stager
from corpus_client.staging.stager import STORED_DTYPES
from tests.client.conftest import make_corpus
from tests.client.cuda.conftest import Accelerator
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer
from tests.client.staging.test_stager import EDGES
from tests.client.test_structure import by_hand, check, make_batch, structure_of, windows

MakeLoader = Callable[..., CorpusLoader]


@pytest.mark.parametrize("name", STORED_DTYPES)
@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_values_at_the_edges_survive_the_way(
    accelerator: Accelerator, name: str, dtype: torch.dtype | None
) -> None:
    stored = torch.tensor([[EDGES[name]]], dtype=torch.int64).to(STORED_DTYPES[name]).pin_memory()
    device = open_stager(torch.device(accelerator.name))
    device.prepare(stored.nbytes)
    group = device.upload(stored)
    tokens = Batch(group.read_next(partial(device.make, dtype))).tokens
    assert tokens.device.type == accelerator.name
    assert tokens.dtype == (dtype or STORED_DTYPES[name])
    assert tokens.cpu().to(torch.int64).tolist() == [EDGES[name]]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_of_both_widths_are_exact(
    make_loader: MakeLoader, accelerator: Accelerator, dtype: str
) -> None:
    corpus = make_corpus(dtype=dtype)
    with ReferenceServer([corpus]) as server:
        loader = make_loader(server.url, device=accelerator.name, num_steps=60, prefetch_bytes=1 << 14)
        batches = list(loader)  # kept: they stay as they were
        for batch in batches:
            assert np.array_equal(batch.tokens.cpu().numpy(), tokens_of_step(corpus, loader.plan, batch.step))
        loader.close()


def test_batch_is_safe_on_the_consumers_own_stream(
    make_loader: MakeLoader, corpus: ReferenceCorpus, accelerator: Accelerator
) -> None:
    loader = make_loader(device=accelerator.name, num_steps=60)
    stream = accelerator.runtime.Stream()
    with accelerator.runtime.stream(stream):
        sums = [(batch.step, batch.tokens.sum()) for batch in loader]
    stream.synchronize()
    for step, total in sums:
        assert total.item() == tokens_of_step(corpus, loader.plan, step).astype(np.int64).sum()


def test_tensors_of_the_caller_are_filled(
    make_loader: MakeLoader, corpus: ReferenceCorpus, accelerator: Accelerator
) -> None:
    loader = make_loader(device=accelerator.name, num_steps=40, prefetch_bytes=1 << 13)
    inputs, targets = (torch.zeros(12, 16, dtype=torch.int64, device=accelerator.name) for _ in range(2))
    for step in range(40):
        batch = loader.next_into(inputs, targets)
        assert (batch.step, batch.inputs.data_ptr()) == (step, inputs.data_ptr())
        expected = tokens_of_step(corpus, loader.plan, step)
        assert inputs.tolist() == expected[:, :-1].tolist()
        assert targets.tolist() == expected[:, 1:].tolist()


def test_get_batch_on_the_device(accelerator: Accelerator) -> None:
    torch.manual_seed(1)
    x, y = get_batch(np.arange(40_000, 60_000, dtype=np.uint16), 32, 64, accelerator.name)
    assert x.device.type == accelerator.name
    assert torch.equal(y[:, :-1].cpu(), x[:, 1:].cpu())
    assert int(x.min()) >= 40_000


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=windows())
def test_structure_on_the_device_is_what_a_plain_loop_finds(
    accelerator: Accelerator, case: tuple[np.ndarray, int, Context, torch.dtype]
) -> None:
    check(*case, accelerator.name)


@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_structure_of_a_loaders_batch(
    make_loader: MakeLoader, accelerator: Accelerator, dtype: torch.dtype | None
) -> None:
    loader = make_loader(device=accelerator.name, dtype=dtype, eot_id=40_000, num_steps=10)
    for batch in loader:
        assert structure_of(batch) == by_hand(batch.tokens.cpu().numpy().tolist(), 40_000)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_on_the_way_of_a_batch_waits_for_the_device(
    make_loader: MakeLoader, accelerator: Accelerator
) -> None:
    loader = make_loader(device=accelerator.name, num_steps=50)
    next(loader)
    accelerator.refuse_waits(True)
    try:
        for _ in range(40):
            next(loader)
    finally:
        accelerator.refuse_waits(False)


@pytest.mark.needs_cuda  # the simulated device computes on the CPU, and waits for each result
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_only_the_borders_of_documents_wait_for_the_device() -> None:
    batch = make_batch(torch.randint(0, 50, (8, 1025), device="cuda"), 7)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        _ = batch.position_ids, batch.document_ids, batch.loss_mask
        with pytest.raises(RuntimeError, match="synchroniz"):
            _ = batch.cu_seqlens
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert structure_of(batch) == by_hand(batch.tokens.tolist(), 7)
