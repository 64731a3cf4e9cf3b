"""Which device is meant; on the CPU the right values at the edges of each dtype, and who owns the memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from corpus_client import Batch, errors
from corpus_client.plan.world import WHOLE, Context
from corpus_client.staging.ring import find_device, open_stager
from corpus_client.staging.stager import STORED_DTYPES, Stager, Views

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
    device = open_stager(CPU)
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
    device = open_stager(CPU, context=Context(1, 2))
    batch = Batch(device.upload(stored).read_next(partial(device.make, dtype)))
    assert batch.inputs.tolist() == [[2, 3], [7, 8]]
    assert batch.targets.tolist() == [[3, 4], [8, 9]]
    assert batch.tokens.tolist() == stored[0].tolist()
    inputs, targets = torch.zeros(2, 2, 2, dtype=torch.int64)
    device.upload(stored).read_next(partial(device.fill, inputs, targets))
    assert (inputs.tolist(), targets.tolist()) == ([[2, 3], [7, 8]], [[3, 4], [8, 9]])


META = torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.int64, None])
def test_an_accelerator_without_streams_gets_copies(dtype: torch.dtype | None) -> None:
    """As stored, too: it cannot read the slot."""
    device = Stager(META)
    assert (device.timed, device.context) == (False, WHOLE)
    stored = torch.arange(6).to(torch.uint16).view(1, 2, 3)
    made = device.upload(stored).read_next(partial(device.make, dtype))
    assert [(each.device, each.dtype, each.shape) for each in (made.inputs, made.targets)] == [
        (META, dtype or torch.uint16, (2, 2))
    ] * 2


@pytest.mark.parametrize("name", ["inputs", "targets"])
@pytest.mark.parametrize(
    ("stored", "wrong"),
    [
        ("uint16", torch.zeros(2, 3, dtype=torch.int64)),
        ("uint16", torch.zeros(2, 2, dtype=torch.int32, device=META)),
        ("uint16", torch.zeros(2, 2, dtype=torch.float32)),
        ("uint16", torch.zeros(2, 2, dtype=torch.int8)),
        ("uint16", torch.zeros(2, 2, dtype=torch.int16)),
        ("uint16", torch.zeros(2, 2, dtype=torch.bool)),
        ("uint16", torch.zeros(2, 2, dtype=torch.complex64)),
        ("uint32", torch.zeros(2, 2, dtype=torch.int32)),
        ("int32", torch.zeros(2, 2, dtype=torch.uint32)),
    ],
    ids=lambda each: each if isinstance(each, str) else f"{each.dtype} {tuple(each.shape)} {each.device}",
)
def test_tensors_that_do_not_hold_every_token_are_refused_and_none_is_written_to(
    name: str, stored: str, wrong: torch.Tensor
) -> None:
    stager = open_stager(CPU)
    group = stager.upload(torch.arange(1, 7).to(STORED_DTYPES[stored]).view(1, 2, 3))
    fitting = torch.zeros(2, 2, dtype=torch.int64)
    into = {"inputs": fitting, "targets": fitting, name: wrong}
    with pytest.raises(errors.InvalidArgument) as caught:
        group.read_next(partial(stager.fill, into["inputs"], into["targets"]))
    assert str(caught.value) == (
        f"{name} must be an integer tensor of shape (2, 2) on cpu that holds every torch.{stored}, got "
        f"{wrong.dtype} of shape {tuple(wrong.shape)} on {wrong.device}"
    )
    assert (int(fitting.sum()), group.done()) == (0, False)
    inputs, targets = torch.zeros(2, 2, 2, dtype=torch.int64)
    assert group.read_next(partial(stager.fill, inputs, targets)) == Views(inputs, targets)
    assert (inputs.tolist(), targets.tolist()) == ([[1, 2], [4, 5]], [[2, 3], [5, 6]])


def test_an_accelerator_without_streams_copies_as_the_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor can it tell which of its devices is the current one."""
    monkeypatch.setattr(torch.mps, "device_count", lambda: 2)
    assert find_device("mps", {}) == torch.device("mps", 0)
    assert find_device("mps", {"LOCAL_RANK": "1"}) == torch.device("mps", 1)
    device = open_stager("mps:1", context=Context(1, 2), timed=True)
    found = (type(device), device.location, device.context, device.timed)
    assert found == (Stager, torch.device("mps", 1), Context(1, 2), True)


def test_copies_are_timed_only_when_asked_for() -> None:
    stored = torch.ones(1, 64, 1025, dtype=torch.uint16)
    plain, timed = (open_stager(CPU, timed=timed) for timed in (False, True))
    for device in (plain, timed):
        group = device.upload(stored)
        group.read_next(len)
    interval = group.interval()
    assert interval is not None
    start, stop = interval
    assert (timed.copy_seconds, timed.stall_seconds) == (stop - start, 0.0)
    assert start < stop
    assert (plain.copy_seconds, plain.stall_seconds) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("current", "count", "local_rank", "index"),
    [
        (0, 8, None, 0),
        (0, 8, "3", 3),
        (0, 8, "0", 0),
        (5, 8, "3", 5),  # torch.cuda.set_device(5) was called
        (0, 4, "3", 3),
        (0, 3, "3", 0),
        (1, 3, "2", 1),
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


@pytest.mark.parametrize(("count", "beyond"), [(1, 1), (2, 2), (2, 7), (8, 8)])
def test_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, beyond: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    last = torch.device("cuda", count - 1)
    assert find_device(torch.device("cuda"), {"LOCAL_RANK": str(count - 1)}) == last
    assert find_device(last, {}) == last
    with pytest.raises(errors.InvalidArgument) as caught:
        find_device(torch.device("cuda", beyond), {})
    assert str(caught.value) == (
        f"device must be cuda:0 to cuda:{count - 1}, got 'cuda:{beyond}'; does CUDA_VISIBLE_DEVICES hide it?"
    )
