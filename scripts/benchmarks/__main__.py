"""Measures this machine: ours beside the limits, the peers and the habits of the field, axis by axis."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from scripts.benchmarks import axes as package
from scripts.benchmarks import machine, rendering
from scripts.benchmarks.registry import Axis, find_axes
from scripts.benchmarks.report import Options, Report

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "bench"
RESULTS = ROOT / "scripts" / "results"
FILE_COLUMNS = 140
"""Width of the tables where there is no terminal to ask."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code, 1 if an axis failed."""
    axes = find_axes(package)
    parser = _parser(axes)
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.axis) - set(axes))
    if unknown:
        parser.error(f"AXIS must be of {', '.join(axes)}, got {', '.join(unknown)}")
    # As after Ctrl-C, no server is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = [name for name in axes if name in chosen.axis] or list(axes)
    try:
        options = Options(cache=CACHE, rounds=chosen.rounds, seconds=chosen.seconds, smoke=chosen.smoke)
    except ValueError as error:
        parser.error(str(error))
    reports, failures = measure_all({name: axes[name] for name in names}, options)
    words = sys.argv[1:] if arguments is None else arguments
    run = rendering.Run(
        date=datetime.date.today().isoformat(),
        command=" ".join(["scripts/bench", *words]),
        machine=machine.describe(),
        reports=reports,
        failures=failures,
    )
    if chosen.json:
        print(rendering.to_json(run))
    else:
        rendering.show(run, Console(width=None if sys.stdout.isatty() else FILE_COLUMNS))
    if chosen.plots:
        for report in reports.values():
            rendering.write_plots(report, chosen.plots)
    if chosen.save:
        for path in save(run, RESULTS, whole=set(names) == set(axes)):
            print(f"saved {path.relative_to(ROOT)}", file=sys.stderr)
    return 1 if failures else 0


def measure_all(axes: Mapping[str, Axis], options: Options) -> tuple[dict[str, Report], dict[str, str]]:
    """Measure axes one after another; return their reports, and what ended those that failed."""
    reports, failures = {}, {}
    for name, axis in axes.items():
        print(f"measuring {name}", file=sys.stderr)
        try:
            reports[name] = axis.measure(options)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the hours of the other axes are not lost for it
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
    return reports, failures


def save(run: rendering.Run, folder: Path, *, whole: bool) -> list[Path]:
    """Write the run's pages and plots; return the pages.

    Args:
        whole: every axis was chosen: one page `DATE-bench.md` for all; else `DATE-bench-AXIS.md` for each.
    """
    prefix = f"{run.date}-"
    folder.mkdir(parents=True, exist_ok=True)
    images = {
        name: [path.relative_to(folder) for path in rendering.write_plots(report, folder, prefix=prefix)]
        for name, report in run.reports.items()
    }
    pages = {"bench": run}
    if not whole:
        pages = {
            f"bench-{name}": replace(run, reports={name: it}, failures={}) for name, it in run.reports.items()
        }
    paths = []
    for name, part in pages.items():
        path = folder / f"{prefix}{name}.md"
        path.write_text(rendering.to_markdown(part, images, title=f"scripts/bench, {run.date}"))
        paths.append(path)
    return paths


def _parser(axes: Mapping[str, Axis]) -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<12} {axis.HELP}" for name, axis in axes.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        epilog=f"axes, all of them by default:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Options(cache=CACHE)
    parser.add_argument("axis", nargs="*", metavar="AXIS", help="what to measure")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="default %(default)s")
    parser.add_argument(
        "--seconds",
        type=float,
        default=default.seconds,
        help="of a contender in a round; default %(default)s",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--save", action="store_true", help="write scripts/results/DATE-bench.md and its plots"
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write the plots there, as NAME.png")
    parser.add_argument("--smoke", action="store_true", help="everything once and tiny: does it run?")
    return parser


if __name__ == "__main__":
    sys.exit(main())
