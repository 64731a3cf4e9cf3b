"""The loader against a server: exact batches, exact resume, refusals that say what differs."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_client import Batch, CorpusLoader, errors
from corpus_client.world import find_rank
from tests.client.conftest import make_corpus, num_descriptors
from tests.client.delayed import EngineDevice
from tests.client.reference_plan import ReferenceCorpus, receipt_of, tokens_of_step
from tests.client.reference_server import Fault, ReferenceServer

MakeLoader = Callable[..., CorpusLoader]


def test_batches_are_exact_views_of_one_tensor(make_loader: MakeLoader, corpus: ReferenceCorpus) -> None:
    loader = make_loader(num_steps=70)
    steps = 0
    for batch in loader:
        expected = tokens_of_step(corpus, loader.plan, batch.step).astype(np.int64)
        assert batch.step == steps
        assert batch.tokens.dtype == torch.int64
        assert np.array_equal(batch.tokens.numpy(), expected)
        assert np.array_equal(batch.inputs.numpy(), expected[:, :-1])
        assert np.array_equal(batch.targets.numpy(), expected[:, 1:])
        assert batch.targets.data_ptr() == batch.tokens.data_ptr() + 8
        steps += 1
    assert steps == 70
    assert loader.stats().batches == 70
    assert loader.stats().tokens == 70 * 12 * 16
    assert list(loader) == []


@pytest.mark.parametrize("order", ["sequential", "shuffle", "random"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_make_up_the_global_batch(
    make_loader: MakeLoader, corpus: ReferenceCorpus, world_size: int, order: str
) -> None:
    loaders = [make_loader(rank=rank, world_size=world_size, order=order) for rank in range(world_size)]
    for step in range(6):
        parts = [next(loader) for loader in loaders]
        whole = np.concatenate([part.tokens.numpy() for part in parts])
        assert np.array_equal(whole, tokens_of_step(corpus, loaders[0].plan, step))


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


def test_state_is_small_readable_json_and_counts_what_was_yielded(
    make_loader: MakeLoader, corpus: ReferenceCorpus
) -> None:
    loader = make_loader()
    assert loader.state_dict()["next_step"] == 0
    for _ in range(7):
        next(loader)
    time.sleep(0.05)  # far more is fetched by now
    state = json.loads(json.dumps(loader.state_dict()))
    assert state == {
        "plan": loader.plan,
        "plan_id": loader.plan_id,
        "next_step": 7,
        "next_batch": receipt_of(tokens_of_step(corpus, loader.plan, 7)),
    }
    assert loader.step == 7
    assert "world_size" not in json.dumps(state)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    runs=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([1 << 13, 1 << 14, 1 << 20]), st.integers(1, 3)),
        min_size=2,
        max_size=4,
    )
)
def test_any_number_of_resumes_yields_each_step_once(
    server: ReferenceServer, corpus: ReferenceCorpus, runs: list[tuple[int, int, int]]
) -> None:
    """Each run takes some steps, has others in flight, and hands its state to the next."""
    state: dict[str, Any] | None = None
    expected_step = 3
    for num_steps, prefetch_bytes, in_flight in runs:
        with CorpusLoader(
            server.url,
            corpus="web",
            seq_len=16,
            global_batch_size=12,
            order="sequential",
            device="cpu",
            start_step=3,
            prefetch_bytes=prefetch_bytes,
            in_flight=in_flight,
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for _ in range(num_steps):
                batch = next(loader)
                assert batch.step == expected_step
                assert np.array_equal(batch.tokens.numpy(), tokens_of_step(corpus, loader.plan, batch.step))
                expected_step += 1
            state = json.loads(json.dumps(loader.state_dict()))
    assert state is not None
    assert state["next_step"] == expected_step


def test_going_on_after_a_break_loses_and_repeats_nothing(make_loader: MakeLoader) -> None:
    loader = make_loader()
    steps = []
    for _ in range(5):
        for batch in loader:
            steps.append(batch.step)
            if len(steps) % 3 == 0:
                break
    assert steps == list(range(15))


def test_state_can_be_loaded_in_mid_run(make_loader: MakeLoader, corpus: ReferenceCorpus) -> None:
    loader = make_loader()
    state = loader.state_dict()
    first = [next(loader).tokens for _ in range(5)]
    loader.load_state_dict(state)
    again = [next(loader).tokens for _ in range(5)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    loader.load_state_dict({**state, "next_step": 1000, "next_batch": None})
    assert next(loader).step == 1000
    assert threading.active_count() < 20


def test_resumed_run_ends_where_the_first_would_have(make_loader: MakeLoader) -> None:
    loader = make_loader(start_step=10, num_steps=20)
    loader.load_state_dict({**loader.state_dict(), "next_step": 25, "next_batch": None})
    assert [batch.step for batch in loader] == [25, 26, 27, 28, 29]


def test_another_world_size_goes_on_with_the_same_state(
    make_loader: MakeLoader, corpus: ReferenceCorpus
) -> None:
    one = make_loader()
    for _ in range(4):
        next(one)
    halves = [make_loader(rank=rank, world_size=2) for rank in range(2)]
    for half in halves:
        half.load_state_dict(one.state_dict())
    rows = np.concatenate([next(half).tokens.numpy() for half in halves])
    assert np.array_equal(rows, tokens_of_step(corpus, one.plan, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, "seed: the state has 0, this loader 5"),
        ({"seq_len": 8}, r"seq_len: the state has 16, this loader 8; stages|stride: the state has 16"),
        ({"order": "shuffle"}, "order: the state has 'sequential', this loader 'shuffle'"),
        ({"global_batch_size": 6}, r"stages\[0\].global_batch_size: the state has 12, this loader 6"),
        ({"stride": 17}, "stride: the state has 16, this loader 17"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_state_of_another_plan_is_refused_by_field(
    make_loader: MakeLoader, change: dict[str, Any], message: str
) -> None:
    state = make_loader().state_dict()
    loader = make_loader(**change)
    with pytest.raises(errors.StateMismatch, match=message):
        loader.load_state_dict(state)
    assert loader.step == 0


def test_state_of_another_corpus_is_refused(make_loader: MakeLoader) -> None:
    state = make_loader().state_dict()
    with ReferenceServer([make_corpus(seed=9)]) as other:
        loader = make_loader(other.url)
        with pytest.raises(errors.StateMismatch, match=r"fingerprints.web: the state has 'full-"):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_step": -1}, r"next_step must be an integer in \[0,"),
        ({"next_step": True}, "next_step must be an integer"),
        ({"next_step": "3"}, "next_step must be an integer"),
        ({"plan_id": "0" * 64}, "plan_id: the state has 000"),
        ({"extra": 1}, "must hold plan, plan_id and next_step"),
    ],
)
def test_damaged_state_is_refused(make_loader: MakeLoader, change: dict[str, Any], message: str) -> None:
    loader = make_loader()
    with pytest.raises(errors.StateMismatch, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})


def test_plan_of_a_state_builds_the_same_loader(make_loader: MakeLoader) -> None:
    one = make_loader(seed=4, order="shuffle")
    next(one)
    state = one.state_dict()
    keywords = dict.fromkeys(("corpus", "seq_len", "global_batch_size"))
    two = make_loader(plan=state["plan"], order="shuffle", **keywords)
    two.load_state_dict(state)
    assert two.plan_id == one.plan_id
    assert torch.equal(next(two).tokens, next(one).tokens)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"corpus": None}, "corpus must name"),
        ({"seq_len": 0}, r"seq_len must be an integer in \[1, 1048576\], got 0"),
        ({"seq_len": True}, "seq_len must be an integer"),
        ({"global_batch_size": None}, "global_batch_size must be an integer"),
        ({"seed": -1}, "seed must be"),
        ({"order": "zigzag"}, "order must be one of shuffle, sequential, random, got 'zigzag'"),
        ({"stride": 0}, "stride must be"),
        ({"start_step": -1}, "start_step must be"),
        ({"num_steps": 1.5}, "num_steps must be"),
        ({"in_flight": 0}, "in_flight must be"),
        ({"dtype": torch.float32}, "dtype must be torch.int64, torch.int32 or None"),
        ({"source": "disk"}, "source must be 'batches' or 'indices'"),
        ({"source": "indices"}, "local_root and source='indices' go together"),
        ({"local_root": "/tmp"}, "local_root and source='indices' go together"),
        ({"deadline_seconds": 0}, "deadline_seconds must be above 0"),
        ({"rank": 2, "world_size": 2}, r"rank must be in \[0, world_size\)"),
        ({"rank": 1, "world_size": None}, "must be given together"),
        ({"world_size": 5}, "divides over 1, 2, 3, 4, 6, 12"),
        ({"prefetch_bytes": 100}, "prefetch_bytes must hold two slots of 4,096 bytes"),
        ({"plan": {}}, "plan= must come without"),
        ({"urls": []}, "urls must name at least one server"),
        ({"device": "meta"}, "device must be"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_at_construction(
    server: ReferenceServer, change: dict[str, Any], message: str
) -> None:
    good = {
        "urls": server.url,
        "corpus": "web",
        "seq_len": 16,
        "global_batch_size": 12,
        "rank": 0,
        "world_size": 1,
    }
    with pytest.raises(errors.InvalidArgument, match=message):
        CorpusLoader(**{**good, **change})


def test_unknown_corpus_is_the_servers_word(make_loader: MakeLoader) -> None:
    with pytest.raises(errors.UnknownCorpus, match="no corpus is named 'webb'"):
        make_loader(corpus="webb")


def test_rank_comes_from_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find_rank(None, None) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(errors.InvalidArgument, match="RANK and WORLD_SIZE must both be set"):
        find_rank(None, None)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert find_rank(None, None) == (3, 8)
    assert find_rank(1, 2) == (1, 2)


def test_torch_distributed_goes_before_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    import torch.distributed as distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert find_rank(None, None) == (0, 1)
    finally:
        distributed.destroy_process_group()


def test_close_while_blocked_on_the_network(make_loader: MakeLoader, server: ReferenceServer) -> None:
    server.next_fault = lambda: Fault("hole")
    loader = make_loader()
    failures: list[errors.CorpusClientError] = []

    def train() -> None:
        try:
            next(loader)
        except errors.CorpusClientError as error:
            failures.append(error)

    trainer = threading.Thread(target=train)
    trainer.start()
    time.sleep(0.2)
    started = time.monotonic()
    loader.close()
    trainer.join(5)
    assert time.monotonic() - started < 1
    assert [type(error) for error in failures] == [errors.LoaderClosed]
    with pytest.raises(errors.LoaderClosed, match="the loader is closed"):
        next(loader)


def test_dropped_loader_leaves_neither_thread_nor_descriptor(server: ReferenceServer) -> None:
    def use() -> Batch:
        loader = CorpusLoader(server.url, corpus="web", seq_len=16, global_batch_size=12, device="cpu")
        return next(loader)

    use()
    gc.collect()
    time.sleep(0.05)
    descriptors = num_descriptors()
    for _ in range(5):
        use()
        gc.collect()
    time.sleep(0.05)
    assert not [thread for thread in threading.enumerate() if thread.name == "corpus-fetcher"]
    assert num_descriptors() <= descriptors + 1


@pytest.mark.parametrize(("seed", "group_bytes", "lookahead"), [(1, 0, 2), (2, 1 << 11, 5)])
def test_ten_thousand_steps_over_a_slow_and_disorderly_copy_engine_are_exact(
    make_loader: MakeLoader,
    corpus: ReferenceCorpus,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    group_bytes: int,
    lookahead: int,
) -> None:
    """Its twin on a real device is in cuda/; every batch is kept, and read when all copies are over."""
    device = EngineDevice(seed, 3e-4, group_bytes=group_bytes, lookahead=lookahead)
    monkeypatch.setattr("corpus_client.loader.open_device", lambda *_, **__: device)
    try:
        loader = make_loader(num_steps=10_000, prefetch_bytes=1 << 15, order="shuffle")
        batches = list(loader)
        loader.close()
    finally:
        device.close()
    for step, batch in enumerate(batches):
        assert batch.step == step
        assert np.array_equal(batch.tokens.numpy(), tokens_of_step(corpus, loader.plan, step))
    assert device.threads == {threading.get_ident()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads is what is tested
def test_forked_child_is_told_and_the_parent_goes_on(make_loader: MakeLoader) -> None:
    loader = make_loader(prefetch_bytes=1 << 13)
    next(loader)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            next(loader)
            os.write(write_end, b"a batch")
        except errors.ForkedLoader as error:
            os.write(write_end, str(error).encode())
        loader.close()
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert b"forked process" in pipe.read()
    os.waitpid(child, 0)
    assert [next(loader).step for _ in range(50)] == list(range(1, 51))


def test_requests_grow_to_many_steps(make_loader: MakeLoader, server: ReferenceServer) -> None:
    loader = make_loader()
    for _ in range(300):
        next(loader)
    assert loader.steps_per_request == 256
    assert sorted(server.counts)[:5] == [1, 2, 4, 8, 16]
    assert max(server.counts) == 256
    assert loader.stats().received_bytes >= 300 * 12 * 17 * 2
