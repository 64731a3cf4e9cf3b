"""Draw the bench's bars: ours stands out, limits are dark, peers are light."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from scripts.benchmarks.measure import COLUMNS, Rounds

Role = Literal["ours", "before", "limit", "peer"]

COLOURS: dict[Role, str] = {"ours": "#d1495b", "before": "#edae49", "limit": "#30475e", "peer": "#a9b4c2"}
LABELS: dict[Role, str] = {
    "ours": "ours",
    "before": "the commit before",
    "limit": "limits: no protocol, or no server",
    "peer": "peers and habits",
}


def role_of(name: str) -> Role:
    """Return how a contender is drawn, by the beginning of its name."""
    if name.startswith("ours"):
        return "ours"
    if name.startswith("before"):
        return "before"
    return "limit" if name.startswith(("bare", "strongest", "gather")) else "peer"


def draw_rounds(shapes: Mapping[str, Rounds], name: str, figure: Figure) -> None:
    """Draw a panel for each shape with a bar for each contender's figure of that name."""
    figure.set_size_inches(12, 1.5 + 0.3 * max(len(rounds.values) for rounds in shapes.values()))
    heading, form = COLUMNS[name]
    panels = figure.subplots(1, len(shapes), squeeze=False)[0]
    roles = set()
    for panel, (shape, rounds) in zip(panels, shapes.items(), strict=True):
        _bars(panel, rounds, name, form)
        panel.set_title(f"batches of {shape} uint16 tokens", fontsize=11)
        panel.set_xlabel(heading)
        roles |= {role_of(each) for each in rounds.values}
    handles = [Patch(color=COLOURS[role], label=label) for role, label in LABELS.items() if role in roles]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def _bars(axes: Axes, rounds: Rounds, figure: str, form: str) -> None:
    """Draw horizontal bars in the order of the table, each with its median and its spread."""
    its = {name: rounds.spread(name, figure) for name in rounds.values}
    places = range(len(its))
    medians = [each["median"] for each in its.values()]
    errors = [
        [each["median"] - each["lowest"] for each in its.values()],
        [each["highest"] - each["median"] for each in its.values()],
    ]
    axes.barh(places, medians, color=[COLOURS[role_of(name)] for name in its], height=0.72)
    axes.errorbar(medians, places, xerr=errors, fmt="none", ecolor="#555555", elinewidth=1, capsize=2)
    end = max(each["highest"] for each in its.values())
    for place, each in zip(places, its.values(), strict=True):
        axes.text(each["highest"] + 0.015 * end, place, format(each["median"], form), va="center", fontsize=9)
    axes.set_yticks(places, list(its), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * end)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
