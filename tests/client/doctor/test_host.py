"""This machine: what is warned of, and what is said where nothing can be seen."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest
import torch

from corpus_client.buffers import RingSize
from corpus_client.doctor import host
from corpus_client.tools.gpus import Bus, Gpu

MIB = 2**20
RING = RingSize(num_slots=4, steps_per_slot=1, batch_bytes=MIB)
GPU = Gpu(name="H100", uuid="GPU-1", driver="550.1", bus=Bus(generation=5, width=16), width_max=16)
NARROW = replace(GPU, bus=Bus(generation=4, width=8))
UNKNOWN = replace(GPU, bus=None, width_max=None)


@pytest.mark.parametrize(
    ("cores", "loaders", "server_here", "status", "needed"),
    [(2, 1, False, "ok", 2), (2, 1, True, "warn", 3), (15.5, 8, False, "warn", 16), (17, 8, True, "ok", 17)],
)
def test_cores(cores: float, loaders: int, server_here: bool, status: str, needed: int) -> None:
    check = host.check_cores(cores, loaders, server_here=server_here)
    assert (check.status, check.measured["needed"]) == (status, needed)
    assert (f"give this job {needed} cores" in check.advice) == (status == "warn")


@pytest.mark.parametrize(("loaders", "status"), [(1, "ok"), (2, "ok"), (3, "warn")])
def test_slots_of_all_loaders_within_half_of_the_memory(loaders: int, status: str) -> None:
    check = host.check_memory(RING, loaders, memory_bytes=16 * MIB)
    assert (check.status, check.measured["slots_bytes"]) == (status, loaders * 4 * MIB)
    assert ("prefetch_bytes=2796202 or less" in check.advice) == (status == "warn")


def test_page_locking_needs_no_limit_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for limit, shown in ((resource.RLIM_INFINITY, "unlimited"), (8 * MIB, "8 MiB")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        check = host.check_pinning(RING)
        assert (check.status, check.found) == ("ok", f"not needed without a GPU (ulimit -l: {shown})")


@pytest.mark.needs_cuda
def test_page_locking_is_tried_with_a_gpu() -> None:
    check = host.check_pinning(RING)
    assert check.status == "ok"
    assert "4 MiB were page-locked" in check.found


@pytest.mark.parametrize(
    ("seen", "cuda", "driver", "status", "found", "advice"),
    [
        ([], None, None, "ok", "none; batches go to host memory", ""),
        ([], None, [GPU], "fail", "sees none of the driver's 1", "install a CUDA build of torch"),
        ([], "12.4", [GPU, GPU], "fail", "sees none of the driver's 2", "CUDA_VISIBLE_DEVICES"),
        (["H100"] * 2, "12.4", [GPU] * 2, "ok", "2 x H100; torch", ""),
        (["H100"], "12.4", [GPU], "ok", "driver 550.1, PCIe 5 x16", ""),
        (["H100"], "12.4", [UNKNOWN], "ok", "PCIe link unknown", ""),
        (["H100"], "12.4", None, "ok", "1 x H100", "install nvidia-smi"),
        (
            ["A"],
            "12.4",
            [NARROW],
            "warn",
            "PCIe 4 x8; 1 of them could have x16",
            "slot, riser",
        ),
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch,
    seen: list[str],
    cuda: str | None,
    driver: list[Gpu] | None,
    status: str,
    found: str,
    advice: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: seen[index])
    monkeypatch.setattr(torch.version, "cuda", cuda)
    check = host.check_gpu(driver)
    assert check.status == status
    assert found in check.found
    assert advice in check.advice
    assert bool(advice) == bool(check.advice)


def test_loaders_as_said_or_as_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (host.num_loaders(3), host.num_loaders(None)) == (3, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host.num_loaders(None) == 8
