"""Draw the charts of the docs, from the newest dated results: `.venv/bin/python -m scripts.charts`.

Each is one SVG in docs/images with the colours of the reader's system, and says in words what it shows.
A test holds the files to the results, and the docs to the texts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.drawing.bars import Bar, Bars
from scripts.drawing.lines import Lines, Point
from scripts.drawing.page import Chart
from scripts.drawing.timeline import Timeline
from scripts.processes import ROOT

RESULTS, IMAGES = ROOT / "scripts" / "results", ROOT / "docs" / "images"


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
        if figures := re.findall(r"[\d.,]*\d", row[number]):
            median, low, high = (float(each.replace(",", "")) for each in figures)
            found[row[0]] = median, low, high
    return found


def bars(found: Mapping[str, tuple[float, float, float]], names: Mapping[str, str]) -> list[Bar]:
    """Return the bars of some rows, under the names that the chart gives them."""
    return [Bar(shown, *found[row], row.startswith(("ours", "by "))) for row, shown in names.items()]


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
    return Bars("Million tokens per second, client and server on the same two cores", path, groups)


def ways() -> Chart:
    """Tokens per second of each way to tensors, beside those of a process that gathers for itself."""
    path = newest("*-bench-path.md")
    names = {
        "by path": "CorpusLoader by path",
        "by Unix socket": "by Unix socket",
        "by URL": "by URL",
        "nanoGPT idiom": "nanoGPT's get_batch",
        "strongest gather": "the strongest gather from a memmap",
    }
    groups = {
        f"batches of {size}": bars(cells(path, f"{size}, int64: median", "M tokens/s"), names)
        for size in ("64 x 1,025", "512 x 2,049")
    }
    return Bars("Million tokens per second as int64 inputs and targets, on the same two cores", path, groups)


def first_batch() -> Chart:
    """Seconds until the first batch by the size of the corpus, beside a trainer that builds indexes."""
    path = newest("*-first-batch.md")
    lines: dict[str, list[Point]] = {}
    for name in ("corpus-server, by path", "Megatron-Core, indexes built"):
        found = cells(path, "Seconds until the first batch", name)
        lines[name] = [Point(int(size.removeprefix("10^")), median) for size, (median, _, _) in found.items()]
    ours, other = lines.values()
    before, last = other[-2:]
    rate = (last.seconds - before.seconds) / (10**last.power - 10**before.power)
    other += [
        Point(each.power, last.seconds + rate * (10**each.power - 10**last.power), is_guess=True)
        for each in ours
        if each.power > last.power
    ]
    return Lines("Time from nothing to the first batch", path, "tokens", lines)


def timeline() -> Chart:
    """Steps of a loop, as its loader traced them."""
    title = "A training loop of 64 x 1,024 tokens a step, as the loader's trace has it"
    return Timeline(title, newest("*-timeline.json"))


def latency() -> Chart:
    """One request at a time, and 16 loaders."""
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
        found = cells(many, "16 workers, 16 x 1,025 every 100 ms for 12 s: median", column)
        groups[f"16 loaders, each every 100 ms, {quantile}"] = bars(found, names)
    return Bars("Milliseconds until a batch has arrived", one, groups)


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
    return Bars(title, path, groups, one_scale=True)


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
    "ways": ways,
    "first-batch": first_batch,
    "timeline": timeline,
    "latency": latency,
    "stalls": stalls,
}


def main() -> None:
    """Draw all charts."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    for name, make in CHARTS.items():
        chart = make()
        (IMAGES / f"chart-{name}.svg").write_text(chart.svg())
        print(f"![{chart.alt}](images/chart-{name}.svg)\n")


if __name__ == "__main__":
    main()
