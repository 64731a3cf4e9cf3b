"""What drills found, each kept in a file of its own as soon as it has ended, and the table of all of them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.benchmarks.report import describe_machine
from scripts.drills_lib.drill import Drill, Found

MOST_SHOWN = 160
"""Characters of a failure in a cell of the table."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a drill ended.

    Args:
        word: `passed`, `failed` or `left out`.
        why: it was left out.
        seconds: that it took.
        day: on which it ran.
    """

    word: str
    seconds: float
    found: Found
    why: str = ""
    day: str = ""

    @property
    def shown(self) -> str:
        """Return the result in a few words."""
        return f"{self.word}: {self.why}" if self.why else self.word


class Kept:
    """The results of the last run of each drill, by a server of this tree or of another commit.

    Args:
        folder: for a file for each; the program may be ended at any time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def forget(self, drills: Iterable[Drill]) -> None:
        """Remove results of an earlier run."""
        for drill in drills:
            self._path(drill).unlink(missing_ok=True)

    def keep(self, drill: Drill, result: Result) -> None:
        """Write the result of a drill."""
        self._folder.mkdir(parents=True, exist_ok=True)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        self._path(drill).write_text(json.dumps(asdict(replace(result, day=today))))

    def of(self, drill: Drill) -> Result | None:
        """Return the result of a drill, None if it has not run."""
        try:
            kept = json.loads(self._path(drill).read_text())
        except FileNotFoundError:
            return None
        return Result(**{**kept, "found": Found(**kept["found"])})

    def _path(self, drill: Drill) -> Path:
        return self._folder / f"{drill.name}.json"


def report(drills: Sequence[Drill], now: Kept, command: str, before: tuple[str, Kept] | None = None) -> str:
    """Return the table of drills as a page.

    Args:
        before: another commit, and the results of its server.
    """
    results = {drill.name: now.of(drill) for drill in drills}
    days = sorted({each.day for each in results.values() if each})
    lines = [f"# Drills, {days[-1] if days else 'none has run'}", ""]
    lines += [f"- {name}: {value}" for name, value in describe_machine().items()]
    if len(days) > 1:
        lines.append(f"- days: {', '.join(days)}")
    lines += ["", f"    {command}", ""]
    heads = ["drill", "row", "how often", "result", "s", "figures"]
    if before:
        heads += [f"server of {before[0]}", "its figures"]
        lines += ["A server of the earlier commit met the drills of this tree, with this tree's client.", ""]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    failures = []
    for drill in drills:
        cells = [drill.name, ", ".join(map(str, drill.rows)), drill.count]
        if (result := results[drill.name]) is None:
            cells += ["did not run", "", ""]
        else:
            cells += [result.shown, f"{result.seconds:.0f}", "; ".join(result.found.figures)]
            failures += [f"{drill.name}: {each}" for each in result.found.failures]
        if before:
            cells += _cells_before(before[1].of(drill))
        lines.append(f"| {' | '.join(each.replace('|', '/') for each in cells)} |")
    if failures:
        lines += ["", "Found:", "", "```", *failures, "```"]
    lines += ["", "What each does, and when it passes:", ""]
    for drill in drills:
        lines.append(f"- **{drill.name}**: {drill.what} Right is {drill.oracle}. Passes: {drill.rule}.")
    return "\n".join([*lines, ""])


def _cells_before(result: Result | None) -> list[str]:
    if result is None:
        return ["did not run", ""]
    found = result.found
    first = " ".join(found.failures[0].split())[:MOST_SHOWN] if found.failures else ""
    more = f" (and {len(found.failures) - 1} more)" if len(found.failures) > 1 else ""
    return [f"{result.shown}: {first}{more}" if first else result.shown, "; ".join(found.figures)]
