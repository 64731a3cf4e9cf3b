"""The same loader with a real device: stream, events, pinned slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from corpus_client import Batch, CorpusLoader, get_batch
from corpus_client.staging.opening import open_stager
from corpus_client.staging.stager import STORED_DTYPES
from tests.client.conftest import make_corpus
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer
from tests.client.staging.test_stager import EDGES
from tests.client.test_structure import by_hand, check, make_batch, structure_of, windows

pytestmark = pytest.mark.needs_cuda
MakeLoader = Callable[..., CorpusLoader]


@pytest.mark.parametrize("name", STORED_DTYPES)
@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_values_at_the_edges_survive_the_way(name: str, dtype: torch.dtype | None) -> None:
    stored = torch.tensor([[EDGES[name]]], dtype=torch.int64).to(STORED_DTYPES[name]).pin_memory()
    device = open_stager(torch.device("cuda"))
    device.prepare(stored.nbytes)
    group = device.upload(stored)
    tokens = Batch(group.read_next(partial(device.make, dtype))).tokens
    assert tokens.is_cuda
    assert tokens.dtype == (dtype or STORED_DTYPES[name])
    assert tokens.cpu().to(torch.int64).tolist() == [EDGES[name]]
    assert group.done()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_batches_are_exact_under_a_busy_consumer(make_loader: MakeLoader, dtype: str) -> None:
    """A long kernel sits in front of every read; slots and device memory are reused all the while."""
    corpus = make_corpus(dtype=dtype)
    with ReferenceServer([corpus]) as server:
        loader = make_loader(server.url, device="cuda", prefetch_bytes=1 << 14)
        sums = []
        for _ in range(200):
            batch = next(loader)
            torch.cuda._sleep(200_000)
            sums.append((batch.step, batch.inputs.sum(), batch.targets[:, -1].clone()))
        for step, total, last in sums:
            expected = tokens_of_step(corpus, loader.plan, step).astype(np.int64)
            assert total.item() == expected[:, :-1].sum()
            assert last.tolist() == expected[:, -1].tolist()
        loader.close()


def test_kept_batches_stay_as_they_were(make_loader: MakeLoader, corpus: ReferenceCorpus) -> None:
    loader = make_loader(device="cuda", num_steps=60, prefetch_bytes=1 << 12)
    for batch in list(loader):
        expected = tokens_of_step(corpus, loader.plan, batch.step)
        assert np.array_equal(batch.tokens.cpu().numpy(), expected)


def test_batch_is_safe_on_the_consumers_own_stream(make_loader: MakeLoader, corpus: ReferenceCorpus) -> None:
    loader = make_loader(device="cuda", num_steps=60)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sums = [(batch.step, batch.tokens.sum()) for batch in loader]
    stream.synchronize()
    for step, total in sums:
        assert total.item() == tokens_of_step(corpus, loader.plan, step).astype(np.int64).sum()


def test_get_batch_on_the_device() -> None:
    torch.manual_seed(1)
    x, y = get_batch(np.arange(40_000, 60_000, dtype=np.uint16), 32, 64, "cuda")
    assert x.is_cuda
    assert torch.equal(y[:, :-1], x[:, 1:])
    assert int(x.min()) >= 40_000


@settings(max_examples=50, deadline=None)
@given(windows())
def test_structure_on_the_device_is_what_a_plain_loop_finds(
    case: tuple[np.ndarray, int, tuple[int, int], torch.dtype],
) -> None:
    check(*case, "cuda")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_only_the_borders_of_documents_wait_for_the_device() -> None:
    batch = make_batch(torch.randint(0, 50, (8, 1025), device="cuda"), 7)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        _ = batch.positions, batch.document_ids, batch.loss_mask
        with pytest.raises(RuntimeError, match="synchroniz"):
            _ = batch.cu_seqlens
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert structure_of(batch) == by_hand(batch.tokens.tolist(), 7)


@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_structure_of_a_loaders_batch(make_loader: MakeLoader, dtype: torch.dtype | None) -> None:
    loader = make_loader(device="cuda", dtype=dtype, eot_id=40_000, num_steps=20)
    for batch in loader:
        assert structure_of(batch) == by_hand(batch.tokens.cpu().numpy().tolist(), 40_000)
