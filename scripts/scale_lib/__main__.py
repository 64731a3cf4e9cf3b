"""Simulate large jobs on replicas of corpus-server, and check that here. About three minutes."""

from __future__ import annotations

import argparse
import datetime
import sys

from rich.console import Console
from rich.markdown import Markdown

from scripts.benchmarks import machine, rendering
from scripts.benchmarks.__main__ import CACHE, FILE_COLUMNS, RESULTS, ROOT
from scripts.benchmarks.report import Report
from scripts.scale_lib import check, scenarios

NAME = "scale-simulation"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/scale_simulation", description=__doc__)
    parser.add_argument("--ranks", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2, help="of the check; 0: simulate only")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run of the check")
    parser.add_argument(
        "--save", action="store_true", help=f"write scripts/results/DATE-{NAME}.md and its plot"
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
        plots = rendering.write_plots(reports["simulation"], RESULTS, prefix=f"{run.date}-")
        images = {"simulation": [path.relative_to(RESULTS) for path in plots]}
        path = RESULTS / f"{run.date}-{NAME}.md"
        path.write_text(rendering.to_markdown(run, images))
        for kept in (path, *plots):
            for older in RESULTS.glob(f"????-??-??-{kept.name[len(run.date) + 1 :]}"):
                if older != kept:
                    older.unlink()
        print(f"saved {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
