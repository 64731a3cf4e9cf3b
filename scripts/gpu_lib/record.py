"""The file of a run: every cell is in it as soon as it was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.benchmarks.report import Report
from scripts.gpu_lib.parts import PARTS, load
from scripts.gpu_lib.run import FAILED, Figures

QUICK = "A quick run: its figures mean nothing."


class Record:
    """What a run measured: `DATE-gpu.json`, and the pages that are made from it.

    The file holds `title`, `command`, `machine`, `notes` (where the figures come from) and `parts`: for each
    part its cells by name, for each cell its figures and `took_seconds`. Cells that failed are not taken over
    from a file that is there.

    Raises:
        SystemExit: the file is of another machine.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self.data: dict[str, Any] = {"notes": [], **head, "parts": {}}
        if path.exists():
            before = json.loads(path.read_text())
            if before["machine"] != head["machine"]:
                raise SystemExit(
                    f"{path} is of another machine; give --again to replace it, or another --results"
                )
            self.data["parts"] = {
                part: {name: figures for name, figures in cells.items() if FAILED not in figures}
                for part, cells in before["parts"].items()
            }

    @classmethod
    def read(cls, path: Path) -> Record:
        """Return the record of an earlier run."""
        return cls(path, json.loads(path.read_text()))

    def cells(self, part: str) -> dict[str, Figures]:
        """Return what was measured of a part."""
        found: dict[str, Figures] = self.data["parts"].get(part, {})
        return {name: figures for name, figures in found.items() if FAILED not in figures}

    def add(self, part: str, cell: str, figures: Figures) -> None:
        """Write a cell; the file is whole at any moment."""
        self.data["parts"].setdefault(part, {})[cell] = figures
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.data, indent=1) + "\n")
        partial.replace(self.path)

    def reports(self) -> dict[str, Report]:
        """Return a report for each part of which something was measured; a quick run has no targets."""
        measured = {name: cells for name in PARTS if (cells := self.cells(name))}
        found = {name: load(name).report(cells) for name, cells in measured.items()}
        is_quick = QUICK in self.data["notes"]
        return {name: replace(report, targets=[]) if is_quick else report for name, report in found.items()}

    def failures(self) -> list[str]:
        """Return a line for each cell that failed."""
        return [
            f"{part} {cell}: {figures[FAILED]}"
            for part, cells in self.data["parts"].items()
            for cell, figures in cells.items()
            if FAILED in figures
        ]

    def missed(self) -> list[str]:
        """Return the targets that were not met."""
        return [
            target.figure for report in self.reports().values() for target in report.targets if not target.met
        ]

    def write_page(self) -> Path:
        """Write tables and targets as Markdown; return the page."""
        page = self.path.with_suffix(".md")
        lines = [f"# {self.data['title']}", "", f"    {self.data['command']}", ""]
        lines += [f"- {name}: {value}" for name, value in self.data["machine"].items()]
        lines += ["", *self.data["notes"]]
        lines += [f"\nFailed: {line}" for line in self.failures()]
        for name, report in self.reports().items():
            lines += ["", f"## {name}", "", f"{PARTS[name].help[0].upper()}{PARTS[name].help[1:]}."]
            lines += report.lines()
        page.write_text("\n".join(lines) + "\n")
        return page
