"""Run the phases one after another and print a report in Markdown."""

from __future__ import annotations

import argparse
import datetime
import logging
import shlex
import sys
import tempfile
import time
from pathlib import Path

from scripts.benchmarks.report import describe_machine
from scripts.soak_lib.phases import PHASES, Outcome, Soak

RESULTS = Path(__file__).parents[1] / "results"


def main() -> int:
    """Run the soak; return 1 if anything was found."""
    names = [phase.__name__ for _, phase in PHASES]
    parser = argparse.ArgumentParser(description="Runs the long forms of the reliability tests and reports.")
    parser.add_argument("--minutes", type=float, default=25.0, help="altogether, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/DATE-soak.md")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PHASE", help=", ".join(names))
    parser.add_argument("--url", help="for deployed: of replicas that run already")
    parser.add_argument("--corpus", default="train", help="for deployed: default %(default)s")
    parser.add_argument("--token-file", type=Path, help="for deployed: file with a token")
    disturb = "for deployed: shell command that takes replicas away and gives them back, over and over"
    parser.add_argument("--disturb", default="true", metavar="COMMAND", help=disturb)
    options = parser.parse_args()
    there = {name: getattr(options, name) for name in ("url", "corpus", "token_file", "disturb")}
    chosen = [each for each in PHASES if options.only is None or each[1].__name__ in options.only]
    whole = sum(share for share, _ in chosen)
    logging.getLogger("corpus_client").disabled = True  # a line for each fault that was asked for
    today = datetime.datetime.now(datetime.UTC).date()
    command = shlex.join(["scripts/soak", *sys.argv[1:]])
    machine = [f"- {name}: {value}" for name, value in describe_machine().items()]
    lines = [f"# Soak, {today}", "", *machine, "", f"    {command}", ""]
    failed = False
    for share, phase in chosen:
        with tempfile.TemporaryDirectory(prefix="corpus-soak-") as folder:
            seconds = 60 * options.minutes * share / whole
            print(f"{phase.__name__}: about {seconds:.0f} s ...", file=sys.stderr, flush=True)
            began = time.monotonic()
            try:
                outcome = phase(Soak(seconds=seconds, seed=options.seed, folder=Path(folder), **there))
            except Exception as error:  # noqa: BLE001 - one phase that breaks must not lose the others
                outcome = Outcome(phase.__name__, failures=[f"{type(error).__name__}: {error}"])
        failed |= bool(outcome.failures)
        lines += [f"## {outcome.name}", ""]
        lines += [f"{time.monotonic() - began:.0f} s. {phase.__doc__}".rstrip(), "", *outcome.lines, ""]
        if outcome.failures:
            lines += ["**Found:**", "", "```", *outcome.failures, "```", ""]
    report = "\n".join(lines)
    print(report)
    if options.save:
        (RESULTS / f"{today}-soak.md").write_text(report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
