"""What a check found, and all of them as the doctor's report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from corpus_client.tools.report import Report

Status = Literal["ok", "warn", "fail"]
STATUSES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
"""From the best to the worst, with the style of a terminal."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: what is the case, what to do about it, and figures for machines."""

    name: str
    status: Status
    found: str
    advice: str = ""
    measured: dict[str, Any] = field(default_factory=dict)


class Failed(Exception):
    """A check failed, and those that build on it cannot be made."""

    def __init__(self, name: str, found: str, advice: str) -> None:
        super().__init__(found)
        self.check = Check(name, "fail", found, advice)


def report_of(checks: Sequence[Check]) -> Report:
    """Return the checks with the worst status, and a table: a row for each check, and one for each advice."""
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        style = STATUSES[check.status]
        table.add_row(f"[{style}]{check.status}[/]", escape(check.name), escape(check.found))
        if check.advice:
            table.add_row("", "", f"[{style}]->[/] {escape(check.advice)}")
    worst = max((check.status for check in checks), key=list(STATUSES).index)
    return Report(data={"status": worst, "checks": [asdict(check) for check in checks]}, shown=[table])
