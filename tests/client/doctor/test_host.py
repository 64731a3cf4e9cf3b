"""This machine: what is warned of, and what is said where nothing can be seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from corpus_client.doctor import host
from corpus_client.staging.stager import Stager
from corpus_client.tools.machine import Gpu
from corpus_client.tools.timing import Clock, Spread

MIB = 2**20
GPU = Gpu(name="H100", driver="550.1", generation="5", width="16", width_max="16")
NARROW = GPU._replace(generation="4", width="8")
UNKNOWN = GPU._replace(generation="[N/A]", width="[N/A]", width_max="[N/A]")


@pytest.mark.parametrize(
    ("cores", "loaders", "server_here", "status", "needed"),
    [(2, 1, False, "ok", 2), (2, 1, True, "warn", 3), (15.5, 8, False, "warn", 16), (17, 8, True, "ok", 17)],
)
def test_cores(cores: float, loaders: int, server_here: bool, status: str, needed: int) -> None:
    check = host.check_cores(cores, loaders, server_here=server_here)
    assert (check.status, check.measured["needed"]) == (status, needed)
    assert (f"give this job {needed} cores" in check.advice) == (status == "warn")


def test_page_locking_is_not_needed_without_a_gpu() -> None:
    check = host.check_pinning(MIB, torch.device("cpu"))
    assert (check.status, check.found) == ("ok", "not needed without a GPU")


def test_memory_that_cannot_be_locked_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "open_stager", lambda device: Stager(device))
    check = host.check_pinning(4 * MIB, torch.device("meta"))
    assert (check.status, check.found) == ("warn", "4 MiB could not be page-locked")
    assert check.advice == "copies to the device block; the warnings on stderr name what failed"


@pytest.mark.parametrize(("registered", "status"), [(20e9, "ok"), (10e9, "warn")])
def test_the_loaders_memory_is_compared_with_torchs(
    monkeypatch: pytest.MonkeyPatch, registered: float, status: str
) -> None:
    """The speeds are made up: they arrive in the order of the kinds."""
    speeds = iter((5e9, 21e9, registered))

    class MadeUp(Clock):
        def time(self, *_: Any, **__: Any) -> Any:
            spread = Spread.of([host.TRANSFER_BYTES / next(speeds)])
            return spread, spread

    monkeypatch.setattr(host, "Clock", MadeUp)
    check = host.check_transfers(torch.device("cpu"))
    assert check.status == status
    assert f"pageable 5.0 GB/s, torch-pinned 21.0 GB/s, registered {registered / 1e9:.1f} GB/s" in check.found
    assert bool(check.advice) == (status == "warn")


@pytest.mark.parametrize(
    ("seen", "cuda", "driver", "status", "found", "advice"),
    [
        ([], None, [], "ok", "none; batches go to host memory", ""),
        ([], None, [GPU], "fail", "sees none of the driver's 1", "install a CUDA build of torch"),
        ([], "12.4", [GPU, GPU], "fail", "sees none of the driver's 2", "CUDA_VISIBLE_DEVICES"),
        (["H100"] * 2, "12.4", [GPU] * 2, "ok", "2 x H100; torch", ""),
        (["H100"], "12.4", [GPU], "ok", "driver 550.1, PCIe 5 x16", ""),
        (["H100"], "12.4", [UNKNOWN], "ok", "PCIe link unknown", ""),
        (["H100"], "12.4", [], "ok", "1 x H100", "install nvidia-smi"),
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
    driver: list[Gpu],
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
