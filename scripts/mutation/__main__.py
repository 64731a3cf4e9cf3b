"""Draw a sample of one-line changes, try each, and print a report."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from scripts.mutation.mutants import Mutant, mutants_of
from scripts.mutation.report import describe, markdown
from scripts.mutation.trying import PACKAGES, Bench, Result, copy_of_tree, package_of, preload, run_tests

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts/results"


def main() -> None:
    """Parse the command line, and mutate."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("paths", nargs="*", default=list(PACKAGES), help="packages or modules (default: all)")
    parser.add_argument("--sample", type=int, default=200, metavar="N", help="mutants to try (200)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sample (0)")
    parser.add_argument("--processes", type=int, default=2, help="mutants to try at the same time (2)")
    parser.add_argument("--save", action="store_true", help="write scripts/results/DATE-mutation.md")
    chosen = parser.parse_args()
    mutants = [mutant for path in modules(chosen.paths) for mutant in mutants_of(ROOT, path)]
    random.Random(chosen.seed).shuffle(mutants)
    valid = (mutant for mutant in mutants if mutant.is_valid(ROOT))
    sample = list(itertools.islice(valid, chosen.sample))
    results = try_all(sample, chosen.processes)
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


def try_all(sample: list[Mutant], processes: int) -> list[Result]:
    """Try all mutants, several at a time; print each survivor as soon as it is known."""
    preload()
    context = multiprocessing.get_context("fork")
    results = []
    with contextlib.ExitStack() as stack:
        trees = [stack.enter_context(copy_of_tree(ROOT)) for _ in range(processes)]
        limits = seconds_without_a_change(trees[0], sample)
        unused = context.SimpleQueue()
        for tree in trees:
            unused.put(tree)
        pool = stack.enter_context(ProcessPoolExecutor(processes, context, Bench.open, (unused, limits)))
        for result in pool.map(Bench.try_out, sample):
            print(f"{result.outcome} in {result.seconds:.1f} s: {result.mutant}", file=sys.stderr)
            if result.outcome == "survived":
                print("\n".join(describe(ROOT, result)), file=sys.stderr)
            results.append(result)
    return results


def seconds_without_a_change(tree: Path, sample: list[Mutant]) -> dict[str, float]:
    """Run the tests of each package on the tree as it is: one that fails anyway would notice every mutant."""
    seconds = {}
    for package in sorted({package_of(mutant.path) for mutant in sample}):
        began = time.monotonic()
        outcome, output = run_tests(tree, PACKAGES[package], limit=1200)
        if outcome != "survived":
            raise SystemExit(f"the tests of {package} must pass on the tree as it is; {outcome}:\n{output}")
        seconds[package] = time.monotonic() - began
        print(f"{package}: {seconds[package]:.0f} s without a change", file=sys.stderr)
    return seconds


if __name__ == "__main__":
    main()
