"""Measure what each integration adds to a batch, interleaved in one run, on the CPU."""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

from scripts.benchmarks import corpus, servers
from scripts.benchmarks.machine import describe
from scripts.integrations_lib.feeds import MEASURED
from scripts.integrations_lib.measuring import ROWS, SEQ_LEN, Source, measure, table
from scripts.processes import ROOT

RESULTS = ROOT / "scripts" / "results"
NUM_TOKENS = 20_000_000


def main() -> int:
    """Measure, print, and save where that is asked for."""
    parser = argparse.ArgumentParser(prog="scripts/integrations", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASURED)}; default: all")
    parser.add_argument("--rounds", type=int, default=9, help="default %(default)s")
    parser.add_argument("--batches", type=int, default=400, help="of a turn; default %(default)s")
    parser.add_argument("--save", action="store_true", help="write scripts/results/DATE-integrations.md")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(MEASURED):
        parser.error(f"NAME must be one of {', '.join(MEASURED)}, got {', '.join(sorted(unknown))}")
    names = {*chosen.names, *(MEASURED[name].baseline for name in chosen.names)} or set(MEASURED)
    known = {name: each for name, each in MEASURED.items() if name in names}
    with tempfile.TemporaryDirectory(prefix="integrations-") as folder:
        path = corpus.make(Path(folder), NUM_TOKENS)
        with servers.serving({corpus.NAME: path}) as server:
            plan = {"corpus": corpus.NAME, "seq_len": SEQ_LEN, "global_batch_size": ROWS}
            source = Source(url=server.url, plan=plan)
            found, left_out = measure(known, source, rounds=chosen.rounds, batches=chosen.batches)
    today = datetime.datetime.now(datetime.UTC).date()
    lines = [f"# Integrations, {today}", "", f"    {' '.join(['scripts/integrations', *sys.argv[1:]])}", ""]
    lines += [f"- {key}: {value}" for key, value in describe().items()]
    lines += [
        "",
        f"Batches of {ROWS} x {SEQ_LEN + 1} uint16 as two int64 tensors, one server process on loopback.",
        "",
    ]
    lines += table(known, found)
    lines += ["", *(f"- {name} was left out: {reason}" for name, reason in left_out.items())]
    report = "\n".join(lines).rstrip() + "\n"
    print(report)
    if chosen.save:
        (RESULTS / f"{today}-integrations.md").write_text(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
