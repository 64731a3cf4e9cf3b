"""Run drills one after another, each in a process of its own, and print a table."""

from __future__ import annotations

import argparse
import datetime
import logging
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.benchmarks.report import describe_machine
from scripts.drills_lib.drill import Drill, Found, all_drills, outcome
from scripts.processes import ending_with_this_process

RESULTS = Path(__file__).parents[1] / "results"
LIMIT = 3
"""Times its seconds, after which a drill is ended: the machine may be busy."""


def main() -> int:
    """Run drills; return 1 if anything was found."""
    drills = all_drills()
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="drills, all of them by default:\n"
        + "\n".join(f"  {each.name:<16} {each.seconds:>4} s  {each.what}" for each in drills.values()),
    )
    parser.add_argument("names", nargs="*", choices=[*drills, []], metavar="NAME", help="of a drill")
    parser.add_argument("--quick", action="store_true", help="only those of less than 20 s")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/DATE-drills.md")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = [drills[name] for name in given.names or drills]
    if given.inside is not None:
        logging.getLogger("corpus_client").disabled = True  # a line for each fault that was asked for
        chosen[0].perform(given.inside)
        return 0
    chosen = [each for each in chosen if each.is_quick or not given.quick]
    today = datetime.datetime.now(datetime.UTC).date()
    machine = [f"- {name}: {value}" for name, value in describe_machine().items()]
    command = shlex.join(["scripts/drills", *sys.argv[1:]])
    lines = [f"# Drills, {today}", "", *machine, "", f"    {command}", ""]
    lines += ["| drill | row | how often | result | s | figures |", "|---|---|---|---|--:|---|"]
    failures: list[str] = []
    for drill in chosen:
        print(f"{drill.name}: {drill.what}", file=sys.stderr, flush=True)
        began = time.monotonic()
        result, found = _outcome(drill)
        seconds = time.monotonic() - began
        print(f"  {result}, {seconds:.0f} s", *found.failures, sep="\n    ", file=sys.stderr, flush=True)
        rows = ", ".join(map(str, drill.rows))
        cells = (drill.name, rows, drill.count, result, f"{seconds:.0f}", "; ".join(found.figures))
        lines.append(f"| {' | '.join(cells)} |")
        failures += [f"{drill.name}: {each}" for each in found.failures]
    if failures:
        lines += ["", "Found:", "", "```", *failures, "```"]
    lines += ["", "What each does, and when it passes:", ""]
    for drill in chosen:
        lines.append(f"- **{drill.name}**: {drill.what} Right is {drill.oracle}. Passes: {drill.rule}.")
    report = "\n".join([*lines, ""])
    print(report)
    if given.save:
        (RESULTS / f"{today}-drills.md").write_text(report)
    return int(bool(failures))


def _outcome(drill: Drill) -> tuple[str, Found]:
    """Run a drill in a process of its own; return what becomes of it in a word, and what it found."""
    with tempfile.TemporaryDirectory(prefix=f"corpus-drill-{drill.name}-") as folder:
        command = [sys.executable, "-m", "scripts.drills_lib", drill.name, "--inside", folder]
        process = subprocess.Popen(ending_with_this_process(command), stdin=subprocess.DEVNULL)
        try:
            process.wait(LIMIT * drill.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "failed", Found(failures=[f"it did not end within {LIMIT * drill.seconds} s"])
        try:
            return outcome(Path(folder))
        except FileNotFoundError:
            return "failed", Found(failures=[f"its process ended with {process.returncode}"])


if __name__ == "__main__":
    sys.exit(main())
