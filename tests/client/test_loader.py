"""The batches of a loader are exact, whatever their dtype, rank and device."""

from __future__ import annotations

import gc
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from corpus_client import (
    ArrayLoader,
    CorpusIterableDataset,
    CorpusLoader,
    Network,
    RemoteCorpus,
    Staging,
    errors,
    get_batch,
)
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.slots import BUDGET
from tests.client.conftest import make_corpus
from tests.client.reference_plan import ReferenceCorpus, tokens_of_step
from tests.client.reference_server import ReferenceServer

MakeLoader = Callable[..., CorpusLoader]


def test_batches_are_exact_and_contiguous(make_loader: MakeLoader, corpus: ReferenceCorpus) -> None:
    loader = make_loader(num_steps=70)
    steps = 0
    for batch in loader:
        expected = tokens_of_step(corpus, loader.plan, batch.step).astype(np.int64)
        assert batch.step == steps
        assert batch.tokens.dtype == torch.int64
        assert np.array_equal(batch.tokens.numpy(), expected)
        assert np.array_equal(batch.inputs.numpy(), expected[:, :-1])
        assert np.array_equal(batch.targets.numpy(), expected[:, 1:])
        assert batch.inputs.is_contiguous()
        assert batch.targets.view(-1).shape == (12 * 16,)
        steps += 1
    assert steps == 70
    assert loader.stats().num_batches == 70
    assert loader.stats().num_tokens == 70 * 12 * 16


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("as_stored", [False, True])
def test_every_stored_dtype_arrives_whole(make_loader: MakeLoader, dtype: str, as_stored: bool) -> None:
    """Tokens fill the range of the dtype: a sign bit taken wrongly would show."""
    corpus = make_corpus(dtype=dtype)
    assert max(int(shard.max()) for shard in corpus.shard_arrays) > np.iinfo(dtype).max // 2
    with ReferenceServer([corpus]) as server:
        loader = make_loader(server.url, dtype=None if as_stored else torch.int64)
        for _ in range(12):
            batch = next(loader)
            expected = tokens_of_step(corpus, loader.plan, batch.step)
            assert batch.tokens.numpy().dtype == (expected.dtype if as_stored else np.int64)
            assert np.array_equal(batch.tokens.numpy(), expected)
            assert (batch.tokens.data_ptr() == batch.inputs.data_ptr()) == as_stored  # a view, no copy
        loader.close()


def test_default_batches_are_the_callers_own(make_loader: MakeLoader, corpus: ReferenceCorpus) -> None:
    loader = make_loader(prefetch_bytes=1 << 13, num_steps=40)
    batches = list(loader)
    for batch in batches:
        assert np.array_equal(batch.tokens.numpy(), tokens_of_step(corpus, loader.plan, batch.step))


def test_prefetching_is_bounded(make_loader: MakeLoader, server: ReferenceServer) -> None:
    loader = make_loader(prefetch_bytes=1 << 14)
    next(loader)
    time.sleep(0.2)
    assert sum(server.counts) * 12 * 17 * 2 <= (1 << 14) + 12 * 17 * 2


def test_slots_that_may_still_be_written_to_are_not_used_again(
    make_loader: MakeLoader, corpus: ReferenceCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline whose thread did not end keeps them; after any other one they are used again."""
    loader = make_loader()
    next(loader)
    first = loader._session._memory
    loader.seek(50)
    next(loader)
    assert loader._session._memory is first
    close = Pipeline.close
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "close", lambda pipeline: close(pipeline) and False)
        loader.seek(9)
    batch = next(loader)
    assert loader._session._memory is not first
    assert np.array_equal(batch.tokens.numpy(), tokens_of_step(corpus, loader.plan, 9))


def test_the_last_step_that_a_plan_can_have_ends_the_loader(
    make_loader: MakeLoader, server: ReferenceServer
) -> None:
    loader = make_loader()
    loader.seek(2**40 - 2)
    assert [batch.step for batch in loader] == [2**40 - 2, 2**40 - 1]
    options: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12}
    with ArrayLoader(server.url, **options, rank=0, world_size=1) as arrays:
        arrays.seek(2**40 - 2)
        assert [batch.step for batch in arrays] == [2**40 - 2, 2**40 - 1]


def test_a_list_of_few_batches_takes_no_memory_for_the_whole_run(make_loader: MakeLoader) -> None:
    loader = make_loader(num_steps=2**40)
    loader.seek(2**40 - 3)
    assert len(list(loader)) == 3


def test_a_state_behind_the_end_is_refused(make_loader: MakeLoader) -> None:
    state = make_loader().state_at(15)
    loader = make_loader(num_steps=10)
    with pytest.raises(
        errors.StateMismatch, match="goes on at step 15, and this loader ends at num_steps=10"
    ):
        loader.load_state_dict(state)
    with pytest.raises(errors.InvalidArgument, match="step must be at most num_steps=10"):
        loader.seek(11)


class OnePass(ReferenceServer):
    """A server whose corpus has epochs of 24 rows, and that says more of a plan, or less."""

    says: ClassVar[dict[str, bool]] = {}

    def describe_plan(self, plan: dict[str, Any]) -> dict[str, Any]:
        described = super().describe_plan(plan)
        described["sources"]["web"] |= {"num_windows": 24, "steps_per_epoch": 2.0}
        return described | self.says


@pytest.mark.parametrize(
    ("order", "says", "level"),
    [
        ("shuffle", {"order_repeats": True}, logging.WARNING),
        ("sequential", {"order_repeats": False}, logging.INFO),
        ("sequential", {}, logging.INFO),  # a server that is older than the field
    ],
)
def test_whether_a_second_pass_is_a_warning_is_the_servers_word(
    make_loader: MakeLoader,
    corpus: ReferenceCorpus,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    order: str,
    says: dict[str, bool],
    level: int,
) -> None:
    """No client knows the orders of the servers to come."""
    monkeypatch.setattr(OnePass, "says", says)
    with caplog.at_level(logging.INFO, "corpus_client"), OnePass([corpus]) as server:
        make_loader(server.url, order=order, num_steps=3)
    told = [each.levelno for each in caplog.records if "a pass over web ends in step 2" in each.message]
    assert told == [level]


def test_a_default_device_of_torch_changes_no_dataset(
    make_loader: MakeLoader, server: ReferenceServer
) -> None:
    expected = [batch.tokens.tolist() for batch in make_loader(num_steps=3)]
    torch.set_default_device("meta")
    try:
        found = [batch.tokens.tolist() for batch in make_loader(num_steps=3)]
        options: dict[str, Any] = {"seq_len": 16, "global_batch_size": 12, "order": "sequential"}
        dataset = CorpusIterableDataset(server.url, corpus="web", **options, num_steps=3)
        dataset.set_epoch(1)
        dataset.set_epoch(0)
        of_dataset = [batch.tokens.tolist() for batch in dataset]
        x, _ = get_batch(np.arange(100, dtype=np.uint16), 2, 4)
    finally:
        torch.set_default_device(None)
    assert found == of_dataset == expected
    assert x.device.type == "cpu"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_default_memory_grows_to_two_batches(
    server: ReferenceServer, monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """Of 408 bytes, where the default would hold one; a number that was given is for each worker."""
    monkeypatch.setattr("corpus_client.staging.slots.PREFETCH_BYTES", 408)
    monkeypatch.setattr("corpus_client.dataset.PREFETCH_BYTES", 408)
    options: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12, "num_steps": 20}
    dataset = CorpusIterableDataset(server.url, **options)
    batches = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    assert [batch.step for batch in batches] == list(range(20))
    given = CorpusIterableDataset(server.url, **options, staging=Staging(prefetch_bytes=2 << 12))
    batches = DataLoader(given, batch_size=None, num_workers=num_workers)
    assert [batch.step for batch in batches] == list(range(20))


def test_a_dataset_of_too_little_memory_is_refused_where_it_is_made(server: ReferenceServer) -> None:
    options: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12}
    with pytest.raises(errors.InvalidArgument, match=r"must hold two batches .* 8,192 in all, got 8,191"):
        CorpusIterableDataset(server.url, **options, staging=Staging(prefetch_bytes=(2 << 12) - 1))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_workers_of_a_dataloader_share_half_of_the_memory(
    server: ReferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12, "num_steps": 4}
    dataset = CorpusIterableDataset(server.url, **options)
    monkeypatch.setattr("corpus_client.staging.slots.host_memory_bytes", lambda: 2 * (3 << 12))
    assert len(list(DataLoader(dataset, batch_size=None, num_workers=1))) == 4
    with pytest.raises(errors.InvalidArgument, match=r"over 1 ranks of 2 workers, is 6,144"):
        next(iter(DataLoader(dataset, batch_size=None, num_workers=2)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_dataloader_around_a_loader_is_refused_where_it_is_made(
    make_loader: MakeLoader, shuffle: bool
) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"needs no DataLoader.*CorpusIterableDataset\("):
        DataLoader(make_loader(), batch_size=None, shuffle=shuffle)  # type: ignore[arg-type]


def test_loaders_of_a_process_share_half_of_the_memory(
    make_loader: MakeLoader, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = BUDGET.taken()
    monkeypatch.setattr("corpus_client.staging.slots.host_memory_bytes", lambda: 2 * (before + (5 << 12)))
    first = make_loader(prefetch_bytes=3 << 12)
    second = make_loader(prefetch_bytes=3 << 12)
    for loader in (first, second):
        next(loader)
    assert (first.stats().slot_bytes, second.stats().slot_bytes) == (3 << 12, 2 << 12)
    with pytest.raises(errors.InvalidArgument, match=r"two batches of 408 bytes need 8,192 .* other loaders"):
        make_loader(prefetch_bytes=3 << 12)
    first.close()
    make_loader(prefetch_bytes=3 << 12)


def test_requests_grow_to_many_steps(make_loader: MakeLoader, server: ReferenceServer) -> None:
    loader = make_loader()
    for _ in range(300):
        next(loader)
    assert loader.prepared.steps_per_request == 256
    assert sorted(server.counts)[:5] == [1, 2, 4, 8, 16]
    assert max(server.counts) == 256
    assert loader.stats().received_bytes >= 300 * 12 * 17 * 2


def test_next_into_fills_tensors_of_the_caller(make_loader: MakeLoader, corpus: ReferenceCorpus) -> None:
    loader = make_loader()
    inputs, targets = torch.empty((12, 16), dtype=torch.int32), torch.empty((12, 16), dtype=torch.int64)
    for step in range(5):
        with pytest.raises(errors.InvalidArgument, match=r"shape \(12, 16\) on cpu .*, got .* \(12, 15\)"):
            loader.next_into(inputs[:, 1:], targets)
        batch = loader.next_into(inputs, targets)
        expected = tokens_of_step(corpus, loader.plan, step)
        assert batch.step == step
        assert batch.inputs is inputs
        assert batch.state_after()["next_step"] == step + 1
        assert np.array_equal(inputs.numpy(), expected[:, :-1])
        assert np.array_equal(targets.numpy(), expected[:, 1:])


def test_targets_of_another_document_are_masked(make_loader: MakeLoader, corpus: ReferenceCorpus) -> None:
    plain = next(make_loader())
    eot_id = int(plain.inputs[3, 5])
    masked = next(make_loader(eot_id=eot_id, ignore_index=-100))
    assert torch.equal(masked.inputs, plain.inputs)
    assert torch.equal(masked.targets == -100, plain.inputs == eot_id)
    assert torch.equal(masked.targets[masked.loss_mask], plain.targets[masked.loss_mask])
    assert masked.targets[3, 5] == -100


def test_the_end_of_text_is_taken_from_the_server(
    make_loader: MakeLoader,
    corpus: ReferenceCorpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    eot_id = int(next(make_loader()).inputs[3, 5])
    by_hand = next(make_loader(eot_id=eot_id, ignore_index=-100))
    monkeypatch.setattr(corpus, "eot", eot_id)
    assert torch.equal(next(make_loader(ignore_index=-100)).targets, by_hand.targets)
    assert torch.equal(next(make_loader()).loss_mask, by_hand.loss_mask)
    assert not caplog.records
    other = make_loader(eot_id=eot_id + 1)
    assert torch.equal(next(other).loss_mask, by_hand.inputs != eot_id + 1)
    assert f"with token {eot_id + 1}, by eot_id=, and not with {eot_id}, which the server" in caplog.text


@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_the_batch_of_any_step_can_be_looked_at(
    make_loader: MakeLoader, corpus: ReferenceCorpus, dtype: torch.dtype | None
) -> None:
    """The loader stays where it is; ArrayLoader has the same."""
    loader = make_loader(rank=1, world_size=2, dtype=dtype, order="shuffle")
    next(loader)
    for step in (0, 1, 777):
        batch = loader.peek(step)
        expected = tokens_of_step(corpus, loader.plan, step)[6:]
        assert (batch.step, loader.step) == (step, 1)
        assert np.array_equal(batch.tokens.numpy(), expected)
    with ArrayLoader(loader._connect.args[0], plan=loader.plan, rank=1, world_size=2) as arrays:
        assert np.array_equal(arrays.peek(777).tokens, expected)
        assert arrays.step == 0
    assert next(loader).step == 1


def test_targets_that_cannot_hold_the_ignored_index_are_refused(make_loader: MakeLoader) -> None:
    loader = make_loader(eot_id=5, ignore_index=-100)
    inputs, targets = torch.zeros(2, 12, 16, dtype=torch.uint16)
    with pytest.raises(errors.InvalidArgument, match="targets must hold ignore_index=-100"):
        loader.next_into(inputs, targets)


def test_what_goes_to_another_process_works_there_or_says_what_does(server: ReferenceServer) -> None:
    """As an argument of a spawned process does, and whatever a spawned worker of a DataLoader needs."""
    plan: dict[str, Any] = {"corpus": "web", "seq_len": 16, "global_batch_size": 12}
    with CorpusLoader(server.url, device="cpu", **plan) as loader, ArrayLoader(server.url, **plan) as arrays:
        for each in (loader, arrays):
            with pytest.raises(TypeError, match=f"cannot pickle a {type(each).__name__}: .* make it in the"):
                pickle.dumps(each)
            assert each, "an object is true, whether or not it has a length"
        assert repr(next(arrays)) == "ArrayBatch(step=0, (12, 17) uint16)"
        dataset = pickle.loads(pickle.dumps(CorpusIterableDataset(server.url, **plan)))
        told = f"CorpusIterableDataset(plan {loader.plan_id[:12]}, step 0, rank 0 of 1)"
        assert repr(dataset) == told
    corpus = RemoteCorpus(server.url, "web", network=Network(auth="secret"))
    copy = pickle.loads(pickle.dumps(corpus))
    assert repr(copy) == repr(corpus) == f"RemoteCorpus({server.url!r}, 'web', 9,834 uint16 tokens)"
    copy.close()
    corpus.close()


def test_epochs_are_no_passes(make_loader: MakeLoader) -> None:
    """Trainers call `set_epoch(0)` on whatever has it; another epoch would be a pass over the same steps."""
    loader = make_loader(num_steps=3)
    loader.set_epoch(0)
    assert len(list(loader)) == 3
    with pytest.raises(errors.InvalidArgument, match="epoch must be 0, got 1: a loader yields the steps"):
        loader.set_epoch(1)
    with pytest.raises(errors.RunComplete, match="num_steps counts the steps of all of them"):
        iter(loader)


def test_the_vocabulary_is_known_of_tokenizer_and_sample(
    make_loader: MakeLoader, server: ReferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_loader().vocab_size is None  # a server that tells neither
    make_loader().check_vocab_size(1)
    describe = ReferenceServer.describe_plan
    told: dict[str, int] = {"largest_id": 999}

    def describe_plan(self: ReferenceServer, plan: dict[str, Any]) -> dict[str, Any]:
        described = describe(self, plan)
        described["sources"]["web"] |= told
        return described

    monkeypatch.setattr(ReferenceServer, "describe_plan", describe_plan)
    assert make_loader().vocab_size == 1000
    told["vocab_size"] = 50257
    loader = make_loader()
    assert loader.vocab_size == 50257
    loader.check_vocab_size(1000)  # a tokenizer may hold ids that no corpus uses
    with pytest.raises(errors.InvalidArgument, match=r"vocab_size must be above 999, .* got 999"):
        loader.check_vocab_size(999)


@pytest.mark.parametrize("stored", ["uint32", "int64"])
def test_tokens_are_never_narrowed(make_loader: MakeLoader, stored: str) -> None:
    """As int32, an id of 2^31 or more would become another one."""
    with (
        ReferenceServer([make_corpus(dtype=stored)]) as server,
        pytest.raises(errors.InvalidArgument, match=f"or None for {stored} tokens, got int32"),
    ):
        make_loader(server.url, dtype=torch.int32)
