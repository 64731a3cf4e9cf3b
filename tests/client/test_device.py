"""Which device is meant; on the CPU the right values at the edges of each dtype, and who owns the memory."""

from __future__ import annotations

import pytest
import torch

from corpus_client import errors
from corpus_client.device import STORED_DTYPES, device_index, find_device, open_device

EDGES = {
    "uint8": [0, 127, 128, 255],
    "uint16": [0, 2**15 - 1, 2**15, 2**16 - 1],
    "uint32": [0, 2**31 - 1, 2**31, 2**32 - 1],
    "int32": [0, 1, 2**16, 2**31 - 1],
    "int64": [-1, 0, 2**31, 2**32 - 1],
}


@pytest.mark.parametrize("name", STORED_DTYPES)
def test_widening_keeps_every_value(name: str) -> None:
    stored = torch.tensor([[EDGES[name]]], dtype=torch.int64).to(STORED_DTYPES[name])
    tokens = open_device(torch.device("cpu"), torch.int64).upload(stored).claim()
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [EDGES[name]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_widened_memory_is_fresh_even_where_no_widening_is_needed(dtype: torch.dtype) -> None:
    stored = torch.tensor([[[1, 2]]], dtype=dtype)
    device = open_device(torch.device("cpu"), dtype)
    tokens = device.upload(stored).claim()
    stored.zero_()
    assert tokens.tolist() == [[1, 2]]
    assert not device.borrows


def test_as_stored_is_a_view() -> None:
    stored = torch.tensor([[[1, 2]]], dtype=torch.uint16)
    device = open_device(torch.device("cpu"), None)
    assert device.borrows
    assert device.upload(stored).claim().data_ptr() == stored.data_ptr()


def test_other_devices_are_refused() -> None:
    with pytest.raises(
        errors.InvalidArgument, match="'cpu' or an accelerator that torch sees here, got 'meta'"
    ):
        open_device(torch.device("meta"), None)


def test_group_is_claimed_in_order() -> None:
    stored = torch.arange(12).to(torch.uint16).view(3, 2, 2)
    transfer = open_device(torch.device("cpu"), torch.int64).upload(stored)
    assert [transfer.claim().flatten().tolist() for _ in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]


def test_copies_are_timed_only_when_asked_for() -> None:
    stored = torch.ones(1, 64, 1025, dtype=torch.uint16)
    plain, timed = (open_device(torch.device("cpu"), torch.int64, timed=timed) for timed in (False, True))
    assert plain.upload(stored).interval() is None
    assert plain.seconds() == (0.0, 0.0)
    interval = timed.upload(stored).interval()
    assert interval is not None
    start, stop = interval
    assert timed.seconds() == (stop - start, 0.0)
    assert start < stop


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
    current: int, count: int, local_rank: str | None, index: int
) -> None:
    environ = {} if local_rank is None else {"LOCAL_RANK": local_rank}
    assert device_index(current, count, environ) == index


def test_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert find_device(torch.device("cuda"), {"LOCAL_RANK": "1"}) == torch.device("cuda", 1)
    with pytest.raises(errors.InvalidArgument, match="cuda:0 to cuda:1, got 'cuda:7'"):
        find_device(torch.device("cuda:7"), {})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(errors.InvalidArgument, match="torch sees here, got 'cuda'"):
        find_device(torch.device("cuda"), {})
