"""What doctor says of this machine, and of delivery against demand."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from corpus_client.observe.attribution import LoaderStats, WaitSeconds
from corpus_client.tools import checks
from corpus_client.tools.checks import FIXES, bottleneck
from corpus_client.tools.machine import Gpu

GPU = Gpu(name="H100", driver="550.1", generation="5", width="16", width_max="16")
NARROW = GPU._replace(generation="4", width="8")
UNKNOWN = GPU._replace(generation="[N/A]", width="[N/A]", width_max="[N/A]")


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
        (2.0161e9, "ok", "2,020 M tokens/s arrive (31.5 times that)"),
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
    assert f"the cause is {cause} ({checks.MEANINGS[cause]})" in check.found
