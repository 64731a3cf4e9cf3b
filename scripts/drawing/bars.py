"""Groups of bars, from 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from scripts.drawing.page import WIDTH, Chart, short

LEFT, RIGHT, BAR, GAP = 290, 165, 20, 8
"""Pixels: room for names and for figures; a bar and the room beneath it."""


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
        value = short(self.value)
        return f"{value} ({short(self.low)} - {short(self.high)})" if self.low < self.high else value


@dataclass(frozen=True)
class Bars(Chart):
    """Groups of bars.

    source: the file of results, beside which the docs show the chart.
    one_scale: for all groups; else each has its own.
    """

    title: str
    source: Path
    groups: Mapping[str, Sequence[Bar]]
    one_scale: bool = False

    @property
    def said(self) -> str:
        """See `Chart.said`."""
        return "; ".join(
            f"{group}: {', '.join(f'{bar.name} {bar.shown}' for bar in bars)}"
            for group, bars in self.groups.items()
        )

    @property
    def about(self) -> str:
        """See `Chart.about`."""
        rounds = any(bar.low < bar.high for its in self.groups.values() for bar in its)
        return f"{self.source.name[:10]}{'; medians, with the lowest and the highest round' * rounds}"

    def draw(self) -> tuple[Sequence[str], int]:
        """See `Chart.draw`."""
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
                parts += _drawn(bar, y, zero, unit)
                y += BAR + GAP
            parts.append(
                f'<line class="axis" x1="{zero:.1f}" x2="{zero:.1f}" y1="{top - 3}" y2="{y - GAP + 3}"/>'
            )
            y += 10
        return parts, y


def _drawn(bar: Bar, y: float, zero: float, unit: float) -> list[str]:
    middle = y + BAR / 2
    start, stop = sorted((zero, zero + bar.value * unit))
    kind = "ours" if bar.is_ours else "other"
    parts = [
        f'<text x="{LEFT - 10}" y="{middle + 5}" text-anchor="end">{escape(bar.name)}</text>',
        f'<rect class="{kind}" x="{start:.1f}" y="{y}" width="{max(stop - start, 1):.1f}" '
        f'height="{BAR}" rx="2"/>',
    ]
    if bar.low < bar.high:
        low, high = (zero + each * unit for each in (bar.low, bar.high))
        parts.append(f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}"/>')
    shown = f'<text class="figure quiet" x="{WIDTH - RIGHT + 10}" y="{middle + 5}">{bar.shown}</text>'
    return [*parts, shown]
