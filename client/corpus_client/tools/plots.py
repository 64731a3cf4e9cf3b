"""PNG plots of what was measured or computed. matplotlib is loaded when the first one is drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from corpus_client import errors
from corpus_client.tools.sizes import size_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from corpus_client.tools.measurement import Measurement
    from corpus_client.tools.timeline import Span
    from corpus_client.tools.transfer import TransferReport

Draw = Callable[["Figure"], None]
Drawing = tuple[Draw, tuple[float, float]]
"""What draws on an empty figure, and the figure's width and height in inches."""

COLOURS = {
    "fetch": "#8c8c8c",
    "copy": "#e0a030",
    "transfer": "#2f6fb5",
    "compute": "#3d9a5b",
    "wait": "#e8c4c0",
}


def check() -> None:
    """Fail now rather than after the measurement.

    Raises:
        InvalidArgument: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise errors.InvalidArgument(
            "--plots needs matplotlib, which is not installed; pip install 'corpus-client[plots]'"
        )


def save(folder: Path, stem: str, drawings: Mapping[str, Drawing]) -> list[Path]:
    """Write `folder/stem-name.png` for each drawing of a size in inches; return the paths."""
    check()
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (draw, inches) in drawings.items():
        figure = Figure(figsize=inches, layout="constrained")
        draw(figure)
        paths.append(folder / f"{stem}-{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def of_transfer(report: TransferReport) -> dict[str, Drawing]:
    """The drawings of a report, those that it has measurements for."""
    drawings: dict[str, Drawing] = {
        "bandwidth": (lambda figure: _bandwidth(figure, report), (11, 5)),
        "time": (lambda figure: _time(figure, report), (11, 5)),
        "pieces": (lambda figure: _pieces(figure, report), (9, 4.5)),
        "strided": (lambda figure: _bars(figure, report, "strided"), (9, 4.5)),
        "widening": (lambda figure: _bars(figure, report, "widening"), (9, 2.6)),
    }
    for section in ("calls", "waits", "concurrent"):
        if report.of(section):
            drawings[section] = (partial(_bars, report=report, section=section), (9, 4.5))
    return drawings


def _bandwidth(figure: Figure, report: TransferReport) -> None:
    axes = figure.add_subplot()
    for name, line in _lines(report.of("copies")).items():
        axes.plot(
            [each.bytes for each in line],
            [each.bytes_per_second / 1e9 for each in line],
            marker="o",
            markersize=3,
            linestyle=_style(name),
            label=name,
        )
    if report.bus_bytes_per_second is not None:
        axes.axhline(
            report.bus_bytes_per_second / 1e9,
            color="black",
            linestyle="--",
            label=f"{report.machine['bus']}, in theory",
        )
    axes.set_xscale("log", base=2)
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    _finish(figure, axes, report, "Bandwidth of one copy, by size")


def _time(figure: Figure, report: TransferReport) -> None:
    axes = figure.add_subplot()
    for name, line in _lines(report.of("copies")).items():
        sizes = [each.bytes for each in line]
        axes.plot(
            sizes,
            [each.seconds.median * 1e3 for each in line],
            marker="o",
            markersize=3,
            label=name,
            ls=_style(name),
        )
        low, high = ([getattr(each.seconds, end) * 1e3 for each in line] for end in ("p10", "p90"))
        axes.fill_between(sizes, low, high, alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel("ms; the shade is 10 to 90 %")
    _finish(figure, axes, report, "Time of one copy, by size")


def _pieces(figure: Figure, report: TransferReport) -> None:
    axes = figure.add_subplot()
    for name, line in _lines(report.of("pieces")).items():
        axes.plot(
            [each.bytes / each.parts for each in line],
            [each.bytes_per_second / 1e9 for each in line],
            marker="o",
            markersize=3,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylabel("GB/s")
    axes.set_ylim(bottom=0)
    total = report.of("pieces")[0].bytes
    _finish(figure, axes, report, f"{size_name(total)} in pieces of this size")


def _bars(figure: Figure, report: TransferReport, section: str) -> None:
    """Time until done, and in front of it how long the call held the CPU, where that is less."""
    from corpus_client.tools.measurement import SECTIONS

    axes = figure.add_subplot()
    measurements = report.of(section)[::-1]
    names = [each.name for each in measurements]
    axes.barh(
        names, [each.seconds.median * 1e3 for each in measurements], color="#9db8d6", label="until done"
    )
    if any(each.held != each.seconds for each in measurements):
        held = [each.held.median * 1e3 for each in measurements]
        axes.barh(names, held, height=0.35, color="#1f3f66", label="CPU held by the call")
    axes.set_xlabel("ms")
    axes.set_title(f"{SECTIONS[section].capitalize()}\n{_where(report)}", fontsize=10)
    axes.legend(fontsize=8, loc="best")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _style(name: str) -> str:
    """Copies that do not leave the host are dotted."""
    return ":" if name.startswith("host to host,") or name == "host to host" else "-"


def _lines(measurements: list[Measurement]) -> dict[str, list[Measurement]]:
    """By name, in the order of size and then of piece."""
    lines: dict[str, list[Measurement]] = {}
    for each in measurements:
        lines.setdefault(each.name, []).append(each)
    for line in lines.values():
        line.sort(key=lambda each: each.bytes / each.parts)
    return lines


def _finish(figure: Figure, axes: Axes, report: TransferReport, title: str) -> None:
    from matplotlib.ticker import FuncFormatter

    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: size_name(size)))
    axes.set_title(f"{title}\n{_where(report)}", fontsize=10)
    figure.legend(fontsize=8, loc="outside right upper")
    axes.grid(alpha=0.3)


def _where(report: TransferReport) -> str:
    machine = report.machine
    return ", ".join(str(part) for part in (machine["cpu"], machine.get("gpu")) if part)


def timelines_of(lines: Mapping[str, list[Span]], note: str, *, start: float, stop: float) -> Drawing:
    """A time line for each title, one under the other, from `start` to `stop` seconds."""
    rows = sum(len({span.lane for span in spans}) + 1 for spans in lines.values())
    draw = partial(_timelines, lines=lines, note=note, start=start, stop=stop)
    return draw, (10, 1.2 + 0.27 * rows)


def _timelines(figure: Figure, lines: Mapping[str, list[Span]], note: str, start: float, stop: float) -> None:
    """Lanes are rows; each span carries the number of its step where there is room for it."""
    lanes_of = {title: list(dict.fromkeys(_lanes(spans))) for title, spans in lines.items()}
    heights = [len(lanes) + 1 for lanes in lanes_of.values()]
    all_axes = figure.subplots(len(lines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, spans) in zip(all_axes, lines.items(), strict=True):
        lanes = lanes_of[title]
        for span in spans:
            _draw_span(axes, span, len(lanes) - 1 - lanes.index(span.lane), start, stop)
        axes.set_yticks(range(len(lanes)), lanes[::-1], fontsize=8)
        axes.set_ylim(-0.6, len(lanes) - 0.4)
        axes.set_title(title, fontsize=9, loc="left", pad=3)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    all_axes[-1].set_xlim(0, (stop - start) * 1e3)
    all_axes[-1].set_xlabel("ms")
    _legend(figure, {span.kind for spans in lines.values() for span in spans}, note)


def _lanes(spans: list[Span]) -> list[str]:
    """From the host down to the GPU."""
    order = ("worker", "fetcher", "pinning", "training loop", "bus", "GPU")
    ranks = {name: rank for rank, name in enumerate(order)}
    names = {span.lane for span in spans}
    return sorted(names, key=lambda lane: (ranks.get(lane.rstrip(" 0123456789"), len(order)), lane))


def _draw_span(axes: Axes, span: Span, row: int, start: float, stop: float) -> None:
    left, right = max(span.start, start), min(span.stop, stop)
    if right <= left:
        return
    waits = span.kind == "wait"
    axes.barh(
        row,
        (right - left) * 1e3,
        left=(left - start) * 1e3,
        height=0.5 if waits else 0.8,
        color=COLOURS[span.kind],
        edgecolor="white",
        linewidth=0.5,
        hatch="////" if waits else None,
    )
    if not waits and span.step >= 0 and right - left > (stop - start) / 60:
        axes.text(
            (left + right - 2 * start) * 500,
            row,
            str(span.step),
            ha="center",
            va="center",
            fontsize=7,
            color="white",
        )


def _legend(figure: Figure, kinds: set[str], note: str) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colour, label=kind, hatch="////" if kind == "wait" else None, edgecolor="white")
        for kind, colour in COLOURS.items()
        if kind in kinds
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
    figure.suptitle(note, fontsize=10)
