"""The axis runs on whatever device is here, and its figures belong together."""

from __future__ import annotations

from pathlib import Path

from corpus_client.device import default_device
from scripts.benchmarks.axes import device
from scripts.benchmarks.report import Options


def test_every_shape_is_measured(tmp_path: Path) -> None:
    report = device.measure(Options(cache=tmp_path, smoke=True))
    shapes = report.data["shapes"]
    assert [(each["rows"], each["window"]) for each in shapes] == list(device.SHAPES[:2])
    assert len(report.tables[0].rows) == len(shapes)
    for each in shapes:
        assert 0 < each["held_p50_seconds"] <= each["held_p99_seconds"]
        assert each["bytes_per_second"] > 0
        assert each["batch_bytes"] * each["group"] <= max(1 << 20, each["batch_bytes"])
    assert bool(report.targets) == (default_device().type != "cpu")
    assert bool(report.notes) == (default_device().type == "cpu")
