"""Run drills one after another, each in a process of its own, and print a table.

The result of each is kept as soon as it has ended (.cache/drills). A run that was ended goes on with --rest.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil

from scripts.benchmarks.servers import checked_out
from scripts.drills_lib.drill import Drill, Ended, Found, all_drills, outcome
from scripts.drills_lib.results import Kept, Result, report
from scripts.processes import ROOT, ending_with_this_process
from tests.serving import RunningServer, environment

CACHE = ROOT / ".cache" / "drills"
RESULTS = ROOT / "scripts" / "results"
MINUTES = 60
LIMIT = 3
"""Times its seconds, after which a drill is ended: the machine may be busy."""
END_SECONDS = 10.0
"""For what a drill started, after its end: workers of a server that was killed complete their responses."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main() -> int:
    """Run drills; return 1 if anything was found, or the time was over before all had run."""
    drills = all_drills()
    given = _parser(drills).parse_args()
    if given.inside is not None:
        logging.getLogger("corpus_client").disabled = True  # a line for each fault that was asked for
        signal.signal(signal.SIGTERM, _end)
        RunningServer.tree = given.tree
        drills[given.names[0]].perform(given.inside)
        return 0
    chosen = [drills[name] for name in given.names or drills]
    chosen = [each for each in chosen if each.is_quick or not given.quick]
    now = Kept(CACHE / "this tree")
    before = (given.before, Kept(CACHE / given.before)) if given.before else None
    kept = [now, before[1]] if before else [now]
    if not given.rest:
        for each in kept:
            each.forget(chosen)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what a drill leaves behind becomes a child
    clock = Clock(60 * (given.minutes or MINUTES * len(kept)))
    with checked_out(given.before) if given.before else nullcontext(ROOT) as earlier:
        _check_packages(earlier)
        trees = list(zip(kept, (ROOT, earlier), strict=False))
        for drill in chosen:
            for results, tree in trees:
                if results.of(drill) is None:
                    _run(drill, results, tree, clock)
    page = report(chosen, now, shlex.join(["scripts/drills", *sys.argv[1:]]), before)
    print(page)
    if given.save:
        day = page.partition("\n")[0].rpartition(" ")[2]
        (RESULTS / f"{day}-drills.md").write_text(page)
    done = [now.of(each) for each in chosen]
    return int(not all(done) or any(each.found.failures for each in done if each))


class Clock:
    """The seconds that a run has."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds = time.monotonic(), seconds

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return self._began + self._seconds - time.monotonic()

    def __str__(self) -> str:
        used = int(self._seconds - self.left)
        return f"[{used // 60}:{used % 60:02} of {self._seconds / 60:g}:00]"


def _parser(drills: dict[str, Drill]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="drills, all of them by default:\n"
        + "\n".join(f"  {each.name:<16} {each.seconds:>4} s  {each.what}" for each in drills.values()),
    )
    parser.add_argument("names", nargs="*", choices=[*drills, []], metavar="NAME", help="of a drill")
    parser.add_argument("--quick", action="store_true", help="only those of less than 20 s")
    parser.add_argument("--rest", action="store_true", help="only those that the last run left")
    minutes = "begin no drill that would end later, if it takes as long as it says; by default "
    minutes += f"{MINUTES}, and as many for the other commit"
    parser.add_argument("--minutes", type=float, help=minutes)
    parser.add_argument("--before", metavar="COMMIT", help="that commit's server, too, in columns beside")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/DATE-drills.md")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tree", type=Path, default=ROOT, help=argparse.SUPPRESS)
    return parser


def _run(drill: Drill, results: Kept, tree: Path, clock: Clock) -> None:
    """Run a drill if there is time for it, and keep its result."""
    which = "" if tree == ROOT else " (the earlier server)"
    if clock.left < drill.seconds:
        print(f"{clock} {drill.name}{which}: no time; --rest runs it", file=sys.stderr, flush=True)
        return
    print(f"{clock} {drill.name}{which}: {drill.what}", file=sys.stderr, flush=True)
    result = _outcome(drill, tree, min(LIMIT * drill.seconds, clock.left))
    results.keep(drill, result)
    said = f"  {result.shown}, {result.seconds:.0f} s"
    print(said, *result.found.failures, sep="\n    ", file=sys.stderr, flush=True)


def _outcome(drill: Drill, tree: Path, limit: float) -> Result:
    """Run a drill in a process of its own; whatever it leaves behind is ended, and a failure."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"corpus-drill-{drill.name}-") as folder:
        words = ["-m", "scripts.drills_lib", drill.name, "--inside", folder, "--tree", str(tree)]
        command = ending_with_this_process([sys.executable, *words])
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # it tells what it has found
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        finally:
            process.kill()
            process.wait()
            left = [*_processes_left(), *_mounts_left(Path(folder))]
            result = _told(Path(folder), process.returncode)
    result.found.failures += [f"{each} was left behind" for each in left]
    word = "failed" if left else result.word
    return Result(word=word, why=result.why, found=result.found, seconds=time.monotonic() - began)


def _end(*_: object) -> None:
    """End the drill of this process, which has taken too long."""
    raise Ended("it did not end in time")


def _check_packages(tree: Path) -> None:
    """Refuse a server of another commit that needs packages which this environment does not have."""
    with tempfile.TemporaryDirectory() as folder:  # without the corpus a server ends at once
        command = [sys.executable, "-m", "corpus_server", "serve", "none=none", "--state-dir", folder]
        started = subprocess.run(
            command, cwd=tree, env=environment(tree=tree), capture_output=True, text=True, check=False
        )
    if lacks := re.search("No module named .*", started.stderr):
        raise SystemExit(
            f"a server of that commit does not start in this environment: {lacks[0]}; install it in .venv, "
            "or give a later commit"
        )


def _told(folder: Path, code: int) -> Result:
    try:
        word, why, found = outcome(folder)
    except FileNotFoundError:
        word, why, found = "failed", "", Found(failures=[f"its process ended with {code}"])
    return Result(word=word, why=why, found=found, seconds=0)


def _processes_left() -> Sequence[str]:
    """End the processes that a drill left behind; return those that did not end by themselves."""
    children = psutil.Process().children(recursive=True)
    _, alive = psutil.wait_procs(children, timeout=END_SECONDS)
    left = []
    for each in alive:
        with suppress(psutil.NoSuchProcess):
            left.append(f"process {each.pid} ({each.name()})")
            each.kill()
    psutil.wait_procs(alive, timeout=END_SECONDS)
    return left


def _mounts_left(folder: Path) -> Sequence[str]:
    """Unmount what a drill left mounted."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    left = [each for each in mounted if Path(each).is_relative_to(folder)]
    for each in left:
        subprocess.run(["umount", "--lazy", each], check=False)
    return [f"the mount {each}" for each in left]


if __name__ == "__main__":
    sys.exit(main())
