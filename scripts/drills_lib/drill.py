"""What a drill is, what it finds, and which there are."""

from __future__ import annotations

import importlib
import json
import logging
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from scripts.drills_lib import drills

QUICK_SECONDS = 20
"""Drills that take less are part of `scripts/drills --quick`."""

FOUND = "found.json"


class Skipped(Exception):
    """The drill needs something that this machine does not have; its message says what."""


class Ended(Exception):
    """The drill was ended, because it took too long; its message says so."""


@dataclass
class Found:
    """What a drill measured, and what must not have happened."""

    figures: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def figure(self, name: str, value: float, *, most: float = math.inf, least: float = -math.inf) -> None:
        """Note a figure, whose unit stands at the end of its name; beyond a limit it is a failure."""
        shown = f"{name}: {value:,.2f}" if isinstance(value, float) else f"{name}: {value:,}"
        self.figures.append(shown)
        if not least <= value <= most:
            limits = [f"at least {least:g}"] * (least > -math.inf) + [f"at most {most:g}"] * (most < math.inf)
            self.failures.append(f"{shown}; it must be {' and '.join(limits)}")

    def expect(self, holds: object, otherwise: str) -> None:
        """Note a failure unless something holds."""
        if not holds:
            self.failures.append(otherwise)


@dataclass(frozen=True, kw_only=True)
class Drill:
    """One file of `drills/`.

    Args:
        name: of the file.
        what: it does: the first line of the file.
        rows: of docs/reliability.md that it shows.
        count: how often it does it.
        seconds: that it takes at most on two quiet cores; three times as long and it is ended.
        oracle: what says which responses are right.
        rule: when it passes.
        run: does it, in an empty folder.
    """

    name: str
    what: str
    rows: tuple[int, ...]
    count: str
    seconds: int
    oracle: str
    rule: str
    run: Callable[[Path, Found], None]

    @property
    def is_quick(self) -> bool:
        """Whether it is one of `--quick`."""
        return self.seconds < QUICK_SECONDS

    def perform(self, folder: Path) -> None:
        """Run it in this process; leave what it found, or why it was left out, in the folder."""
        found, left_out = Found(), ""
        (folder / "files").mkdir()
        try:
            self.run(folder / "files", found)
        except Skipped as error:
            left_out = str(error)
        except Ended as error:  # what it has found so far is told
            found.failures.append(str(error))
        except Exception as error:
            logging.getLogger("drills").exception("the drill broke")
            found.failures.append(f"{type(error).__name__}: {error}"[:2000])
        (folder / FOUND).write_text(json.dumps([found.figures, found.failures, left_out]))


def outcome(folder: Path) -> tuple[str, str, Found]:
    """Return how a drill that was performed in a folder ended, why it was left out, and what it found.

    Raises:
        FileNotFoundError: its process ended before.
    """
    figures, failures, left_out = json.loads((folder / FOUND).read_text())
    word = "left out" if left_out else "failed" if failures else "passed"
    return word, left_out, Found(figures, failures)


@cache
def all_drills() -> dict[str, Drill]:
    """Return the drills by name; a file that lacks something is an error."""
    found = {}
    for each in pkgutil.iter_modules(drills.__path__):
        module = importlib.import_module(f"{drills.__name__}.{each.name}")
        found[each.name] = Drill(
            name=each.name,
            what=(module.__doc__ or "").partition("\n")[0],
            rows=module.ROWS,
            count=module.COUNT,
            seconds=module.SECONDS,
            oracle=module.ORACLE,
            rule=module.RULE,
            run=module.run,
        )
    return found
