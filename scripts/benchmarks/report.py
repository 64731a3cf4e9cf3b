"""Define what an axis receives and what it returns, and write reports as Markdown and as JSON.

An axis is a module in `axes/` with `HELP`, one line, and `measure(options) -> Report`. Tables and
targets are views of the report's `data`, which `--json` prints unchanged.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

QUICK_SECONDS = 0.1
PACKAGES = ("numpy", "torch", "uvloop", "httptools", "fastapi", "pyarrow")
Bound = Literal["at least", "at most"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Say how much to measure.

    Args:
        cache: folder for corpora; it is kept between runs.
        rounds: repetitions; a published figure needs at least 5.
        seconds: duration of one contender's turn in one round.
        before: commit whose server is measured beside the one of this tree; None: no other server.
        tls: serve by https.
        only: names to measure of what an axis offers by name; empty: everything.
        quick: run everything once and shortly, whatever `rounds` and `seconds` say, on tiny data, and check
            that the tokens are right. The figures of a quick run mean nothing.
    """

    cache: Path
    rounds: int = 7
    seconds: float = 1.5
    before: str | None = None
    tls: bool = False
    only: tuple[str, ...] = ()
    quick: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.seconds > 0:
            raise ValueError(
                f"rounds must be at least 1 and seconds above 0, got {self.rounds} and {self.seconds}"
            )
        if self.quick:
            object.__setattr__(self, "rounds", 1)
            object.__setattr__(self, "seconds", QUICK_SECONDS)

    def chosen(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return those of an axis's names that are to be measured: all, or what `only` asks for."""
        if unknown := set(self.only) - set(names):
            raise SystemExit(f"--only must be of {', '.join(names)}, got {', '.join(sorted(unknown))}")
        return tuple(name for name in names if name in (self.only or names))


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Compare a figure with the value it should reach."""

    figure: str
    reached: float
    bound: Bound
    wanted: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether the figure reaches the wanted value."""
        return self.reached >= self.wanted if self.bound == "at least" else self.reached <= self.wanted

    def cells(self) -> list[str]:
        """Return the figure, what it reached, what is wanted, and whether that is met."""
        reached, wanted = (
            f"{value:.3g}{self.unit and ' ' + self.unit}" for value in (self.reached, self.wanted)
        )
        return [self.figure, reached, f"{self.bound} {wanted}", "yes" if self.met else "NO"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Hold formatted cells for people."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def lines(self) -> Iterator[str]:
        """Yield the table as Markdown."""
        for cells in (self.columns, ["---"] * len(self.columns), *self.rows):
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Hold the result of one axis.

    Args:
        data: everything that was measured, fit for JSON.
        notes: what a reader of the tables must know, one or two sentences each.
    """

    data: Any
    tables: list[Table]
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        """Yield notes, tables and targets as Markdown."""
        columns = ["figure", "reached", "wanted", "met"]
        targets = Table(title="targets", columns=columns, rows=[each.cells() for each in self.targets])
        for note in self.notes:
            yield from ("", note)
        for table in [*self.tables, *[targets][: len(self.targets)]]:
            yield from ("", f"### {table.title}", "", *table.lines())


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Hold what one call of a command measured.

    Args:
        title: of the page.
        command: as it was typed.
        machine: processor, memory, versions, by name.
        reports: by axis.
        failures: the error that ended an axis, by its name.
    """

    title: str
    command: str
    machine: Mapping[str, Any]
    reports: Mapping[str, Report]
    failures: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the run as a JSON object."""
        axes = {
            name: {
                "data": report.data,
                "targets": [{**asdict(each), "met": each.met} for each in report.targets],
            }
            for name, report in self.reports.items()
        }
        head = {"title": self.title, "command": self.command, "machine": self.machine}
        return json.dumps({**head, "axes": axes, "failures": self.failures}, indent=2)

    def to_markdown(self) -> str:
        """Return the run as a Markdown page."""
        lines = [f"# {self.title}", "", f"    {self.command}", ""]
        lines += [f"- {name}: {value}" for name, value in self.machine.items()]
        for name, report in self.reports.items():
            lines += ["", f"## {name}", *report.lines()]
        for name, failure in self.failures.items():
            lines += ["", f"## {name}", "", f"It failed: {failure}"]
        return "\n".join(lines) + "\n"


def describe_machine() -> dict[str, str]:
    """Return processor, memory, kernel and versions, by name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": f"{os.cpu_count()} x {next(names, platform.processor())}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }
