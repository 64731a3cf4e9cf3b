"""The charts of the docs show the newest results, and say them in words."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts.charts import CHARTS, IMAGES, cells
from tests.serving import ROOT

PAGES = {
    "README.md": ["throughput"],
    "docs/performance.md": ["throughput", "latency"],
    "docs/gpu.md": ["stalls"],
    "docs/why.md": ["throughput"],
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_that_of_the_results(name: str) -> None:
    """Renewed by `python -m scripts.charts`."""
    chart = CHARTS[name]()
    assert (IMAGES / f"chart-{name}.svg").read_text() == chart.svg()
    drawn = ET.fromstring(chart.svg())
    assert drawn.get("aria-label") == chart.alt
    assert "prefers-color-scheme: dark" in chart.svg()
    bars = [bar for its in chart.groups.values() for bar in its]
    widths = [
        float(each.get("width", ""))
        for each in drawn.iter("{http://www.w3.org/2000/svg}rect")
        if each.get("class") in ("ours", "other")
    ]
    assert len(widths) == len(bars)
    for group in chart.groups.values():
        its, widths = widths[: len(group)], widths[len(group) :]
        order = sorted(range(len(group)), key=lambda k: abs(group[k].value))
        assert [its[k] for k in order] == sorted(its)


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
    )
    assert cells(path, "a: median", "y") == {"ours": (1200.0, 1100.0, 1300.0)}
