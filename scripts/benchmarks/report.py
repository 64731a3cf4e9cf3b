"""Define what an axis receives and what it returns.

An axis is a module in `axes/` with `HELP`, one line, and `measure(options) -> Report`. Tables and
targets are views of the report's `data`, which `--json` prints unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

QUICK_SECONDS = 0.02
Bound = Literal["at least", "at most"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Say how much to measure.

    Args:
        cache: folder for corpora; it is kept between runs.
        rounds: repetitions; a published figure needs at least 5.
        seconds: duration of one contender's turn in one round.
        before: commit whose server is measured beside the one of this tree; None: no other server.
        only: names to measure of what an axis offers by name; empty: everything.
        quick: run everything once, on tiny data, and check that the tokens are right. The figures of a
            quick run mean nothing.
    """

    cache: Path
    rounds: int = 7
    seconds: float = 1.5
    before: str | None = None
    only: tuple[str, ...] = ()
    quick: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.seconds > 0:
            raise ValueError(
                f"rounds must be at least 1 and seconds above 0, got {self.rounds} and {self.seconds}"
            )

    def in_force(self) -> Options:
        """Return these options, or one short round of them for a quick run."""
        return replace(self, rounds=1, seconds=QUICK_SECONDS) if self.quick else self


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Hold formatted cells for people."""

    title: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Hold the result of one axis.

    Args:
        data: everything that was measured, fit for JSON.
        notes: what a reader of the tables must know, one or two sentences each.
    """

    data: dict[str, Any]
    tables: list[Table]
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
