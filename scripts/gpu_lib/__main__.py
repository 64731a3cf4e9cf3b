"""Run the parts that are asked for; write a dated file for each as soon as it is done."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from pathlib import Path

from scripts.gpu_lib import needs, parts, report
from scripts.gpu_lib.table import PARTS

ROOT = Path(__file__).parents[2]
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
    results = chosen.results.absolute()
    results.mkdir(parents=True, exist_ok=True)
    return run([name for name in PARTS if name in wanted], results, chosen)


def run(wanted: list[str], results: Path, chosen: argparse.Namespace) -> int:
    """Run parts one after another; return the exit code."""
    date = datetime.date.today().isoformat()
    code, num_done = DONE, 0
    for name in wanted:
        part, path = PARTS[name], results / f"{date}-gpu-{name}.md"
        if path.exists() and not chosen.again:
            print(f"{name}: skipped, {path} is there; --again repeats it", flush=True)
            num_done += 1
            continue
        if reason := needs.missing(each for each in part.needs if each != needs.CUDA or not chosen.quick):
            print(f"{name}: skipped, {reason}", flush=True)
            continue
        print(f"{name}: {part.help}", flush=True)
        num_done += 1
        try:
            found = parts.measure(part.run, chosen.device, quick=chosen.quick, plots=results / path.stem)
        except parts.PartFailed as failed:
            print(f"{name}: FAILED, no file is written: {failed}", file=sys.stderr, flush=True)
            code = MISSED
            continue
        command = " ".join(["scripts/gpu", *sys.argv[1:]])
        targets = [] if chosen.quick else part.targets(found["data"])
        title = f"scripts/gpu {name}, {date}: {part.help}" + " (quick: figures mean nothing)" * chosen.quick
        lines = part.lines(found["data"])
        path.write_text(report.markdown(title, found, targets, lines, command=command))
        missed = [target.figure for target in targets if not target.met]
        print(f"{name}: wrote {path}" + (f"; MISSED: {'; '.join(missed)}" if missed else ""), flush=True)
        if missed:
            code = MISSED
    return code if num_done else NOTHING


if __name__ == "__main__":
    sys.exit(main())
