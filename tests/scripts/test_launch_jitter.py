"""The measurement of launches runs, and its table has every loader at every rate."""

from __future__ import annotations

import pytest

from scripts import launch_jitter


def test_every_loader_is_measured_at_every_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_jitter.main(["--rounds", "1", "--seconds", "0.05"]) == 0
    printed = capsys.readouterr().out
    for rate in launch_jitter.RATES:
        for name in ("none", "by URL", "by path"):
            assert f"| {rate} | {name} |" in printed
