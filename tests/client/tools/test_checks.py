"""What doctor says of this machine, and of delivery against demand."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from corpus_client.observe.attribution import LoaderStats, WaitSeconds
from corpus_client.staging.stager import Stager
from corpus_client.tools import checks
from corpus_client.tools.bench import BenchResult
from corpus_client.tools.checks import FIXES, bandwidth, bottleneck
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
    check = checks.check_cores(cores, loaders, server_here=server_here)
    assert (check.status, check.measured["needed"]) == (status, needed)
    assert (f"give this job {needed} cores" in check.advice) == (status == "warn")


def test_page_locking_is_not_needed_without_a_gpu() -> None:
    check = checks.check_pinning(MIB, torch.device("cpu"))
    assert (check.status, check.found) == ("ok", "not needed without a GPU")


def test_memory_that_cannot_be_locked_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "open_stager", lambda device: Stager(device))
    check = checks.check_pinning(4 * MIB, torch.device("meta"))
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
            spread = Spread.of([checks.TRANSFER_BYTES / next(speeds)])
            return spread, spread

    monkeypatch.setattr(checks, "Clock", MadeUp)
    check = checks.check_transfers(torch.device("cpu"))
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
    check = checks.check_gpu(driver)
    assert check.status == status
    assert found in check.found
    assert advice in check.advice
    assert bool(advice) == bool(check.advice)


SERVER = WaitSeconds(network=1.0, server=2.0, host=0.5)
RANK_TOKENS = 64_000
"""Of a step; in one of a millisecond a rank needs 64 M tokens/s."""


def delivering(tokens_per_second: float, wait: WaitSeconds = SERVER) -> LoaderStats:
    return LoaderStats(num_batches=10, num_tokens=round(10 * tokens_per_second), seconds=10.0, wait=wait)


@pytest.mark.parametrize(
    ("delivered", "status", "says"),
    [
        (640e6, "ok", "data is not: a rank needs 64 M tokens/s, 640 M tokens/s arrive (10 times that)"),
        (81e6, "ok", "(1.27 times that)"),
        (79e6, "warn", "data hardly keeps up"),
        (64e6, "warn", "(1 times that)"),
        (63e6, "fail", "data is: a rank needs 64 M tokens/s, 63 M tokens/s arrive (0.984 times that)"),
        (32e6, "fail", "so a step of 1 ms takes 2 ms"),
    ],
)
def test_delivery_against_demand(delivered: float, status: str, says: str) -> None:
    check = bottleneck(delivering(delivered), RANK_TOKENS, 0.001)
    assert check.status == status
    assert says in check.found
    assert check.advice == ("" if status == "ok" else FIXES["server"])
    assert check.measured["delivered_over_needed"] == pytest.approx(delivered / 64e6)
    assert check.measured["shortest_step_seconds"] == pytest.approx(64_000 / delivered)


@pytest.mark.parametrize("cause", [field.name for field in fields(WaitSeconds)])
def test_the_cause_is_what_the_loop_waited_for_longest(cause: str) -> None:
    check = bottleneck(delivering(1e6, replace(SERVER, **{cause: 9.0})), RANK_TOKENS, 0.001)
    assert check.measured["cause"] == cause
    assert check.advice == FIXES[cause]


def test_a_loop_that_never_waits_is_held_by_its_own_copies() -> None:
    check = bottleneck(delivering(1e6, WaitSeconds()), RANK_TOKENS, 0.001)
    assert check.measured["cause"] == "host"


def test_without_a_step_time_the_shortest_step_is_told() -> None:
    check = bottleneck(delivering(640e6, replace(SERVER, network=9.0)), RANK_TOKENS, None)
    assert (check.status, check.measured["shortest_step_seconds"]) == ("ok", pytest.approx(1e-4))
    assert "data keeps up with steps of 100 us or longer (64,000 tokens a rank)" in check.found
    assert "below that, network sets the pace" in check.found
    assert "--step-seconds" in check.advice


@pytest.mark.parametrize(("retries", "status"), [(0, "ok"), (2, "warn")])
def test_what_a_loader_brought(retries: int, status: str) -> None:
    wait = WaitSeconds(network=0.2, server=0.6, host=0.2)
    found = BenchResult(
        stats=replace(delivering(16e6, wait), num_retries=retries),
        wait=Spread.of([0.1]),
        bytes_per_second=32e6,
        cpu_seconds=1.0,
        steps_per_request=1,
    )
    check = bandwidth(found)
    assert check.status == status
    assert check.found.startswith("16 M tokens/s, 32 MB/s")
    assert check.found.endswith("the loop waited for network 20%, server 60%, host 20%")
    assert ("2 requests repeated" in check.found) == bool(retries) == bool(check.advice)
