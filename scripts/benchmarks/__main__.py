"""Measure this machine: ours beside limits, peers and other commits, axis by axis."""

from __future__ import annotations

import argparse
import datetime
import importlib
import pkgutil
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from scripts.benchmarks import axes
from scripts.benchmarks.report import Options, Report, Run, describe_machine

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "bench"
RESULTS = ROOT / "scripts" / "results"
FILE_COLUMNS = 140
"""Width of the tables where the output is no terminal."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code, 1 if an axis failed."""
    known = find_axes()
    parser = _parser(known)
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.axis) - set(known)):
        parser.error(f"AXIS must be of {', '.join(known)}, got {', '.join(unknown)}")
    # End as after Ctrl-C does, so that no server is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    names = [name for name in known if name in chosen.axis] or list(known)
    try:
        given = {each.name: getattr(chosen, each.name) for each in fields(Options) if each.name != "cache"}
        options = Options(cache=CACHE, **{**given, "only": tuple(chosen.only)})
    except ValueError as error:
        parser.error(str(error))
    reports, failures = measure_all({name: known[name] for name in names}, options)
    words = sys.argv[1:] if arguments is None else arguments
    run = Run(
        title=f"scripts/bench, {datetime.date.today().isoformat()}",
        command=" ".join(["scripts/bench", *words]),
        machine=describe_machine(),
        reports=reports,
        failures=failures,
    )
    if chosen.json:
        print(run.to_json())
    else:
        width = None if sys.stdout.isatty() else FILE_COLUMNS
        Console(width=width).print(Markdown(run.to_markdown()))
    if chosen.save:
        for path in save(run, RESULTS, suffix="-tls" * options.tls):
            print(f"saved {path.relative_to(ROOT)}", file=sys.stderr)
    return 1 if failures else 0


def find_axes() -> dict[str, Any]:
    """Return the modules of `axes/` by name, in alphabetical order; each has `HELP` and `measure`."""
    names = sorted(module.name for module in pkgutil.iter_modules(axes.__path__))
    return {name: importlib.import_module(f"{axes.__name__}.{name}") for name in names}


def measure_all(chosen: Mapping[str, Any], options: Options) -> tuple[dict[str, Report], dict[str, str]]:
    """Measure axes one after another; return their reports, and the errors of those that failed."""
    reports, failures = {}, {}
    for name, axis in chosen.items():
        print(f"measuring {name}", file=sys.stderr)
        try:
            reports[name] = axis.measure(options)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other axes go on
            traceback.print_exc()
            failures[name] = f"{type(error).__name__}: {error}"
    return reports, failures


def save(run: Run, folder: Path, suffix: str = "") -> list[Path]:
    """Write a page for each axis, in place of those of earlier days; return the pages."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, report in run.reports.items():
        for older in folder.glob(f"????-??-??-bench-{name}{suffix}.md"):
            older.unlink()
        paths.append(folder / f"{datetime.date.today().isoformat()}-bench-{name}{suffix}.md")
        paths[-1].write_text(replace(run, reports={name: report}, failures={}).to_markdown())
    return paths


def _parser(known: Mapping[str, Any]) -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<12} {axis.HELP}" for name, axis in known.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        epilog=f"axes, all of them by default:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Options(cache=CACHE)
    parser.add_argument("axis", nargs="*", metavar="AXIS", help="what to measure")
    parser.add_argument("--rounds", type=int, default=default.rounds, help="default %(default)s")
    seconds = "of a contender's turn in a round; default %(default)s"
    parser.add_argument("--seconds", type=float, default=default.seconds, help=seconds)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--save", action="store_true", help="write scripts/results/DATE-bench-AXIS.md")
    before = "throughput, latency, lone, paced, rows, cold, turns: that commit's server beside this tree's"
    parser.add_argument("--before", metavar="COMMIT", help=before)
    tls = "throughput, latency, paced by https, and without TLS beside it"
    parser.add_argument("--tls", action="store_true", help=tls)
    only = "of cold, packing, bucket, turns: this part only; may be given several times"
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help=only)
    quick = "everything once, on tiny data: does it run? Under a minute an axis"
    parser.add_argument("--quick", action="store_true", help=quick)
    return parser


if __name__ == "__main__":
    sys.exit(main())
