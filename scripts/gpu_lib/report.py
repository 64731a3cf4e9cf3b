"""The results of a run as Markdown; figures come from the parts alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from scripts.benchmarks.report import Target

MEGABYTE = 10**6
GROWTH_MIB = 16
"""For batches that happen to be on their way when memory is looked at; 10,000 leaked ones are gigabytes."""


def targets(results: dict[str, Any]) -> list[Target]:
    """What is to be reached, by the parts that ran."""
    found = []
    if "transfer" in results:
        found += _transfer_targets(results["transfer"]["measurements"])
    if "overlap" in results:
        bus = best_pinned(results["transfer"]["measurements"]) if "transfer" in results else None
        found += _stall_targets([each for each in results["overlap"] if possible(each, bus)])
    if "soak" in results:
        soak = results["soak"]
        grown = {name: soak[f"{name}_bytes"][1] - soak[f"{name}_bytes"][0] for name in ("device", "host")}
        found += [
            _most(f"wrong tokens in {soak['steps']:,} steps", soak["mismatched_tokens"], 0, ""),
            _most("growth of device memory", grown["device"] / 2**20, GROWTH_MIB, "MiB"),
            _most("growth of host memory", grown["host"] / 2**20, GROWTH_MIB, "MiB"),
        ]
    return found


def passed(results: dict[str, Any]) -> bool:
    """Whether no part failed, no test did or was skipped, and every figure was reached."""
    tests = results.get("tests", {})
    broken = any(tests.get(name) for name in ("failures", "errors", "skipped"))
    return not results["failed"] and not broken and all(target.met for target in targets(results))


def best_pinned(measurements: Sequence[dict[str, Any]]) -> float:
    """Bytes per second of the fastest copy from page-locked memory."""
    return max(
        float(each["bytes_per_second"]) for each in measurements if each["name"] == "page-locked to device"
    )


def needed(report: dict[str, Any]) -> float:
    """Bytes per second over the bus for a run of `overlap` that never waits."""
    return float(report["batch_bytes"] / report["asked_seconds"])


def possible(report: dict[str, Any], bus: float | None) -> bool:
    """Whether the bus, at its measured best, carries as much as these steps eat."""
    return bus is None or needed(report) <= bus


def _transfer_targets(measurements: Sequence[dict[str, Any]]) -> list[Target]:
    batches = [
        each for each in measurements
        if each["section"] == "loader" and each["bytes"] / each["parts"] >= MEGABYTE
    ]  # fmt: skip
    stored = [each for each in batches if each["name"] == "as stored"]
    best = best_pinned(measurements)
    return [
        Target(
            figure="our transfers of 1 MB and more / best page-locked bandwidth",
            reached=min(each["bytes_per_second"] for each in stored) / best,
            bound="at least",
            wanted=0.9,
        ),
        _most(
            "CPU held by our transfer of a batch", 1e6 * max(e["held"]["median"] for e in batches), 50, "us"
        ),
    ]


def _stall_targets(reports: Sequence[dict[str, Any]]) -> list[Target]:
    found = []
    for name, what in (("corpus-loader", "(e) from a server"), ("full-slots", "(e') its device half")):
        for wanted, lengths, said in ((0.01, (0.005, 60.0), "5 ms and more"), (0.05, (0.0, 0.005), "1 ms")):
            stalls = [
                outcome["stall"]
                for report in reports
                if lengths[0] <= report["asked_seconds"] < lengths[1]
                for outcome in report["outcomes"]
                if outcome["name"] == name
            ]
            if stalls:
                found.append(_most(f"stall of {what}, steps of {said}", 100 * max(stalls), 100 * wanted, "%"))
    return found


def _most(figure: str, reached: float, wanted: float, unit: str) -> Target:
    return Target(figure=figure, reached=reached, bound="at most", wanted=wanted, unit=unit)


def markdown(results: dict[str, Any], *, date: str, command: str) -> str:
    """The whole report.

    results: `machine`, and what each part handed back, or its last words in `failed`, by the part's name;
        `plots`, paths from the report's folder.
    """
    return "\n".join(_lines(results, date, command)) + "\n"


def _lines(results: dict[str, Any], date: str, command: str) -> Iterator[str]:
    yield f"# scripts/gpu, {date}\n\n    {command}\n"
    yield from (f"- {name}: {value}" for name, value in results["machine"].items())
    yield from _table("what was to be reached", ["", "reached", "wanted", ""], _target_rows(results))
    if "tests" in results:
        counts = ", ".join(f"{count} {name}" for name, count in results["tests"].items())
        yield f"\n## tests/client/cuda, with CORPUS_REQUIRE_CUDA=1\n\n{counts}"
    if "overlap" in results:
        yield from _overlap_table(results)
    if "transfer" in results:
        yield from _transfer_tables(results["transfer"])
    if "delivered" in results:
        columns = ["batch", "tokens", "M tokens/s", "p50 ms", "p99 ms", "share waiting"]
        rows = [
            [f"{e['rows']} x {e['seq_len'] + 1}", "as stored" if e["stored"] else "int64",
             f"{e['tokens_per_second'] / 1e6:,.0f}", f"{e['wait_p50_seconds'] * 1e3:.3f}",
             f"{e['wait_p99_seconds'] * 1e3:.3f}", f"{e['wait_share']:.0%}"]
            for e in results["delivered"]
        ]  # fmt: skip
        yield from _table("delivered onto the GPU by one server process", columns, rows)
    for part, words in results.get("failed", {}).items():
        yield f"\n## {part}: FAILED\n\n    {words}"
    if results.get("plots"):
        yield "\n## plots\n"
        yield from (f"![{path}]({path})" for path in results["plots"])


def _target_rows(results: dict[str, Any]) -> list[list[str]]:
    return [
        [
            each.figure,
            f"{each.reached:.3g} {each.unit}".strip(),
            f"{each.bound} {each.wanted:g} {each.unit}".strip(),
            "reached" if each.met else "MISSED",
        ]
        for each in targets(results)
    ]


def _overlap_table(results: dict[str, Any]) -> Iterator[str]:
    bus = best_pinned(results["transfer"]["measurements"]) if "transfer" in results else None
    names = [outcome["name"] for outcome in results["overlap"][0]["outcomes"]]
    rows = []
    for report in results["overlap"]:
        stalls = {outcome["name"]: outcome for outcome in report["outcomes"]}
        rows.append(
            [
                f"{1e3 * report['asked_seconds']:g}",
                f"{1e3 * stalls['constant']['median_seconds']:.2f}",
                f"{report['batch_bytes'] / 1e6:.0f}",
                f"{needed(report) / 1e9:.1f}" + ("" if possible(report, bus) else ", beyond the bus"),
                *(f"{stalls[name]['stall']:+.1%}" for name in names[:-1]),
            ]
        )
    columns = ["step asked ms", "(f) ms", "MB a step", "needs GB/s", *names[:-1]]
    yield from _table("stall against a batch that is there (f)", columns, rows)
    yield "\nSteps beyond the bus's best measured bandwidth are shown; no target speaks of them."


def _transfer_tables(transfer: dict[str, Any]) -> Iterator[str]:
    bus = transfer["bus_bytes_per_second"]
    if bus:
        yield f"\nThe bus in theory: {bus / 1e9:.1f} GB/s one way."
    sections: dict[str, list[list[str]]] = {}
    for each in transfer["measurements"]:
        waits = {None: "", True: "waits", False: "does not wait"}[each["waited"]]
        row = [each["name"], f"{each['bytes']:,}", f"{each['parts']:,}"]
        row += [f"{each['seconds']['median'] * 1e6:,.1f}", f"{each['bytes_per_second'] / 1e9:.2f}"]
        row += [f"{each['held']['median'] * 1e6:,.1f}", waits]
        sections.setdefault(each["section"], []).append(row)
    columns = ["", "bytes", "parts", "us", "GB/s", "CPU held us", ""]
    for section, rows in sections.items():
        yield from _table(f"transfer: {section}", columns, rows)
    if transfer["read_too_early"] is not None:
        seen = transfer["read_too_early"]
        yield f"\nA non-blocking copy to the host, read at once: right is {seen['right_at_once']}; "
        yield f"after waiting: right is {seen['right_after_waiting']}."
    yield from (f"\nNot measured: {sentence}" for sentence in transfer["missing"])


def _table(title: str, columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"\n## {title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
