"""Run the parts that are asked for; write a dated file for each as soon as it is done."""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from scripts.benchmarks.report import Report, Run
from scripts.gpu_lib import needs, parts
from scripts.gpu_lib.parts import PARTS
from scripts.processes import ROOT

PART_SECONDS = 240.0  # then a part ends; where a command may take 10 minutes, two parts fit into one
DONE, MISSED, NOTHING = 0, 1, 3
"""Exit codes: all is well; a part failed or a figure was missed; nothing could be measured."""


def main() -> int:
    listed = "\n".join(f"  {name:<10} {part.help}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/gpu",
        description=__doc__,
        epilog=f"parts, all of them by default:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas between")
    parser.add_argument("--results", type=Path, default=ROOT / "scripts" / "results", metavar="DIR")
    parser.add_argument("--again", action="store_true", help="also parts that have today's file")
    parser.add_argument("--quick", action="store_true", help="tiny and on any machine; figures mean nothing")
    parser.add_argument("--device", default="cuda")
    chosen = parser.parse_args()
    wanted = chosen.parts.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"--parts must be some of {','.join(PARTS)}, got {','.join(unknown)}")
    # End as after Ctrl-C does, so that no server is left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen.results.mkdir(parents=True, exist_ok=True)
    codes = [_run(name, chosen) for name in PARTS if name in wanted]
    done = [code for code in codes if code is not None]
    return max(done, default=NOTHING)


def _run(name: str, chosen: argparse.Namespace) -> int | None:
    """Run a part and write its file; return an exit code, None if it was skipped."""
    date, part = datetime.date.today().isoformat(), PARTS[name]
    path = chosen.results.absolute() / f"{date}-gpu-{name}.md"
    if path.exists() and not chosen.again:
        print(f"{name}: skipped, {path} is there; --again repeats it", flush=True)
        return DONE
    if reason := needs.missing(each for each in part.needs if each != needs.CUDA or not chosen.quick):
        print(f"{name}: skipped, {reason}", flush=True)
        return None
    print(f"{name}: {part.help}", flush=True)
    import torch

    from corpus_client.tools.machine import describe

    device = chosen.device if torch.cuda.is_available() or not chosen.quick else "cpu"
    began = time.monotonic()
    signal.signal(signal.SIGALRM, _end_late)
    signal.setitimer(signal.ITIMER_REAL, PART_SECONDS)
    try:
        report: Report = part.measure(parts.Run(device=device, quick=chosen.quick))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts go on
        said = str(error) or type(error).__name__
        print(f"{name}: FAILED, no file is written: {said}", file=sys.stderr, flush=True)
        return MISSED
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    machine = describe(torch.device(device if torch.cuda.is_available() else "cpu"))
    run = Run(
        title=f"scripts/gpu {name}, {date}: {part.help}" + " (quick: figures mean nothing)" * chosen.quick,
        command=" ".join(["scripts/gpu", *sys.argv[1:]]),
        machine={**machine, "measured in": f"{time.monotonic() - began:.0f} s"},
        reports={name: replace(report, targets=[] if chosen.quick else report.targets)},
    )
    path.write_text(f"{run.to_markdown()}\n## data\n\n```json\n{json.dumps(report.data)}\n```\n")
    missed = [target.figure for target in run.reports[name].targets if not target.met]
    print(f"{name}: wrote {path}" + (f"; MISSED: {'; '.join(missed)}" if missed else ""), flush=True)
    return MISSED if missed else DONE


def _end_late(*_: object) -> None:
    """Raise in the part itself, so that the servers it started end with their blocks."""
    raise parts.PartFailed(f"it was not done after {PART_SECONDS:g} s")


if __name__ == "__main__":
    sys.exit(main())
