"""`corpus-client overlap --explain`: the time lines of `timeline`, as a table and a picture."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from corpus_client.tools import plots
from corpus_client.tools.sizes import seconds_name
from corpus_client.tools.timeline import WAYS, Durations, schedule, stall

COMPUTED = "computed from stated durations, not measured"

SETTLING_STEPS, DRAWN_STEPS = 40, 5


def explain(stated: Durations, console: Console, plot_folder: Path | None, *, as_json: bool) -> None:
    """Print, and draw where a folder is given, what each way costs by these durations."""
    if plot_folder is not None:
        for path in plots.save(plot_folder, "overlap", {"explained": drawing(stated)}):
            console.print(f"saved {path}", highlight=False)
    if as_json:
        typer.echo(json.dumps(explained(stated)))
        return
    console.print(f"{_line(stated)}; {COMPUTED}", highlight=False)
    shown = Table("", "a step takes", "", "stall", title=f"a training step, {COMPUTED}")
    for way in WAYS:
        period = way.period(stated)
        rule = "fetch + copy + transfer + compute" if stated.item and way.letter in "abc" else way.rule
        shown.add_row(
            f"({way.letter}) {way.title}", rule, seconds_name(period), f"{stall(period, stated):+.0%}"
        )
    console.print(shown)


def explained(stated: Durations) -> dict[str, Any]:
    """The same for machines."""
    return {
        "note": COMPUTED,
        "durations": dataclasses.asdict(stated),
        "ways": [
            {
                "name": way.name,
                "title": f"({way.letter}) {way.title}",
                "step_seconds": way.period(stated),
                "stall": stall(way.period(stated), stated),
            }
            for way in WAYS
        ],
    }


def drawing(stated: Durations) -> plots.Drawing:
    """Some steps of each way, after the first ones, which are not typical."""
    longest = max(way.period(stated) for way in WAYS)
    lines = {}
    for way in WAYS:
        spans = schedule(way, stated, SETTLING_STEPS + 8 * DRAWN_STEPS)
        start = min(s.start for s in spans if s.step == SETTLING_STEPS and s.kind in ("transfer", "compute"))
        title = f"({way.letter}) {way.title}: a step takes {seconds_name(way.period(stated))}"
        shown = [span for span in spans if span.stop > start]
        first = min(span.step for span in shown if span.kind == "compute")
        lines[title] = [
            dataclasses.replace(
                span, step=span.step - first, start=span.start - start, stop=span.stop - start
            )
            for span in shown
        ]
    note = f"{_line(stated)}\n{COMPUTED}"
    return plots.timelines_of(lines, note, start=0.0, stop=DRAWN_STEPS * longest)


def _line(stated: Durations) -> str:
    parts = [
        f"{name} {seconds_name(getattr(stated, name))}" for name in ("fetch", "copy", "transfer", "compute")
    ]
    return ", ".join(
        [*parts, f"{stated.workers} workers", *(["loss.item() after each step"] if stated.item else [])]
    )
