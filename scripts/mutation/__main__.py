"""Draw a sample of one-line changes, try each, and print a report."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from scripts.mutation.mutants import Mutant, mutants_of
from scripts.mutation.report import describe, markdown
from scripts.mutation.trying import PACKAGES, Bench, Result, copy_of_tree, preload

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts/results"


def main() -> None:
    """Parse the command line, and mutate."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("paths", nargs="*", default=list(PACKAGES), help="packages or modules (default: all)")
    parser.add_argument("--sample", type=int, default=200, metavar="N", help="mutants to try (200)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample (0)")
    parser.add_argument("--processes", type=int, default=2, help="mutants to try at the same time (2)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="begin no mutant later")
    parser.add_argument(
        "--near", action="store_true", help="run only the tests that name or import the module"
    )
    parser.add_argument("--save", action="store_true", help="write scripts/results/DATE-mutation.md")
    chosen = parser.parse_args()
    mutants = [mutant for path in modules(chosen.paths) for mutant in mutants_of(ROOT, path)]
    random.Random(chosen.seed).shuffle(mutants)
    valid = (mutant for mutant in mutants if mutant.is_valid(ROOT))
    sample = list(itertools.islice(valid, chosen.sample))
    until = time.monotonic() + 60 * chosen.minutes
    results = try_all(sample, chosen.processes, until, near=chosen.near)
    command = " ".join(["scripts/mutate", *sys.argv[1:]])
    text = markdown(ROOT, results, command, len(mutants))
    print(text)
    if chosen.save:
        (RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-mutation.md").write_text(text)


def modules(paths: list[str]) -> list[str]:
    """Return the modules at some paths; refuse one that belongs to no package in `PACKAGES`."""
    found = []
    for path in (ROOT / path for path in paths):
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        found += [str(file.relative_to(ROOT)) for file in files if file.name != "__init__.py"]
    for name in found:
        if not name.startswith(tuple(f"{package}/" for package in PACKAGES)):
            raise SystemExit(f"paths must be in {', '.join(PACKAGES)}, got {name}")
    return found


def try_all(sample: list[Mutant], processes: int, until: float, *, near: bool) -> list[Result]:
    """Try all mutants, several at a time; print each survivor as soon as it is known.

    Args:
        until: the time after which no further one is begun.
    """
    preload()
    context = multiprocessing.get_context("fork")
    results = []
    with contextlib.ExitStack() as stack:
        trees = [stack.enter_context(copy_of_tree(ROOT)) for _ in range(processes)]
        unused = context.SimpleQueue()
        for tree in trees:
            unused.put(tree)
        pool = stack.enter_context(ProcessPoolExecutor(processes, context, Bench.open, (unused, until, near)))
        for result in pool.map(Bench.try_out, sample):
            if result is None:
                continue
            print(
                f"{result.outcome} in {result.seconds:.1f} s: {result.mutant} {result.test}", file=sys.stderr
            )
            if result.outcome == "survived":
                print("\n".join(describe(ROOT, result)), file=sys.stderr)
            results.append(result)
    return results


if __name__ == "__main__":
    main()
