"""Seconds by size, both in powers of ten: measured points, and what they would come to beyond."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from scripts.drawing.page import WIDTH, Chart, short

LEFT, RIGHT, TOP, HEIGHT = 80, 40, 96, 300
"""Pixels: room for the axis of seconds, to the right, for head and legend; the area of the lines."""


class Point(NamedTuple):
    """A size as a power of ten, and seconds; is_guess: not measured, but where the line leads."""

    power: int
    seconds: float
    is_guess: bool = False


@dataclass(frozen=True)
class Lines(Chart):
    """Lines of points by name; the first one is ours. unit: what sizes count."""

    title: str
    source: Path
    unit: str
    lines: Mapping[str, Sequence[Point]]

    @property
    def said(self) -> str:
        """See `Chart.said`."""
        return "; ".join(
            f"{name}: {', '.join(f'10^{each.power} {self.unit} {_told(each)}' for each in points)}"
            for name, points in self.lines.items()
        )

    @property
    def about(self) -> str:
        """See `Chart.about`."""
        dashed = "dashed: not measured, straight on from the two largest measured sizes"
        return f"{self.source.name[:10]}; medians; {dashed}"

    def draw(self) -> tuple[Sequence[str], int]:
        """See `Chart.draw`."""
        every = [each for points in self.lines.values() for each in points]
        first, last = min(each.power for each in every), max(each.power for each in every)
        low = math.floor(math.log10(min(each.seconds for each in every)))
        high = math.ceil(math.log10(max(each.seconds for each in every)))

        def place(power: float, seconds: float) -> tuple[float, float]:
            x = LEFT + (power - first) / (last - first) * (WIDTH - LEFT - RIGHT - 60)
            return x, TOP + HEIGHT * (high - math.log10(seconds)) / (high - low)

        parts = list[str]()
        for exponent in range(low, high + 1):
            _, y = place(first, 10.0**exponent)
            parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            label = f"{short(10.0**exponent)} s"
            parts.append(
                f'<text class="quiet" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
            )
        for power in range(first, last + 1):
            x, _ = place(power, 1)
            words = f"10{_raised(power)} {self.unit}"
            parts.append(
                f'<text class="quiet" x="{x:.1f}" y="{TOP + HEIGHT + 22}" text-anchor="middle">{words}</text>'
            )
        for number, (name, points) in enumerate(self.lines.items()):
            kind = "other" if number else "ours"
            x = 16 + 300 * number
            parts.append(f'<rect class="{kind}" x="{x}" y="62" width="14" height="14" rx="2"/>')
            parts.append(f'<text x="{x + 22}" y="74">{escape(name)}</text>')
            others = [each for other, its in self.lines.items() if other != name for each in its]
            most = {each.power: each.seconds for each in others}
            above = [each.seconds > most.get(each.power, 0) for each in points]
            parts += _line([place(each.power, each.seconds) for each in points], points, above, kind)
        return parts, TOP + HEIGHT + 38


def _line(
    places: Sequence[tuple[float, float]], points: Sequence[Point], above: Sequence[bool], kind: str
) -> list[str]:
    """Return a line with its points; `above`: on which side of each its figure stands."""
    measured = sum(not each.is_guess for each in points)
    parts = list[str]()
    for chosen, dashed in ((places[:measured], ""), (places[measured - 1 :], " guess")):
        if len(chosen) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in chosen)
            parts.append(f'<polyline class="line {kind}{dashed}" points="{path}"/>')
    for (x, y), each, is_above in zip(places, points, above, strict=True):
        if not each.is_guess:
            parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
        is_left = is_above and x > LEFT  # to the right of the first one, beside the axis
        anchor, across, down = ("end", -8, -8) if is_left else ("start", 6, -10 if is_above else 20)
        where = f'x="{x + across:.1f}" y="{y + down:.1f}" text-anchor="{anchor}"'
        parts.append(f'<text class="figure quiet" {where}>{_seconds(each.seconds)}</text>')
    return parts


def _told(point: Point) -> str:
    return f"{_seconds(point.seconds)}{' (not measured)' * point.is_guess}"


def _seconds(value: float) -> str:
    for most, unit, name in ((120, 1, "s"), (7200, 60, "min"), (math.inf, 3600, "h")):
        if value < most:
            return f"{short(float(f'{value / unit:.2g}'))} {name}"
    raise AssertionError


def _raised(power: int) -> str:
    return str(power).translate(
        str.maketrans("0123456789", "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
    )
