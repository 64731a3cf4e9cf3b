"""What a loader and the loop beside it did, as the loader's own trace gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from scripts.drawing.page import WIDTH, Chart

LEFT, RIGHT, TOP, LANE = 130, 20, 92, 46
"""Pixels: room for names, to the right, for head and legend; a row with the room beneath it."""

ROWS = {
    "fetch": ("requests", "fetch", "ours"),
    "transfer": ("transfers", "transfer", "third"),
    "compute": ("training loop", "step", "other"),
}
"""By the name that the chart shows: row and name of the trace's spans, and their colour."""


class Span(NamedTuple):
    """A bar, in milliseconds."""

    start: float
    stop: float


@dataclass(frozen=True)
class Timeline(Chart):
    """A trace of some steps."""

    title: str
    source: Path

    @property
    def said(self) -> str:
        """See `Chart.said`."""
        found = self.spans()
        words = ", ".join(
            f"{name} {sum(each.stop - each.start for each in spans) / len(spans):.2g} ms"
            for name, spans in found.items()
        )
        steps = len(found["compute"])
        return f"{steps} steps; means of a step: {words}, waiting for a batch {self._waited:.2g} ms"

    @property
    def about(self) -> str:
        """See `Chart.about`."""
        return f"{self.source.name[:10]}; {self._document['machine']['cpus']} cores, on the CPU"

    def draw(self) -> tuple[Sequence[str], int]:
        """See `Chart.draw`."""
        found = self.spans()
        stop = max(each.stop for each in found["compute"])
        unit = (WIDTH - LEFT - RIGHT) / stop
        parts = list[str]()
        for number, (name, spans) in enumerate(found.items()):
            y = TOP - 20 + number * LANE
            parts.append(f'<text x="{LEFT - 12}" y="{y + 21}" text-anchor="end">{escape(name)}</text>')
            for each in spans:
                start, width = (
                    LEFT + each.start * unit,
                    max(1.5, (min(stop, each.stop) - each.start) * unit - 1),
                )
                place = f'x="{start:.1f}" y="{y}" width="{width:.1f}" height="32"'
                parts.append(f'<rect class="{ROWS[name][2]}" {place} rx="2"/>')
        bottom = TOP - 20 + len(found) * LANE
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        for mark in _marks(stop):
            x = LEFT + mark * unit
            parts.append(
                f'<text class="quiet" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{mark:g} ms</text>'
            )
        return parts, bottom + 32

    def spans(self) -> Mapping[str, Sequence[Span]]:
        """Return the spans of each row that the chart shows."""
        return {name: list(self._named(row, kind)) for name, (row, kind, _) in ROWS.items()}

    @property
    def _document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.source.read_text())
        return found

    @property
    def _waited(self) -> float:
        waits = list(self._named("training loop", "wait"))
        return sum(each.stop - each.start for each in waits) / len(waits)

    def _named(self, row: str, kind: str) -> Iterator[Span]:
        events = self._document["traceEvents"]
        rows = {each["args"]["name"]: each["tid"] for each in events if each["name"] == "thread_name"}
        for each in events:
            if each["ph"] == "X" and (each["tid"], each["name"]) == (rows[row], kind):
                yield Span(each["ts"] / 1e3, (each["ts"] + each["dur"]) / 1e3)


def _marks(stop: float) -> list[float]:
    step = next(each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000) if stop / each <= 8)
    return [float(step * number) for number in range(int(stop / step) + 1)]
