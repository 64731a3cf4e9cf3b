"""Memory of batches that is used again: never while anybody can still see it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from corpus_client.staging.stager import HostMemory, widened


def zeros(memory: HostMemory, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.from_numpy(widened(np.zeros(shape, np.int32), dtype, memory))


def test_memory_that_nobody_holds_is_used_again() -> None:
    memory = HostMemory()
    first = zeros(memory, 3, 4)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((3, 4), torch.int64, True)
    address = first.data_ptr()
    del first
    again = zeros(memory, 6, 4, dtype=torch.int32)  # as many bytes
    assert (again.data_ptr(), again.shape) == (address, (6, 4))


@pytest.mark.parametrize(
    "hold",
    [
        lambda tensor: tensor[1, 2:],
        lambda tensor: tensor.numpy(),
        lambda tensor: np.asarray(tensor)[::2],
        lambda tensor: tensor.view(-1).unbind()[5],
        lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    ],
)
def test_memory_of_which_a_view_is_left_is_not(hold: Callable[[torch.Tensor], object]) -> None:
    memory = HostMemory()
    tensor = zeros(memory, 3, 4)
    address, held = tensor.data_ptr(), hold(tensor)
    del tensor
    others = [zeros(memory, 3, 4) for _ in range(3)]
    assert address not in {each.data_ptr() for each in others}
    del held
    assert zeros(memory, 3, 4).data_ptr() == address


def test_a_part_of_an_array_keeps_all_of_it() -> None:
    memory = HostMemory()
    array = widened(np.zeros((2, 3, 4), np.int32), torch.int64, memory)
    address, first = array.ctypes.data, torch.from_numpy(array[0])
    del array
    other = zeros(memory, 2, 3, 4)
    assert other.data_ptr() != address
    del first
    assert zeros(memory, 2, 3, 4).data_ptr() == address


def test_little_is_kept() -> None:
    memory = HostMemory()
    held = [zeros(memory, 3, 4) for _ in range(100)]
    held.clear()
    assert len(memory._free) == 8  # of two batches
    for _ in range(2):  # another size does not push out what the next batch needs
        zeros(memory, 3, 5)
    assert [len(each) for each in memory._free].count(96) == 7
