"""Draw the data of the parts; matplotlib is loaded here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from corpus_client.tools.machine import one_line
from corpus_client.tools.timing import seconds_name, size_name

Draw = Callable[[Any], None]
"""Draws on the empty axes of a figure."""


def save(plots: Iterator[tuple[str, Draw]], folder: Path) -> None:
    """Write a PNG file for each plot, by its name."""
    from matplotlib.figure import Figure

    for name, draw in plots:
        folder.mkdir(parents=True, exist_ok=True)
        figure = Figure(figsize=(10, 4.5), layout="constrained")
        draw(figure.add_subplot())
        figure.savefig(folder / f"{name}.png", dpi=110)


def transfer(data: dict[str, Any]) -> Iterator[tuple[str, Draw]]:
    """Return bandwidth by size: of copies, and of batches as the loader sends them."""
    titles = {"measurements": "One copy, by size", "batches": "Batches as CorpusLoader sends them"}
    for name, title in titles.items():
        yield f"transfer-{name}", partial(_bandwidth, f"{title}\n{one_line(data['machine'])}", data[name])


def _bandwidth(title: str, measurements: Sequence[dict[str, Any]], axes: Any) -> None:
    for name in dict.fromkeys(each["name"] for each in measurements):
        way = [each for each in measurements if each["name"] == name]
        sizes, speeds = [each["bytes"] for each in way], [each["bytes_per_second"] / 1e9 for each in way]
        style = ":" if name.startswith("host to host") else "-"
        axes.plot(sizes, speeds, marker="o", markersize=3, linestyle=style, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")  # a copy within the device is a hundred times as fast as one over the bus
    axes.xaxis.set_major_formatter(lambda size, _: size_name(size))
    axes.set_ylabel("GB/s")
    axes.grid(alpha=0.3)
    axes.set_title(title, fontsize=8)
    axes.figure.legend(fontsize=8, loc="outside right upper")


def overlap(data: dict[str, Any]) -> Iterator[tuple[str, Draw]]:
    """Return a bar for each way of feeding steps, for each cell."""
    for cell in data["cells"]:
        asked, size = seconds_name(cell["asked_seconds"]), size_name(cell["batch_bytes"])
        title = f"Steps of {asked}, {size} of tokens each\n{one_line(cell['machine'])}"
        yield f"overlap-{asked}-{size}".replace(" ", ""), partial(_stalls, title, cell["outcomes"][::-1])


def _stalls(title: str, outcomes: Sequence[dict[str, Any]], axes: Any) -> None:
    steps = [1e3 * each["seconds"]["median"] for each in outcomes]
    bars = axes.barh([each["title"] for each in outcomes], steps)
    axes.bar_label(bars, [f"{each['stall']['median']:+.1%}" for each in outcomes], padding=3, fontsize=8)
    axes.set_xlabel("ms a step; beside it the stall against (f)")
    axes.set_title(title, fontsize=8)
