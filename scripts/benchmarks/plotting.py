"""How the bench's plots look: ours stands out, limits are dark, peers are light."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Role = Literal["ours", "limit", "peer"]

COLOURS: dict[Role, str] = {"ours": "#d1495b", "limit": "#30475e", "peer": "#a9b4c2"}
LABELS: dict[Role, str] = {
    "ours": "ours",
    "limit": "limits: no protocol, or no server",
    "peer": "peers and habits",
}

GRID = "#e6e6e6"

PERCENTILES = (*(each / 2 for each in range(1, 199)), 99.3, 99.5, 99.7, 99.9)
"""Of which a line of latencies is drawn."""
MARKED = (50.0, 99.0)
TICKS = (50, 75, 90, 95, 99, 99.5, 99.9)


def bars(
    axes: Axes,
    names: Sequence[str],
    medians: Sequence[float],
    spreads: Sequence[tuple[float, float]],
    roles: Sequence[Role],
    *,
    form: str = ",.0f",
) -> None:
    """Draw horizontal bars from the top down, each with its figure and its spread (lowest, highest)."""
    places = range(len(names))
    errors = [
        [median - low for median, (low, _) in zip(medians, spreads, strict=True)],
        [high - median for median, (_, high) in zip(medians, spreads, strict=True)],
    ]
    axes.barh(places, medians, color=[COLOURS[role] for role in roles], height=0.72)
    axes.errorbar(medians, places, xerr=errors, fmt="none", ecolor="#555555", elinewidth=1, capsize=2)
    end = max(high for _, high in spreads)
    for place, median, (_, high), role in zip(places, medians, spreads, roles, strict=True):
        weight = "bold" if role == "ours" else "normal"
        axes.text(high + 0.015 * end, place, format(median, form), va="center", fontsize=9, fontweight=weight)
    axes.set_yticks(places, names, fontsize=9)
    for label, role in zip(axes.get_yticklabels(), roles, strict=True):
        label.set_fontweight("bold" if role == "ours" else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * end)
    axes.set_ylim(len(names) - 0.4, -0.6)
    tidy(axes)


def tidy(axes: Axes) -> None:
    """Take away the frame, and draw light lines to read values by."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def spread_panels(figure: Figure) -> None:
    """Leave room between panels, so that labels of one are not read as values of the other."""
    engine = figure.get_layout_engine()
    if isinstance(engine, ConstrainedLayoutEngine):
        engine.set(wspace=0.06, w_pad=0.1)


def latencies(
    axes: Axes,
    values_ms: Sequence[float],
    percentiles: Sequence[float],
    *,
    label: str,
    role: Role,
    style: str,
) -> None:
    """Draw a line of latency over percentile, each further nine as wide, marked at 50 and 99."""
    width = 2.4 if role == "ours" else 1.6
    marks = [percentiles.index(marked) for marked in MARKED]
    places = [_nines(percentile) for percentile in percentiles]
    axes.plot(places, values_ms, style, color=COLOURS[role], linewidth=width, label=label)
    axes.plot([places[at] for at in marks], [values_ms[at] for at in marks], "o", color=COLOURS[role], ms=5)
    axes.set_xticks([_nines(tick) for tick in TICKS], [f"p{tick:g}" for tick in TICKS])
    axes.set_xlim(0, _nines(99.9))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("percentile of requests")
    tidy(axes)
    axes.grid(axis="y", color=GRID, linewidth=0.8)


def _nines(percentile: float) -> float:
    """50 -> 0.3, 90 -> 1, 99 -> 2, 99.9 -> 3."""
    return -math.log10(1 - percentile / 100)
