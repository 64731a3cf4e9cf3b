"""The charts of the docs show the newest results, and say them in words."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts.charts import CHARTS, IMAGES, cells
from scripts.drawing.bars import Bars
from scripts.drawing.lines import Lines, Point
from scripts.drawing.timeline import Timeline
from tests.serving import ROOT

SVG = "{http://www.w3.org/2000/svg}"
PAGES = {
    "README.md": ["first-batch"],
    "docs/performance.md": ["throughput", "ways", "latency", "first-batch", "timeline"],
    "docs/gpu.md": ["stalls"],
    "docs/why.md": ["throughput", "first-batch"],
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_that_of_the_results(name: str) -> None:
    """Renewed by `python -m scripts.charts`."""
    chart = CHARTS[name]()
    assert (IMAGES / f"chart-{name}.svg").read_text() == chart.svg()
    drawn = ET.fromstring(chart.svg())
    assert drawn.get("aria-label") == chart.alt
    assert "prefers-color-scheme: dark" in chart.svg()


@pytest.mark.parametrize("name", CHARTS)
def test_bars_are_as_long_as_their_figures(name: str) -> None:
    chart = CHARTS[name]()
    if not isinstance(chart, Bars):
        return
    widths = [
        float(each.get("width", ""))
        for each in ET.fromstring(chart.svg()).iter(f"{SVG}rect")
        if each.get("class") in ("ours", "other")
    ]
    assert len(widths) == sum(map(len, chart.groups.values()))
    for group in chart.groups.values():
        its, widths = widths[: len(group)], widths[len(group) :]
        order = sorted(range(len(group)), key=lambda k: abs(group[k].value))
        assert [its[k] for k in order] == sorted(its)


def test_what_was_not_measured_is_dashed_and_said(tmp_path: Path) -> None:
    other = [Point(9, 1.0), Point(10, 10.0), Point(11, 100.0, is_guess=True)]
    lines = {"ours": [Point(power, 1.5) for power in (9, 10, 11)], "other": other}
    chart = Lines("Time", tmp_path / "2026-01-01-x.md", "tokens", lines)
    drawn = ET.fromstring(chart.svg())
    kinds = [each.get("class") for each in drawn.iter(f"{SVG}polyline")]
    assert kinds == ["line ours", "line other", "line other guess"]
    assert len(list(drawn.iter(f"{SVG}circle"))) == 5
    assert "10^10 tokens 10 s, 10^11 tokens 100 s (not measured)" in chart.alt


def test_a_timeline_has_the_spans_of_the_trace(tmp_path: Path) -> None:
    names = ("requests", "transfers", "training loop")
    rows = [
        {"ph": "M", "name": "thread_name", "tid": n, "args": {"name": row}} for n, row in enumerate(names)
    ]
    spans = [(0, "fetch", 0, 500), (1, "transfer", 600, 100), (2, "wait", 0, 1000), (2, "step", 1000, 3000)]
    events = [{"ph": "X", "tid": row, "name": name, "ts": ts, "dur": dur} for row, name, ts, dur in spans]
    path = tmp_path / "2026-01-01-timeline.json"
    path.write_text(json.dumps({"machine": {"cpus": 2}, "traceEvents": [*rows, *events]}))
    chart = Timeline("A loop", path)
    assert chart.alt == (
        "A loop. 1 steps; means of a step: fetch 0.5 ms, transfer 0.1 ms, compute 3 ms, "
        "waiting for a batch 1 ms."
    )
    bars = [each.get("class") for each in ET.fromstring(chart.svg()).iter(f"{SVG}rect")]
    assert bars == ["paper", "ours", "third", "other"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_its_charts_show(page: str) -> None:
    text = (ROOT / page).read_text()
    for name in PAGES[page]:
        assert f"![{CHARTS[name]().alt}](" in text
        assert f"images/chart-{name}.svg)" in text


def test_a_table_is_read_with_its_rounds(tmp_path: Path) -> None:
    path = tmp_path / "results.md"
    path.write_text(
        "### a: median\n\n|  | x | y |\n| --- | --- | --- |\n| ours | 1 (1 - 2) | 1,200 (1,100 - 1,300) |\n"
        "| other | 1 (1 - 2) |  |\n"
    )
    assert cells(path, "a: median", "y") == {"ours": (1200.0, 1100.0, 1300.0)}
