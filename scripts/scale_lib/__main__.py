"""Simulate large jobs on replicas of corpus-server, and check that here. About three minutes."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from scripts.benchmarks import machine, rendering
from scripts.benchmarks.__main__ import CACHE, FILE_COLUMNS, RESULTS, ROOT
from scripts.benchmarks.report import Report
from scripts.scale_lib import check, scenarios

NAMES = {"check": "scale-check", "simulation": "scale-simulation"}
"""Of the files in scripts/results. A simulation without the check leaves the last one's file as it is."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/scale_simulation", description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2, help="of the check; 0: simulate only")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run of the check")
    parser.add_argument(
        "--save", action="store_true", help="write what ran to scripts/results/DATE-scale-....md"
    )
    options = parser.parse_args()
    reports: dict[str, Report] = {}
    if options.rounds:
        print("checking", file=sys.stderr)
        reports["check"] = check.measure(CACHE, seconds=options.seconds, rounds=options.rounds)
    print("simulating", file=sys.stderr)
    reports["simulation"] = scenarios.run_all(options.ranks)
    run = rendering.Run(
        date=datetime.date.today().isoformat(),
        command=" ".join(["scripts/scale_simulation", *sys.argv[1:]]),
        machine=machine.describe(),
        reports=reports,
        failures={},
    )
    page = rendering.to_markdown(run, images={})
    Console(width=None if sys.stdout.isatty() else FILE_COLUMNS).print(Markdown(page))
    if options.save:
        for name, report in reports.items():
            path = _save(dataclasses.replace(run, reports={name: report}))
            print(f"saved {path.relative_to(ROOT)}", file=sys.stderr)


def _save(run: rendering.Run) -> Path:
    """Write the one report of a run and its plots, remove older ones, and return the page's path."""
    ((name, report),) = run.reports.items()
    plots = rendering.write_plots(report, RESULTS, prefix=f"{run.date}-")
    images = {name: [path.relative_to(RESULTS) for path in plots]}
    page = RESULTS / f"{run.date}-{NAMES[name]}.md"
    page.write_text(rendering.to_markdown(run, images))
    for kept in (page, *plots):
        for older in RESULTS.glob(f"????-??-??-{kept.name[len(run.date) + 1 :]}"):
            if older != kept:
                older.unlink()
    return page


if __name__ == "__main__":
    main()
