"""What an axis of the bench is handed, and what it hands back.

An axis is a module with `HELP`, one line, and `measure(options) -> Report`. Everything that is shown,
a table, a target, a plot, is made from the report's `data`, which `--json` prints as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

SMOKE_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How much is measured.

    Args:
        cache: folder for corpora, kept between runs.
        rounds: repetitions of everything that has a median; at least 5 for a figure that is published.
        seconds: of one contender in one round.
        smoke: the smallest form of the axis, for tests: everything runs once and is checked for being
            right; its figures mean nothing.
    """

    cache: Path
    rounds: int = 7
    seconds: float = 1.5
    smoke: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.seconds > 0:
            raise ValueError(
                f"rounds must be at least 1 and seconds above 0, got {self.rounds} and {self.seconds}"
            )

    def in_force(self) -> Options:
        """Return these options, or for a smoke run one short round."""
        return replace(self, rounds=1, seconds=SMOKE_SECONDS) if self.smoke else self


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A figure that is to be reached."""

    figure: str
    reached: float
    bound: Literal["at least", "at most"]
    wanted: float
    unit: str = ""

    @property
    def met(self) -> bool:
        """Whether it was."""
        return self.reached >= self.wanted if self.bound == "at least" else self.reached <= self.wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows for people; cells are formatted already."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A picture of the data.

    Args:
        name: stem of its file, without the date.
        draw: draws on an empty figure.
    """

    name: str
    draw: Callable[[Figure], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """One axis measured once.

    Args:
        data: all that was measured, fit for JSON.
        tables, targets, plots: views of it.
        notes: what a reader of the tables must know, a sentence or two each.
    """

    data: dict[str, Any]
    tables: list[Table]
    targets: list[Target] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
