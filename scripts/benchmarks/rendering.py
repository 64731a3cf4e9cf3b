"""Write reports for people and programs: as Markdown, as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from scripts.benchmarks.report import Report, Table, Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Hold what one call of the bench measured.

    Args:
        date: ISO.
        command: as it was typed.
        machine: processor, memory, versions, by name.
        reports: by axis.
        failures: the error that ended an axis, by its name.
    """

    date: str
    command: str
    machine: Mapping[str, str]
    reports: Mapping[str, Report]
    failures: Mapping[str, str]


def to_json(run: Run) -> str:
    """Return the run as a JSON object."""
    axes = {
        name: {
            "data": report.data,
            "targets": [{**dataclasses.asdict(each), "met": each.met} for each in report.targets],
        }
        for name, report in run.reports.items()
    }
    result = {"date": run.date, "command": run.command, "machine": run.machine, "axes": axes}
    return json.dumps({**result, "failures": run.failures}, indent=2)


def to_markdown(run: Run) -> str:
    """Return the run as a Markdown page."""
    lines = [f"# scripts/bench, {run.date}", "", f"    {run.command}", ""]
    lines += [f"- {name}: {value}" for name, value in run.machine.items()]
    for name, report in run.reports.items():
        lines += ["", f"## {name}"]
        for note in report.notes:
            lines += ["", note]
        for table in _tables_of(report):
            lines += ["", f"### {table.title}", "", *_markdown_rows(table)]
    for name, failure in run.failures.items():
        lines += ["", f"## {name}", "", f"It failed: {failure}"]
    return "\n".join(lines) + "\n"


def _tables_of(report: Report) -> list[Table]:
    """Return a report's tables, and its targets as one more."""
    if not report.targets:
        return report.tables
    columns = ["figure", "reached", "wanted", "met"]
    rows = [_target_cells(target) for target in report.targets]
    return [*report.tables, Table(title="targets", columns=columns, rows=rows)]


def _target_cells(target: Target) -> list[str]:
    reached, wanted = (
        f"{value:.3g}{target.unit and ' ' + target.unit}" for value in (target.reached, target.wanted)
    )
    return [target.figure, reached, f"{target.bound} {wanted}", "yes" if target.met else "NO"]


def _markdown_rows(table: Table) -> Iterator[str]:
    for cells in (table.columns, ["---"] * len(table.columns), *table.rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
