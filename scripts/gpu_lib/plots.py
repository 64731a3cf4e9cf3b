"""Plots of a run as PNG, drawn from its JSON: `python -m scripts.gpu_lib.plots RESULTS.json DIR`."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.gpu_lib.record import Record

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

WIDTH, HEIGHT, SCALE = 900, 520, 3
"""Pixels of a picture, which is drawn larger and made smaller: its lines are smooth then."""

LEFT, RIGHT, TOP, BOTTOM = 80, 20, 50, 100
INK, GRID, PAPER = "#222222", "#dddddd", "#ffffff"
COLOURS = ("#1f77b4", "#2ca02c", "#d62728", "#111111", "#9467bd", "#8c564b", "#17becf", "#e58f00")

COPIES = {
    "host to host": "host to host",
    "pageable to device": "host to device, pageable",
    "torch-pinned to device": "host to device, pinned",
    "pageable to registered to device": "sum: host to host, then pinned to device",
    "device to registered": "device to host, pinned",
    "device to pageable": "device to host, pageable",
    "device to device": "device to device",
}
"""Lines of the plot of copies, by the name of the measurement."""

Point = tuple[float, float]


def draw(record: Record, folder: Path) -> list[Path]:
    """Draw what the record holds into `DATE-gpu-NAME.png`; nothing where Pillow is not installed."""
    if importlib.util.find_spec("PIL") is None:
        return []
    found = []
    for name, picture in PICTURES.items():
        if (image := picture(record)) is not None:
            found.append(folder / f"{record.path.stem}-{name}.png")
            image.save(found[-1], optimize=True)
    return found


def source_of(record: Record) -> str:
    """Return device and date, for the head of a picture."""
    machine = record.data["machine"]
    return f"{machine.get('gpu') or machine['device']}, {record.path.name[:10]}"


def copies(record: Record) -> Image.Image | None:
    """Draw the time of a copy by its size, a line for each way."""
    lines: dict[str, list[Point]] = {}
    for found in record.cells("copies").values():
        for each in found["measurements"]:
            if each["name"] in COPIES:
                lines.setdefault(COPIES[each["name"]], []).append(
                    (each["bytes"], 1e6 * each["seconds"]["median"])
                )
    ordered = {title: sorted(lines[title]) for title in COPIES.values() if title in lines}
    if not ordered:
        return None
    return line_chart(f"One copy by its size ({source_of(record)})", "bytes", "microseconds", ordered)


def stalls(record: Record) -> Image.Image | None:
    """Draw the stall of each way, a group of bars for each step."""
    groups = {
        name: {each["name"]: 100 * each["stall"]["median"] for each in found["outcomes"][:-1]}
        for name, found in record.cells("stalls").items()
    }
    if not groups:
        return None
    return bar_chart(f"Steps that wait for their batch ({source_of(record)})", "stall in percent", groups)


def training_stalls(record: Record) -> Image.Image | None:
    """Draw by how much a step of GPT-2 is longer than with a constant batch."""
    from scripts.gpu_lib.parts import training

    cells = record.cells("training")
    groups: dict[str, dict[str, float]] = {}
    for found in cells.values():
        value = training.stall(found, cells)
        if value is not None and found["way"] != training.CONSTANT:
            group = f"{found['rows']} x {found['seq_len']}{', loss.item()' if found['looks'] else ''}"
            groups.setdefault(group, {})[found["way"]] = value
    if not groups:
        return None
    return bar_chart(f"Training GPT-2 124M ({source_of(record)})", "stall in percent", groups)


PICTURES: dict[str, Callable[[Record], Any]] = {
    "copies": copies,
    "stalls": stalls,
    "training": training_stalls,
}


class Canvas:
    """A picture with a title, axes and a legend; places are pixels of the finished picture."""

    def __init__(self, title: str, down: str) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), PAPER)
        self._draw: ImageDraw.ImageDraw = ImageDraw.Draw(self.image)
        self.text((WIDTH / 2, 22), title, 17, "mm")
        self.text((8, TOP - 16), down, 13, "lm")

    def text(self, at: Point, text: str, size: int = 13, anchor: str = "mm") -> None:
        """Write a text."""
        from PIL import ImageFont

        font = ImageFont.load_default(size * SCALE)
        self._draw.text((at[0] * SCALE, at[1] * SCALE), text, INK, font, anchor)

    def line(self, points: Sequence[Point], colour: str, width: float = 1) -> None:
        """Draw a line through points."""
        self._draw.line([(x * SCALE, y * SCALE) for x, y in points], colour, round(width * SCALE), "curve")

    def box(self, start: Point, stop: Point, colour: str) -> None:
        """Fill a rectangle between two corners."""
        xs, ys = sorted((start[0], stop[0])), sorted((start[1], stop[1]))
        self._draw.rectangle([xs[0] * SCALE, ys[0] * SCALE, xs[1] * SCALE, ys[1] * SCALE], colour)

    def legend(self, names: Sequence[str]) -> None:
        """Write the names beside their colours, in rows under the axis."""
        columns = 4 if max(map(len, names)) < 20 else 3
        for number, name in enumerate(names):
            x = LEFT + number % columns * (WIDTH - LEFT - RIGHT) / columns
            y = HEIGHT - 50 + number // columns * 18
            self.box((x, y - 5), (x + 14, y + 5), COLOURS[number % len(COLOURS)])
            self.text((x + 20, y), name, 12, "lm")

    def finished(self) -> Image.Image:
        """Return the picture in its size."""
        from PIL import Image

        return self.image.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def line_chart(title: str, across: str, down: str, lines: Mapping[str, Sequence[Point]]) -> Image.Image:
    """Draw lines on two logarithmic axes."""
    points = [point for line in lines.values() for point in line]
    canvas = Canvas(title, down)
    (x_low, x_high), (y_low, y_high) = (
        (math.floor(math.log10(min(its))), math.ceil(math.log10(max(its))))
        for its in zip(*points, strict=True)
    )

    def at(x: float, y: float) -> Point:
        across = (math.log10(x) - x_low) / max(1, x_high - x_low)
        up = (math.log10(y) - y_low) / max(1, y_high - y_low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    for power in range(x_low, x_high + 1):
        bottom, top = at(10.0**power, 10.0**y_low), at(10.0**power, 10.0**y_high)
        canvas.line([bottom, top], GRID)
        canvas.text((bottom[0], bottom[1] + 12), short(10.0**power))
    for power in range(y_low, y_high + 1):
        left, right = at(10.0**x_low, 10.0**power), at(10.0**x_high, 10.0**power)
        canvas.line([left, right], GRID)
        canvas.text((left[0] - 8, left[1]), short(10.0**power), anchor="rm")
    canvas.text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 30), across)
    for number, line in enumerate(lines.values()):
        colour = COLOURS[number % len(COLOURS)]
        places = [at(*point) for point in line]
        if len(places) > 1:
            canvas.line(places, colour, 2)
        for x, y in places:
            canvas.box((x - 3, y - 3), (x + 3, y + 3), colour)
    canvas.legend(list(lines))
    return canvas.finished()


def bar_chart(title: str, down: str, groups: Mapping[str, Mapping[str, float]]) -> Image.Image:
    """Draw groups of bars from 0; each bar carries its value."""
    names = list(dict.fromkeys(name for its in groups.values() for name in its))
    values = [value for its in groups.values() for value in its.values()]
    step = nice(max(*values, 0.0, 1e-9) - min(*values, 0.0))
    low, high = step * math.floor(min(*values, 0.0) / step), step * math.ceil(max(*values, 0.0) / step)
    canvas = Canvas(title, down)

    def height(value: float) -> float:
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    for number in range(round((high - low) / step) + 1):
        y = height(low + number * step)
        canvas.line([(LEFT, y), (WIDTH - RIGHT, y)], GRID)
        canvas.text((LEFT - 8, y), f"{low + number * step:g}", anchor="rm")
    canvas.line([(LEFT, height(0)), (WIDTH - RIGHT, height(0))], INK)
    wide = (WIDTH - LEFT - RIGHT) / len(groups)
    bar = 0.8 * wide / len(names)
    for place, (group, its) in enumerate(groups.items()):
        canvas.text((LEFT + (place + 0.5) * wide, HEIGHT - BOTTOM + 16), group)
        for number, name in enumerate(names):
            if name in its:
                x = LEFT + (place + 0.1) * wide + number * bar
                canvas.box(
                    (x + 1, height(its[name])), (x + bar - 1, height(0)), COLOURS[number % len(COLOURS)]
                )
                beyond = -9 if its[name] >= 0 else 9
                canvas.text((x + bar / 2, height(its[name]) + beyond), f"{its[name]:.1f}", 10)
    canvas.legend(names)
    return canvas.finished()


def nice(span: float) -> float:
    """Return a step of 1, 2 or 5 times a power of ten, of which a span has about six."""
    power = 10.0 ** math.floor(math.log10(span / 6))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= span / 6), 10 * power)


def short(value: float) -> str:
    """Return a power of ten in few letters: `10 k`."""
    for unit, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:g}{name}"
    return f"{value:g}"


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    print(*draw(Record.read(Path(sys.argv[1])), folder), sep="\n")
