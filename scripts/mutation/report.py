"""Write what a run of mutation tests showed, as Markdown."""

from __future__ import annotations

import os
import platform
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from scripts.mutation.trying import PACKAGES, TEST_SECONDS, Result, package_of

EQUIVALENT = Path(__file__).with_name("equivalent.toml")


class Equivalents:
    """The known changes that change no behaviour, from `equivalent.toml`."""

    def __init__(self) -> None:
        entries = tomllib.loads(EQUIVALENT.read_text())["equivalent"]
        self._reasons = {(each["path"], each["was"], each["is"]): each["reason"] for each in entries}

    def reason(self, path: str, was: str, becomes: str) -> str | None:
        """Return why a change changes no behaviour; None: it is not known to be such a one."""
        return self._reasons.get((path, was, becomes))


@dataclass(frozen=True, kw_only=True, slots=True)
class Counts:
    """What became of the mutants of a package."""

    killed: int
    timeouts: int
    survived: int
    equivalent: int
    unclear: int

    @property
    def share(self) -> float:
        """The share that the tests noticed of those that change behaviour."""
        changing = self.killed + self.timeouts + self.survived
        return (self.killed + self.timeouts) / changing if changing else 1.0


def count(root: Path, results: Sequence[Result], known: Equivalents) -> Counts:
    """Count results; an equivalent mutant that a test noticed would be a wrong entry of the list."""
    outcomes = [each.outcome for each in results]
    equivalent = sum(_reason(root, each, known) is not None for each in results if each.outcome == "survived")
    return Counts(
        killed=outcomes.count("killed"),
        timeouts=outcomes.count("timeout"),
        survived=outcomes.count("survived") - equivalent,
        equivalent=equivalent,
        unclear=outcomes.count("unclear"),
    )


def markdown(root: Path, results: Sequence[Result], command: str, num_mutants: int) -> str:
    """Return the report."""
    known = Equivalents()
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()
    lines = [
        "# Mutation tests",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores: `{command}`, a sample of {len(results)} of {num_mutants} one-line changes.",
        "",
        f"*Killed*: a test failed. *Timeout*: a test did not end within {TEST_SECONDS} s, which without the "
        f"change takes less than {TEST_SECONDS // 3} s. *Equivalent*: it changes no behaviour, for the "
        "reason in [equivalent.toml](../mutation/equivalent.toml). *Unclear*: the test that failed fails "
        "without the change too. The share counts the other mutants.",
        "",
        "| package | mutants | killed | timeout | survived | equivalent | unclear | noticed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for package in (*PACKAGES, "all"):
        mine = [each for each in results if package in (package_of(each.mutant.path), "all")]
        if mine:
            found = count(root, mine, known)
            lines.append(
                f"| {package} | {len(mine)} | {found.killed} | {found.timeouts} | {found.survived} | "
                f"{found.equivalent} | {found.unclear} | {found.share:.1%} |"
            )
    noticed = [each for each in results if each.outcome in ("killed", "timeout", "unclear")]
    if noticed:
        lines += ["", "## Noticed", "", "| line | change | outcome | by |", "|---|---|---|---|"]
    lines += [
        f"| {each.mutant.path}:{each.mutant.line} | {each.mutant.operator} | {each.outcome} | `{each.test}` |"
        for each in noticed
    ]
    survivors = [
        each for each in results if each.outcome == "survived" and _reason(root, each, known) is None
    ]
    if survivors:
        lines += ["", "## Survivors", ""]
    for each in survivors:
        lines += describe(root, each)
    return "\n".join(lines) + "\n"


def describe(root: Path, result: Result) -> list[str]:
    """Return a mutant's place and its change."""
    was, becomes = result.mutant.change(root)
    diff = [*(f"-{line}" for line in was.split("\n")), *(f"+{line}" for line in becomes.split("\n"))]
    return [f"{result.mutant.path}:{result.mutant.line}", "", "```diff", *diff, "```", ""]


def _reason(root: Path, result: Result, known: Equivalents) -> str | None:
    return known.reason(result.mutant.path, *result.mutant.change(root))
