"""What a part of `scripts/gpu` is given and what it gives: cells, each of which is measured by itself.

A part is a line of `PARTS` in `scripts/gpu_lib/parts/` and a module there with

    cells   Run -> the cells, the most valuable first
    report  what was measured, by the cell's name -> tables and targets
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from scripts.benchmarks.report import Report, Target

if TYPE_CHECKING:
    import torch

EXACT_STEPS = 300
"""Of each of the nine exact runs among the tests."""

LEFT_OUT, FAILED = "left_out", "failed"
"""Keys of a cell that has no figures: why it was not measured, or the error with which it ended."""

SIMULATED = "simulated"
"""The device of a rehearsal."""

Figures = dict[str, Any]
"""What a cell measured, fit for JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What a part is given.

    Args:
        device: of torch.
        url, corpus: the server of the run and the name of its corpus.
        path: the corpus, a raw uint16 file.
        quick: tiny and on any machine.
        folder: for files of the cells, such as traces.
    """

    device: torch.device
    url: str
    corpus: str
    path: Path
    quick: bool
    folder: Path

    @property
    def is_cuda(self) -> bool:
        """Whether there are graphs, compiled kernels and a profiler that sees the device."""
        return self.device.type == "cuda"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Something to measure.

    Args:
        name: of the cell within its part.
        seconds: that it takes on a card at most, as far as is known; with less time left it is left out.
        measure: returns its figures.
    """

    name: str
    seconds: float
    measure: Callable[[], Figures]


class Part(Protocol):
    """The names of a part's module."""

    def cells(self, run: Run) -> Iterator[Cell]:
        """Yield what is measured."""

    def report(self, cells: Mapping[str, Figures]) -> Report:
        """Show what was measured, which may be some of the cells."""


def at_most(figure: str, reached: float, wanted: float, unit: str = "") -> Target:
    """Return a target that a figure should not exceed."""
    return Target(figure=figure, reached=reached, bound="at most", wanted=wanted, unit=unit)


def at_least(figure: str, reached: float, wanted: float) -> Target:
    """Return a target that a figure should reach."""
    return Target(figure=figure, reached=reached, bound="at least", wanted=wanted)
