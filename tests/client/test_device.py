"""The CPU device: right values at the edges of each dtype, and who owns the memory."""

from __future__ import annotations

import pytest
import torch

from corpus_client import errors
from corpus_client.device import STORED_DTYPES, open_device

EDGES = {
    "uint8": [0, 127, 128, 255],
    "uint16": [0, 2**15 - 1, 2**15, 2**16 - 1],
    "uint32": [0, 2**31 - 1, 2**31, 2**32 - 1],
    "int32": [0, 1, 2**16, 2**31 - 1],
    "int64": [-1, 0, 2**31, 2**32 - 1],
}


@pytest.mark.parametrize("name", STORED_DTYPES)
def test_widening_keeps_every_value(name: str) -> None:
    stored = torch.tensor([EDGES[name]], dtype=torch.int64).to(STORED_DTYPES[name])
    tokens = open_device(torch.device("cpu"), torch.int64).upload(stored).claim()
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [EDGES[name]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_widened_memory_is_fresh_even_where_no_widening_is_needed(dtype: torch.dtype) -> None:
    stored = torch.tensor([[1, 2]], dtype=dtype)
    device = open_device(torch.device("cpu"), dtype)
    tokens = device.upload(stored).claim()
    stored.zero_()
    assert tokens.tolist() == [[1, 2]]
    assert not device.borrows


def test_as_stored_is_a_view() -> None:
    stored = torch.tensor([[1, 2]], dtype=torch.uint16)
    device = open_device(torch.device("cpu"), None)
    assert device.borrows
    assert device.upload(stored).claim().data_ptr() == stored.data_ptr()


def test_other_devices_are_refused() -> None:
    with pytest.raises(errors.InvalidArgument, match="'cpu' or 'cuda' device, got 'meta'"):
        open_device(torch.device("meta"), None)
