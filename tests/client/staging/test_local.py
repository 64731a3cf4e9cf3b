"""`local_root=`: the same bytes from a local copy, and no other copy is taken for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from corpus_client import CorpusLoader, errors
from corpus_client.network.control import ShardDescription
from corpus_client.network.replicas import Exchange, Replicas
from corpus_client.network.wire import ArrayRequest
from corpus_client.staging import local
from tests.client.conftest import make_corpus
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import ReferenceServer

MakeLoader = Callable[..., CorpusLoader]


@pytest.fixture
def local_root(corpus: ReferenceCorpus, tmp_path: Path) -> Path:
    corpus.write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("order", ["sequential", "shuffle", "random"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_local_gather_equals_the_servers_batches(
    make_loader: MakeLoader, local_root: Path, world_size: int, order: str
) -> None:
    for rank in range(world_size):
        options = {"rank": rank, "world_size": world_size, "order": order, "dtype": None, "num_steps": 40}
        here = make_loader(local_root=local_root, **options)
        there = make_loader(**options)
        for ours, theirs in zip(here, there, strict=True):
            assert ours.step == theirs.step
            assert ours.tokens.numpy().tobytes() == theirs.tokens.numpy().tobytes()
        assert 0 < here.stats().received_bytes < there.stats().received_bytes


def test_data_offset_and_mixed_dtypes(make_loader: MakeLoader, tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    shards = [draw.integers(0, 250, 900).astype(dtype) for dtype in ("uint8", "uint16", "uint8")]
    mixed = ReferenceCorpus("web", shards, data_offset=64)
    mixed.write(tmp_path)
    with ReferenceServer([mixed]) as server:
        options = {"dtype": None, "num_steps": 20, "order": "shuffle"}
        here = make_loader(server.url, local_root={"web": tmp_path}, **options)
        there = make_loader(server.url, **options)
        for ours, theirs in zip(here, there, strict=True):
            assert ours.tokens.numpy().tobytes() == theirs.tokens.numpy().tobytes()


def test_single_file_may_be_named_itself(make_loader: MakeLoader, tmp_path: Path) -> None:
    single = ReferenceCorpus("web", make_corpus().shard_arrays[:1])
    single.write(tmp_path)
    with ReferenceServer([single]) as server:
        loader = make_loader(server.url, local_root=tmp_path / "00000.bin")
        assert next(loader).step == 0


def test_missing_shard_is_named(make_loader: MakeLoader, local_root: Path) -> None:
    (local_root / "00001.bin").unlink()
    with pytest.raises(errors.LocalCopyMismatch, match=r"00001.bin must lie at .*No such file"):
        make_loader(local_root=local_root)


def test_short_shard_is_named(make_loader: MakeLoader, local_root: Path) -> None:
    with (local_root / "00002.bin").open("r+b") as file:
        file.truncate(6000)
    with pytest.raises(errors.LocalCopyMismatch, match=r"00002.bin must have 6,666 bytes, got 6,000"):
        make_loader(local_root=local_root)


@pytest.mark.parametrize("at", [0, -2])
def test_another_corpus_of_the_same_sizes_is_refused(
    make_loader: MakeLoader, local_root: Path, at: int
) -> None:
    path = local_root / "00001.bin"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(errors.LocalCopyMismatch, match=r"00001.bin holds other tokens .* another corpus\?"):
        make_loader(local_root=local_root)


def test_change_under_the_run_is_found(make_loader: MakeLoader, local_root: Path) -> None:
    loader = make_loader(local_root=local_root, num_steps=1000, prefetch_bytes=1 << 13)
    next(loader)
    for name in ("00000.bin", "00001.bin", "00002.bin"):
        path = local_root / name
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 2)
    with pytest.raises(errors.LocalCopyMismatch, match="changed while it was in use"):
        list(loader)


def test_shard_name_cannot_leave_the_folder(make_loader: MakeLoader, local_root: Path) -> None:
    from corpus_client.staging.local import _local_path

    described = ShardDescription(
        corpus="c", name="../x", num_tokens=1, dtype="uint8", data_offset=0, size_bytes=1
    )
    with pytest.raises(errors.LocalCopyMismatch, match="leads out of"):
        _local_path(local_root, described)


@pytest.mark.parametrize("request_rows", [1, 150, 10_000])
@pytest.mark.parametrize("step_stride", [1, 3])
def test_one_request_names_the_windows_of_many_slots(
    make_loader: MakeLoader,
    server: ReferenceServer,
    local_root: Path,
    monkeypatch: pytest.MonkeyPatch,
    request_rows: int,
    step_stride: int,
) -> None:
    """Slots of three steps, requests of up to 3, 4 or 256 of them: borders fall within either."""
    monkeypatch.setattr(local, "REQUEST_ROWS", request_rows)
    options = {"dtype": None, "order": "shuffle", "num_steps": 70, "step_stride": step_stride}
    slots = {"prefetch_bytes": 4 * 4096, "global_batch_size": 36}  # 1,224 bytes a step
    here = make_loader(local_root=local_root, **options, **slots)
    there = make_loader(**options, **slots)
    batches = [(batch.step, batch.tokens.numpy().tobytes()) for batch in here]
    num_requests = len(server.counts)
    assert batches == [(batch.step, batch.tokens.numpy().tobytes()) for batch in there]
    assert [step for step, _ in batches] == list(range(0, 70, step_stride))
    expected = {1: 25, 150: 19, 10_000: 7}[request_rows] if step_stride == 1 else len(batches)
    assert num_requests == expected
    assert sum(server.counts[:num_requests]) == len(batches)


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_as_many_requests_are_on_the_wire_as_were_chosen(
    make_loader: MakeLoader, local_root: Path, monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    begin, finish, on_wire, most = Replicas.begin, Replicas.finish, 0, 0

    def counted_begin(self: Replicas, request: ArrayRequest) -> Exchange:
        nonlocal on_wire, most
        on_wire += 1
        most = max(most, on_wire)
        return begin(self, request)

    def counted_finish(self: Replicas, exchange: Exchange, buffer: memoryview) -> None:
        nonlocal on_wire
        finish(self, exchange, buffer)
        on_wire -= 1

    monkeypatch.setattr(Replicas, "begin", counted_begin)
    monkeypatch.setattr(Replicas, "finish", counted_finish)
    monkeypatch.setattr(local, "REQUEST_ROWS", 1)
    options = {"in_flight": in_flight, "prefetch_bytes": (in_flight + 2) * 4096, "num_steps": 60}
    assert len(list(make_loader(local_root=local_root, **options))) == 60
    assert (most, on_wire) == (in_flight, 0)


def test_requests_for_many_slots_end_where_the_batch_size_changes(
    make_loader: MakeLoader, local_root: Path
) -> None:
    stages = [
        {"from_step": 0, "global_batch_size": 12, "mixture": {"web": 1.0}},
        {"from_step": 20, "global_batch_size": 24, "mixture": {"web": 1.0}},
    ]
    plan = {"seq_len": 16, "seed": 0, "order": "shuffle", "stages": stages}
    none = {"corpus": None, "seq_len": None, "global_batch_size": None, "order": "shuffle"}
    options = {**none, "plan": plan, "dtype": None, "num_steps": 50}
    here = make_loader(local_root=local_root, **options)
    for ours, theirs in zip(here, make_loader(**options), strict=True):
        assert ours.tokens.shape == theirs.tokens.shape == (12 if ours.step < 20 else 24, 17)
        assert ours.tokens.numpy().tobytes() == theirs.tokens.numpy().tobytes()
