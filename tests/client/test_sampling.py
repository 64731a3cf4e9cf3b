"""`get_batch`: the familiar function, for local and remote data."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corpus_client import RemoteCorpus, errors, get_batch
from tests.client.conftest import make_corpus
from tests.client.reference_plan import ReferenceCorpus
from tests.client.reference_server import Fault, ReferenceServer


def familiar_get_batch(data: np.ndarray, batch_size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - length, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + length].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + length].astype(np.int64)) for i in starts])
    return x, y


@given(
    num_tokens=st.integers(2, 300),
    batch_size=st.integers(1, 20),
    dtype=st.sampled_from(["uint8", "uint16", "uint32", "int32", "int64"]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_same_batch_as_the_familiar_function_under_the_same_seed(
    num_tokens: int, batch_size: int, dtype: str, seed: int, data: st.DataObject
) -> None:
    length = data.draw(st.integers(1, num_tokens - 1))
    high = np.iinfo(dtype).max
    tokens = np.random.default_rng(seed).integers(0, high, num_tokens, dtype, endpoint=True)
    torch.manual_seed(seed)
    x, y = get_batch(tokens, batch_size, length)
    torch.manual_seed(seed)
    expected_x, expected_y = familiar_get_batch(tokens, batch_size, length)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x, expected_x)
    assert torch.equal(y, expected_y)


def test_every_start_occurs_and_no_other() -> None:
    torch.manual_seed(0)
    x, y = get_batch(np.arange(10, dtype=np.uint16), 2000, 7)
    assert set(x[:, 0].tolist()) == {0, 1, 2}
    assert torch.equal(y, x + 1)


def test_memmap_and_odd_layouts(tmp_path: Path) -> None:
    tokens = np.arange(40_000, 60_000, dtype="<u2")
    tokens.tofile(tmp_path / "train.bin")
    for data in (
        np.memmap(tmp_path / "train.bin", "<u2", "r"),
        tokens.astype(">u2"),
        np.repeat(tokens, 2)[::2],
    ):
        x, y = get_batch(data, 50, 100)
        assert torch.equal(y[:, :-1], x[:, 1:])
        assert torch.equal(x - x[:, :1], torch.arange(100).expand(50, 100))
        assert x.min() >= 40_000


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"device must be 'cpu' or an accelerator .* got 'True'"):
        get_batch(np.arange(99), 2, 8, device=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [0, 1, 8])
def test_too_short_data_says_how_much_is_needed(num_tokens: int) -> None:
    with pytest.raises(
        errors.InvalidArgument, match=rf"at least sequence_length \+ 1 = 9 tokens, got {num_tokens}"
    ):
        get_batch(np.zeros(num_tokens, np.uint16), 4, 8)


def test_shortest_possible_data() -> None:
    x, y = get_batch(np.arange(9, dtype=np.uint16), 4, 8)
    assert x.tolist() == [list(range(8))] * 4
    assert y.tolist() == [list(range(1, 9))] * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_batch(cast("Any", [1, 2, 3]), 1, 1), "1-D integer array or a RemoteCorpus, got list"),
        (
            lambda: get_batch(np.zeros((3, 3), np.uint16), 1, 1),
            "1-D integer array or a RemoteCorpus, got 2-D uint16",
        ),
        (
            lambda: get_batch(cast("Any", np.zeros(9)), 1, 1),
            "1-D integer array or a RemoteCorpus, got 1-D float64",
        ),
        (lambda: get_batch(np.zeros(9, np.uint16), 0, 1), "batch_size must be"),
        (lambda: get_batch(np.zeros(9, np.uint16), 1, 0), "sequence_length must be"),
        (
            lambda: get_batch(cast("Any", "http://data/web"), 1, 1),
            "1-D integer array or a RemoteCorpus, got str",
        ),
    ],
)
def test_wrong_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=message):
        call()


def test_remote_batches_are_windows_of_the_corpus(server: ReferenceServer, corpus: ReferenceCorpus) -> None:
    everything = {
        tuple(shard[start : start + 9].tolist())
        for shard in corpus.shard_arrays
        for start in range(len(shard) - 8)
    }
    remote = RemoteCorpus(server.url, "web")
    assert len(remote) == sum(map(len, corpus.shard_arrays))
    x, y = get_batch(remote, 200, 8)
    assert x.dtype == torch.int64
    rows = torch.cat([x, y[:, -1:]], dim=1).tolist()
    assert {tuple(row) for row in rows} <= everything
    assert torch.equal(y[:, :-1], x[:, 1:])
    remote.close()


def test_torchs_seed_decides_a_remote_batch_too(server: ReferenceServer) -> None:
    remote = RemoteCorpus(server.url, "web")
    torch.manual_seed(7)
    first, second = (get_batch(remote, 4, 8)[0] for _ in range(2))
    torch.manual_seed(7)
    again = get_batch(remote, 4, 8)[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    remote.close()


def test_remote_tokens_above_the_sign_bit() -> None:
    corpus = make_corpus(dtype="uint32")
    with ReferenceServer([corpus]) as server, closing(RemoteCorpus(server.url, "web")) as remote:
        x, _ = get_batch(remote, 100, 8)
    assert x.min() >= 0
    assert x.max() >= 2**31


def test_a_remote_corpus_of_another_process_is_refused(
    server: ReferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes would read from one connection, each a part of the other's responses."""
    remote = RemoteCorpus(server.url, "web")
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(errors.ForkedLoader, match="forked process"):
            get_batch(remote, 4, 8)
    remote.close()


def test_a_remote_corpus_is_no_mixture(server: ReferenceServer) -> None:
    with pytest.raises(errors.InvalidArgument, match="a mixture needs a CorpusLoader"):
        RemoteCorpus(server.url, cast("Any", {"web": 0.5, "code": 0.5}))


def test_too_short_remote_corpus() -> None:
    with (
        ReferenceServer([ReferenceCorpus("tiny", [np.arange(8, dtype=np.uint16)])]) as server,
        closing(RemoteCorpus(server.url, "tiny")) as remote,
        pytest.raises(errors.InvalidArgument, match="got 8"),
    ):
        get_batch(remote, 4, 8)


def test_an_interrupted_draw_leaves_no_response_behind(
    server: ReferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its response may come after all; a proxy may have stripped the tag that tells it from the next one."""
    faults = [Fault("slow", 1.0)]
    interrupt = partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
    with closing(RemoteCorpus(server.url, "web")) as corpus:
        get_batch(corpus, 2, 16)
        server.next_fault = lambda: faults.pop() if faults else None
        threading.Timer(0.2, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            get_batch(corpus, 2, 16)
        for _ in range(5):
            get_batch(corpus, 2, 16)
    assert caplog.records == []
