"""Which device is meant; on the CPU the right values at the edges of each dtype, and who owns the memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from corpus_client import Batch, errors
from corpus_client.staging.device import STORED_DTYPES
from corpus_client.staging.opening import find_device, open_device

CPU = torch.device("cpu")
EDGES = {
    "uint8": [0, 127, 128, 255],
    "uint16": [0, 2**15 - 1, 2**15, 2**16 - 1],
    "uint32": [0, 2**31 - 1, 2**31, 2**32 - 1],
    "int32": [0, 1, 2**16, 2**31 - 1],
    "int64": [-1, 0, 2**31, 2**32 - 1],
}


def read(stored: torch.Tensor, dtype: torch.dtype | None) -> list[Batch]:
    """All batches of a group, on the CPU."""
    device = open_device(CPU)
    group = device.upload(stored)
    return [Batch(group.read_next(partial(device.make, dtype))) for _ in stored]


@pytest.mark.parametrize("name", STORED_DTYPES)
def test_widening_keeps_every_value(name: str) -> None:
    stored = torch.tensor([[EDGES[name]]], dtype=torch.int64).to(STORED_DTYPES[name])
    (batch,) = read(stored, torch.int64)
    assert batch.tokens.dtype == batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.tokens.tolist() == [EDGES[name]]
    assert batch.inputs.tolist() == [EDGES[name][:-1]]
    assert batch.targets.tolist() == [EDGES[name][1:]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_widened_memory_is_fresh_even_where_no_widening_is_needed(dtype: torch.dtype) -> None:
    stored = torch.tensor([[[1, 2]]], dtype=dtype)
    (batch,) = read(stored, dtype)
    stored.zero_()
    assert batch.tokens.tolist() == [[1, 2]]


def test_as_stored_is_a_view_of_the_slot() -> None:
    stored = torch.tensor([[[1, 2, 3], [4, 5, 6]]], dtype=torch.uint16)
    (batch,) = read(stored, None)
    assert batch.inputs.data_ptr() == stored.data_ptr()
    assert batch.inputs.tolist() == [[1, 2], [4, 5]]
    assert batch.targets.tolist() == [[2, 3], [5, 6]]


@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_a_context_rank_gets_its_slice_and_the_whole_rows(dtype: torch.dtype | None) -> None:
    stored = torch.arange(10).to(torch.uint16).view(1, 2, 5)
    device = open_device(CPU, context=(1, 2))
    batch = Batch(device.upload(stored).read_next(partial(device.make, dtype)))
    assert batch.inputs.tolist() == [[2, 3], [7, 8]]
    assert batch.targets.tolist() == [[3, 4], [8, 9]]
    assert batch.tokens.tolist() == stored[0].tolist()
    inputs, targets = torch.zeros(2, 2, 2, dtype=torch.int64)
    device.upload(stored).read_next(partial(device.fill, inputs, targets))
    assert (inputs.tolist(), targets.tolist()) == ([[2, 3], [7, 8]], [[3, 4], [8, 9]])


def test_other_devices_are_refused() -> None:
    with pytest.raises(
        errors.InvalidArgument, match="'cpu' or an accelerator that torch sees here, got 'meta'"
    ):
        open_device(torch.device("meta"))


def test_group_is_read_in_order_and_then_free() -> None:
    stored = torch.arange(12).to(torch.uint16).view(3, 2, 2)
    assert [batch.tokens.flatten().tolist() for batch in read(stored, torch.int64)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    group = open_device(CPU).upload(stored)
    for _ in stored:
        assert not group.done()
        group.read_next(len)
    assert group.done()


def test_copies_are_timed_only_when_asked_for() -> None:
    stored = torch.ones(1, 64, 1025, dtype=torch.uint16)
    plain, timed = (open_device(CPU, timed=timed) for timed in (False, True))
    for device in (plain, timed):
        group = device.upload(stored)
        group.read_next(len)
    interval = group.interval()
    assert interval is not None
    start, stop = interval
    assert timed.seconds() == (stop - start, 0.0)
    assert start < stop
    assert plain.seconds() == (0.0, 0.0)


@pytest.mark.parametrize(
    ("current", "count", "local_rank", "index"),
    [
        (0, 8, None, 0),
        (0, 8, "3", 3),
        (0, 8, "0", 0),
        (5, 8, "3", 5),  # torch.cuda.set_device(5) was called
        (0, 1, "3", 0),  # CUDA_VISIBLE_DEVICES shows each rank its own
        (0, 8, "", 0),
        (0, 8, "many", 0),
    ],
)
def test_device_without_index_is_the_ranks_own(
    current: int, count: int, local_rank: str | None, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    environ = {} if local_rank is None else {"LOCAL_RANK": local_rank}
    assert find_device("cuda", environ) == torch.device("cuda", index)


def test_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert find_device(torch.device("cuda"), {"LOCAL_RANK": "1"}) == torch.device("cuda", 1)
    for beyond in ("cuda:2", "cuda:7"):
        with pytest.raises(errors.InvalidArgument, match=f"cuda:0 to cuda:1, got '{beyond}'"):
            find_device(torch.device(beyond), {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(errors.InvalidArgument, match="torch sees here, got 'cuda'"):
        find_device(torch.device("cuda"), {})
