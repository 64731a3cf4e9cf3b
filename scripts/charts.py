"""Draw the charts of the docs, from the newest dated results: `.venv/bin/python -m scripts.charts`.

Each is one SVG in docs/images with the colours of the reader's system, and says in words what it shows.
A test holds the files to the results, and the docs to the texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

from scripts.processes import ROOT

RESULTS, IMAGES = ROOT / "scripts" / "results", ROOT / "docs" / "images"
WIDTH, LEFT, RIGHT, BAR, GAP = 820, 300, 150, 20, 8
"""Pixels: the whole width; room for names and for figures; a bar and the room beneath it."""

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1c2127 } .title { font-size: 17px; font-weight: 600 }
.quiet { fill: #5a6470; font-size: 12.5px } .group { font-weight: 600 }
.figure { font-variant-numeric: tabular-nums }
.paper { fill: #ffffff } .ours { fill: #2a6fd6 } .other { fill: #9aa5b1 }
.range { stroke: #1c2127; stroke-width: 1.5 } .axis { stroke: #c4ccd4 }
@media (prefers-color-scheme: dark) {
text { fill: #e6eaef } .quiet { fill: #a4afba }
.paper { fill: #14181d } .ours { fill: #79aaff } .other { fill: #66717d }
.range { stroke: #e6eaef } .axis { stroke: #3a434d } }
"""


class Bar(NamedTuple):
    """A figure, with the lowest and the highest of its rounds where there are several."""

    name: str
    value: float
    low: float
    high: float
    is_ours: bool

    @property
    def shown(self) -> str:
        """The figure as the chart and its text have it."""
        value = f"{self.value:,.0f}" if self.value >= 100 else f"{self.value:.3g}"
        return f"{value} ({_short(self.low)} - {_short(self.high)})" if self.low < self.high else value


class Chart(NamedTuple):
    """Groups of bars, from 0.

    source: the file of results, beside which the docs show the chart.
    one_scale: for all groups; else each has its own.
    """

    title: str
    source: Path
    groups: Mapping[str, Sequence[Bar]]
    one_scale: bool = False

    @property
    def alt(self) -> str:
        """What the chart says, in words."""
        said = (
            f"{group}: {', '.join(f'{bar.name} {bar.shown}' for bar in bars)}"
            for group, bars in self.groups.items()
        )
        return f"{self.title}. {'; '.join(said)}."

    def svg(self) -> str:
        """Return the chart as an SVG document."""
        y, parts = 58, list[str]()
        every = [bar for bars in self.groups.values() for bar in bars]
        for group, bars in self.groups.items():
            parts.append(f'<text class="group" x="16" y="{y + 14}">{escape(group)}</text>')
            y += 26
            compared = every if self.one_scale else bars
            most, least = max(bar.high for bar in compared), min(0.0, *(bar.low for bar in compared))
            unit = (WIDTH - LEFT - RIGHT) / (most - least or 1)
            zero = LEFT - least * unit
            top = y
            for bar in bars:
                middle = y + BAR / 2
                start, stop = sorted((zero, zero + bar.value * unit))
                kind = "ours" if bar.is_ours else "other"
                parts += [
                    f'<text x="{LEFT - 10}" y="{middle + 5}" text-anchor="end">{escape(bar.name)}</text>',
                    f'<rect class="{kind}" x="{start:.1f}" y="{y}" width="{max(stop - start, 1):.1f}" '
                    f'height="{BAR}" rx="2"/>',
                ]
                if bar.low < bar.high:
                    low, high = (zero + each * unit for each in (bar.low, bar.high))
                    parts.append(
                        f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>'
                    )
                parts.append(
                    f'<text class="figure quiet" x="{WIDTH - RIGHT + 10}" y="{middle + 5}">{bar.shown}</text>'
                )
                y += BAR + GAP
            parts.append(
                f'<line class="axis" x1="{zero:.1f}" x2="{zero:.1f}" y1="{top - 3}" y2="{y - GAP + 3}"/>'
            )
            y += 10
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" '
            f"aria-label={quoteattr(self.alt)}><style>{STYLE}</style>"
            f'<rect class="paper" width="{WIDTH}" height="{y}" rx="8"/>'
            f'<text class="title" x="16" y="28">{escape(self.title)}</text>'
            f'<text class="quiet" x="16" y="47">{escape(self._about)}</text>{"".join(parts)}</svg>\n'
        )

    @property
    def _about(self) -> str:
        rounds = any(bar.low < bar.high for its in self.groups.values() for bar in its)
        return f"{self.source.name[:10]}{'; medians, with the lowest and the highest round' * rounds}"


def newest(pattern: str) -> Path:
    """Return the newest of the dated files of results."""
    return max(RESULTS.glob(pattern))


def cells(path: Path, heading: str, column: str) -> dict[str, tuple[float, float, float]]:
    """Return a column of the table below a heading that begins so: median, lowest and highest by row."""
    section = path.read_text().partition(f"### {heading}")[2].partition("\n### ")[0]
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    )
    number = head.index(column)
    found = {}
    for row in rows:
        median, low, high = (float(each.replace(",", "")) for each in re.findall(r"[\d.,]*\d", row[number]))
        found[row[0]] = median, low, high
    return found


def bars(found: Mapping[str, tuple[float, float, float]], names: Mapping[str, str]) -> list[Bar]:
    """Return the bars of some rows, under the names that the chart gives them."""
    return [Bar(shown, *found[row], row.startswith("ours")) for row, shown in names.items()]


def throughput() -> Chart:
    """Tokens per second of one client and one server beside a bare TCP server."""
    path = newest("*-bench-throughput.md")
    names = {
        "ours": "corpus-server, verified",
        "ours, checksum off": "corpus-server, verify=False",
        "strongest bare TCP": "the strongest bare TCP server",
    }
    groups = {
        f"batches of {size}": bars(cells(path, f"{size} uint16: median", "M tokens/s"), names)
        for size in ("64 x 1,025", "512 x 2,049")
    }
    return Chart("Million tokens per second, client and server on the same two cores", path, groups)


def latency() -> Chart:
    """One request at a time, and 64 loaders at once."""
    one, many = newest("*-bench-latency.md"), newest("*-bench-paced.md")
    groups: dict[str, Sequence[Bar]] = {}
    for quantile in ("p50", "p99"):
        names = {
            "ours": "corpus-server",
            "ours, from nginx's cache": "corpus-server, from nginx's cache",
            "bare TCP gather": "bare TCP",
        }
        found = cells(one, "one request of 64 x 1,025 at a time: median", f"{quantile} ms")
        groups[f"one request at a time, {quantile}"] = bars(found, names)
    for column, quantile in (("request p50 ms", "p50"), ("p99 ms", "p99")):
        names = {"ours, in step": "all at the same moment", "ours, spread": "spread over the period"}
        found = cells(many, "64 workers, 16 x 1,025 every 50 ms for 12 s: median", column)
        groups[f"64 loaders, each every 50 ms, {quantile}"] = bars(found, names)
    return Chart("Milliseconds until a batch has arrived", one, groups)


def stalls() -> Chart:
    """By how much steps on a GPU are longer than with a batch that is there already."""
    path = newest("*-gpu.json")
    found: Mapping[str, Any] = json.loads(path.read_text())
    groups: dict[str, Sequence[Bar]] = {}
    for name, cell in found["parts"]["stalls"].items():
        outcomes = [each for each in cell["outcomes"] if "stall" in each]
        groups[f"steps of {name.replace(', ', ' with ')}"] = [
            Bar(WAYS[each["name"]], value, value, value, each["name"] == "corpus-loader")
            for each in outcomes
            if each["name"] in WAYS
            for value in [round(100 * each["stall"]["median"], 1)]
        ]
    title = f"Percent by which steps wait for data, {found['machine']['gpu']}, single runs"
    return Chart(title, path, groups, one_scale=True)


WAYS: Mapping[str, str] = {
    "corpus-loader": "CorpusLoader",
    "dataloader": "torch's DataLoader, 2 workers",
    "pinned-async": "pinned, non-blocking",
    "pinned": "pinned, blocking",
    "pageable": "pageable, blocking",
}
"""Ways of feeding, by their names in the results."""

CHARTS: Mapping[str, Callable[[], Chart]] = {
    "throughput": throughput,
    "latency": latency,
    "stalls": stalls,
}


def main() -> None:
    """Draw all charts."""
    for name, make in CHARTS.items():
        chart = make()
        (IMAGES / f"chart-{name}.svg").write_text(chart.svg())
        print(f"![{chart.alt}](images/chart-{name}.svg)\n")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
