"""What a check found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

Status = Literal["ok", "warn", "fail"]
STATUSES: tuple[Status, ...] = ("ok", "warn", "fail")
_STYLES: dict[Status, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was looked at.

    Args:
        found: what is the case, in one sentence.
        advice: what to do about it, in one sentence; "" where nothing is to be done.
        measured: figures for machines, with their unit in the name.
    """

    name: str
    status: Status
    found: str
    advice: str = ""
    measured: dict[str, Any] = field(default_factory=dict)


def worst(checks: Sequence[Check]) -> Status:
    """The status of all checks together."""
    return max((check.status for check in checks), key=STATUSES.index, default="ok")


def report(checks: Sequence[Check]) -> dict[str, Any]:
    """The checks for machines."""
    return {"status": worst(checks), "checks": [asdict(check) for check in checks]}


def table(checks: Sequence[Check]) -> Table:
    """The checks for a person."""
    shown = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for check in checks:
        style = _STYLES[check.status]
        shown.add_row(f"[{style}]{check.status}[/]", escape(check.name), escape(check.found))
        if check.advice:
            shown.add_row("", "", f"[{style}]->[/] {escape(check.advice)}")
    return shown
