"""The data of a part as Markdown, and what they should reach. Figures come from the data alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from scripts.benchmarks.report import Target

LARGE_BYTES = 4_000_000  # of a batch, from which on its copies should be as fast as the best
OF_BEST = 0.9
MOST_HELD_US = 50.0
MOST_STALL_PERCENT = {0.005: 1.0, 0.0: 5.0}  # by the length of a step from which on it holds, in seconds
OF_LIMIT = 0.8  # of what bus or server deliver alone: above it a stall is their limit, and no target
GROWTH_MIB = 16  # batches that happen to be on their way; 10,000 leaked ones are gigabytes


def markdown(
    title: str, found: dict[str, Any], targets: Sequence[Target], lines: Iterator[str], *, command: str
) -> str:
    """Return the whole file: machine, targets, tables, plots, and the data for programs.

    found: as `parts.measure` returns it.
    lines: of its data, in Markdown.
    """
    return "\n".join(_lines(title, found, targets, lines, command)) + "\n"


def _lines(
    title: str, found: dict[str, Any], targets: Sequence[Target], lines: Iterator[str], command: str
) -> Iterator[str]:
    yield f"# {title}\n\n    {command}\n"
    yield from (f"- {key}: {value}" for key, value in found["machine"].items())
    yield f"- measured in {found['seconds']:.0f} s"
    if targets:
        rows = [
            [
                each.figure,
                f"{each.reached:.3g} {each.unit}".strip(),
                f"{each.bound} {each.wanted:g} {each.unit}".strip(),
                "reached" if each.met else "MISSED",
            ]
            for each in targets
        ]
        yield from _table("what was to be reached", ["", "reached", "wanted", ""], rows)
    yield from lines
    if found["plots"]:
        yield "\n## plots\n"
        yield from (f"![{path}]({path})" for path in found["plots"])
    yield f"\n## data\n\n```json\n{json.dumps(found['data'])}\n```"


def test_targets(data: dict[str, int]) -> list[Target]:
    """Every test ran and passed."""
    return [_most(f"{name} of {data['tests']} tests", data[name], 0, "")
            for name in ("failures", "errors", "skipped")]  # fmt: skip


def test_lines(data: dict[str, int]) -> Iterator[str]:
    """Return the counts."""
    yield f"\n{', '.join(f'{count} {name}' for name, count in data.items())}"


def transfer_targets(data: dict[str, Any]) -> list[Target]:
    """Compare the loader's copies with the best of the same run, and its calls with a bound."""
    batches, best = data["batches"], best_copy(data["measurements"])
    if best is None:
        return []  # without a GPU
    large = [each for each in batches if each["bytes"] >= LARGE_BYTES]
    found = [
        _most(
            "CPU held by a batch, median",
            1e6 * max(each["held"]["median"] for each in batches),
            MOST_HELD_US,
            "us",
        )
    ]
    if stored := [each["bytes_per_second"] for each in large if each["name"] == "as stored"]:
        found.append(
            Target(
                figure="batches of 4 MB and more as the loader sends them / best page-locked copy",
                reached=min(stored) / best,
                bound="at least",
                wanted=OF_BEST,
            )
        )
    return found


def best_copy(measurements: Sequence[dict[str, Any]]) -> float | None:
    """Return bytes per second of the fastest copy from page-locked memory; None without a GPU."""
    names = ("torch-pinned to device", "registered to device")
    return max((each["bytes_per_second"] for each in measurements if each["name"] in names), default=None)


def transfer_lines(data: dict[str, Any]) -> Iterator[str]:
    """Return a table of copies, and one of batches."""
    for title, found in (("copies", data["measurements"]), ("loader", data["batches"])):
        rows = [
            [each["name"], f"{each['bytes']:,}", f"{each['seconds']['median'] * 1e6:,.1f}",
             f"{each['bytes_per_second'] / 1e9:.2f}", f"{each['held']['median'] * 1e6:,.1f}"]
            for each in found
        ]  # fmt: skip
        yield from _table(title, ["", "bytes", "us", "GB/s", "CPU held us"], rows)
    yield from (f"\nNot measured: {sentence}" for sentence in data["missing"])


def overlap_targets(data: dict[str, Any]) -> list[Target]:
    """Bound the stalls of the cells that bus and server can feed, each by its own length of a step."""
    found = []
    for name, what, limits in (
        ("corpus-loader", "(e) from a server", ("bus_bytes_per_second", "server_bytes_per_second")),
        ("full-slots", "(e') its device half", ("bus_bytes_per_second",)),
    ):
        for least, most in MOST_STALL_PERCENT.items():
            above = min((each for each in MOST_STALL_PERCENT if each > least), default=float("inf"))
            stalls = [
                100 * outcome["stall"]["median"]
                for cell in data["cells"]
                if least <= cell["asked_seconds"] < above and _limit(data, cell, limits) == ""
                for outcome in cell["outcomes"]
                if outcome["name"] == name
            ]
            if stalls:
                said = f"{1e3 * least:g} ms and more" if least else "less"
                found.append(_most(f"stall of {what}, steps of {said}", max(stalls), most, "%"))
    return found


def _needed(cell: dict[str, Any]) -> float:
    """Return bytes per second of a run that never waits: by (f), the length that steps really have."""
    return float(cell["batch_bytes"] / cell["outcomes"][-1]["seconds"]["median"])


def _limit(data: dict[str, Any], cell: dict[str, Any], limits: Sequence[str]) -> str:
    """Return what cannot feed the cell, `bus` or `server`, or ""."""
    for name in limits:
        if data[name] is not None and _needed(cell) > OF_LIMIT * data[name]:
            return name.partition("_")[0]
    return ""


def overlap_lines(data: dict[str, Any]) -> Iterator[str]:
    """Return a row for each cell, with what limits it."""
    for name in ("bus", "server"):
        if data[f"{name}_bytes_per_second"]:
            yield f"\nThe {name} alone in this run: {data[f'{name}_bytes_per_second'] / 1e9:.2f} GB/s."
    names = [outcome["name"] for outcome in data["cells"][0]["outcomes"]]
    rows = []
    for cell in data["cells"]:
        stalls = {outcome["name"]: f"{outcome['stall']['median']:+.1%}" for outcome in cell["outcomes"]}
        limit = _limit(data, cell, ("bus_bytes_per_second", "server_bytes_per_second")) or "compute"
        rows.append(
            [
                f"{1e3 * cell['asked_seconds']:g}",
                f"{1e3 * cell['outcomes'][-1]['seconds']['median']:.2f}",
                f"{cell['batch_bytes'] / 1e6:.2f}",
                f"{_needed(cell) / 1e9:.2f}",
                limit,
                *(stalls[name] for name in names[:-1]),
            ]
        )
    columns = ["step asked ms", "(f) ms", "MB a step", "needs GB/s", "limit", *names[:-1]]
    yield from _table("stall against a batch that is there (f)", columns, rows)
    yield f"\nA target holds where steps need at most {OF_LIMIT:.0%} of what bus and server deliver alone."


def delivered_lines(data: list[dict[str, Any]]) -> Iterator[str]:
    """Return a row for each shape and type."""
    rows = [
        [f"{e['rows']} x {e['seq_len'] + 1}", "as stored" if e["stored"] else "int64",
         f"{e['tokens_per_second'] / 1e6:,.0f}", f"{e['wait']['median'] * 1e3:.3f}",
         f"{e['wait']['p99'] * 1e3:.3f}", f"{e['wait_share']:.0%}"]
        for e in data
    ]  # fmt: skip
    columns = ["batch", "tokens", "M tokens/s", "p50 ms", "p99 ms", "share waiting"]
    yield from _table("delivered by one server process", columns, rows)


def soak_targets(data: dict[str, Any]) -> list[Target]:
    """No wrong token, and memory that does not grow."""
    found = [_most(f"wrong tokens in {data['steps']:,} steps", data["mismatched_tokens"], 0, "")]
    for name in ("device", "host"):
        early, end = data[f"{name}_bytes"]
        found.append(_most(f"growth of {name} memory", (end - early) / 2**20, GROWTH_MIB, "MiB"))
    return found


def soak_lines(data: dict[str, Any]) -> Iterator[str]:
    """Return the memory early and at the end."""
    for name in ("device", "host"):
        early, end = (each / 2**20 for each in data[f"{name}_bytes"])
        yield f"\nMemory of the {name}: {early:,.0f} MiB early, {end:,.0f} MiB at the end."


def server_lines(data: dict[str, Any]) -> Iterator[str]:
    """Return the axis's tables."""
    for each in data["tables"]:
        yield from _table(each["title"], each["columns"], each["rows"])
    yield from (f"\n{note}" for note in data["notes"])


def _most(figure: str, reached: float, wanted: float, unit: str) -> Target:
    return Target(figure=figure, reached=reached, bound="at most", wanted=wanted, unit=unit)


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"\n## {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
