"""Runs every part on a GPU and writes dated results; without a GPU says what is missing, writes nothing."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.gpu_lib import needs

ROOT = Path(__file__).parents[2]
PARTS = ("tests", "transfer", "overlap", "delivered", "soak")
NOT_MEASURED = 3
"""Exit code where nothing could be measured; 1: a part failed or a figure was missed."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/gpu", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas between")
    parser.add_argument("--tokens", type=int, default=10**9, help="of the corpus that is served")
    parser.add_argument("--steps", type=int, default=10_000, help="of the long exact run")
    parser.add_argument("--results", type=Path, default=ROOT / "scripts" / "results")
    chosen = parser.parse_args()
    wanted = chosen.parts.split(",")
    if unknown := [part for part in wanted if part not in PARTS]:
        parser.error(f"--parts must be some of {','.join(PARTS)}, got {','.join(unknown)}")
    if lacking := needs.missing():
        print("scripts/gpu: nothing was measured and nothing was written. Missing:", file=sys.stderr)
        for sentence in lacking:
            print(f"- {sentence}", file=sys.stderr)
        sys.exit(NOT_MEASURED)
    sys.exit(_run(chosen, wanted))


def _run(chosen: argparse.Namespace, wanted: list[str]) -> int:
    """Do the parts, write the report; return the exit code."""
    import torch

    from corpus_client.tools.machine import describe
    from scripts.benchmarks import corpus
    from scripts.benchmarks.servers import serving
    from scripts.gpu_lib import parts, report

    date = datetime.date.today().isoformat()
    plots = chosen.results / f"{date}-gpu"
    path = corpus.make(ROOT / ".cache" / "gpu", chosen.tokens)
    corpus.warm(path)
    results: dict[str, Any] = {"machine": describe(torch.device(chosen.device)), "failed": {}}
    with serving({corpus.NAME: path}) as server:
        runs: dict[str, Callable[[], Any]] = {
            "tests": parts.run_tests,
            "transfer": lambda: parts.transfer(chosen.device, plots),
            "overlap": lambda: parts.overlap(chosen.device, server.url, path, plots),
            "delivered": lambda: parts.delivered(chosen.device, server.url, 5.0),
            "soak": lambda: parts.soak(chosen.device, server.url, path, chosen.steps),
        }
        for part in wanted:
            print(f"== {part}", flush=True)
            try:
                results[part] = runs[part]()
            except parts.PartFailed as failed:
                results["failed"][part] = str(failed)
                print(f"{part} failed: {failed}", file=sys.stderr)
    results["plots"] = sorted(str(each.relative_to(chosen.results)) for each in plots.rglob("*.png"))
    written = chosen.results / f"{date}-gpu.md"
    chosen.results.mkdir(parents=True, exist_ok=True)
    command = " ".join(["scripts/gpu", *sys.argv[1:]])
    written.write_text(report.markdown(results, date=date, command=command))
    written.with_suffix(".json").write_text(json.dumps(results) + "\n")
    print(f"wrote {written}")
    return 0 if report.passed(results) else 1


if __name__ == "__main__":
    main()
