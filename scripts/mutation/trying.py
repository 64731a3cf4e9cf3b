"""Try mutants in copies of the tree: run the nearest tests first, and stop at the first that fails."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import SimpleQueue
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NoReturn

import pytest

from scripts.mutation.mutants import Mutant

Outcome = Literal["killed", "survived", "timeout", "unclear"]
"""*unclear*: the test that failed or took too long does so without the change too, as on a busy machine."""

MEGATRON = "tests/server/test_megatron_order.py"

PACKAGES: dict[str, list[str]] = {
    "corpus_server/plan": [
        MEGATRON,
        "tests/server/test_plan_store.py",
        "tests/server/read/test_groups_ahead.py",
        "tests/server/plan",
    ],
    "corpus_server/corpus": ["tests/server/corpus", "tests/server/test_catalog.py", MEGATRON],
    "corpus_server/read": [
        "tests/server/read",
        MEGATRON,
        "tests/server/web/test_inspection.py",
        "tests/server/stores",
    ],
    "corpus_server/data": ["tests/server/data", "tests/server/run/test_seeing.py", "tests/server/web"],
    "client/corpus_client/network": ["tests/client/network", "tests/contract"],
    "client/corpus_client/staging": [
        "tests/client/staging",
        "tests/client/test_loader.py",
        "tests/client/test_arguments.py",
        "tests/client/observe/test_attribution.py",
    ],
}
"""What is mutated, and the tests that must notice, in this order: slow ones last."""

_PRELOADED = "ignore::pytest.PytestAssertRewriteWarning"

TEST_SECONDS = 120
"""Of one test; a mutant that makes a loop endless is noticed by that.

The slowest test takes 28 s on two busy cores.
"""

ALL_SECONDS = 1800
"""Of all tests for a mutant. It ends what pytest cannot: a loop in C that holds the interpreter's lock."""

_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_BEGUN = re.compile(r"^(tests/.+?::.+?)(?: (?:[A-Z]+ +\[|\+{5}).*| *)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant, and which test failed or did not end."""

    mutant: Mutant
    outcome: Outcome
    seconds: float
    test: str = ""


def package_of(path: str) -> str:
    """Return the package in `PACKAGES` that a module belongs to."""
    return next(package for package in PACKAGES if path.startswith(package + "/"))


def tests_of(root: Path, path: str, *, near: bool) -> list[str]:
    """Return the tests of a module's package: first those named after it, then those that import it.

    Args:
        near: leave the others out, unless there are none of these.
    """
    tests = PACKAGES[package_of(path)]
    files = [
        file for test in tests for file in ([root / test] if test.endswith(".py") else _files(root / test))
    ]
    module = path.removeprefix("client/").removesuffix(".py").replace("/", ".")

    def distance(file: Path) -> int:
        if file.name.startswith(f"test_{Path(path).stem}"):
            return 0
        return 1 if module in file.read_text() else 2

    if near:
        files = [file for file in files if distance(file) < 2] or files
    return [str(file.relative_to(root)) for file in sorted(files, key=distance)]


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("test_*.py"))


@contextlib.contextmanager
def copy_of_tree(root: Path) -> Iterator[Path]:
    """Copy what git knows or would know of a tree to a temporary folder."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    with TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder)
        for name in filter(None, listed):
            if (root / name).is_file():  # else it was removed, but not from the index
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name)
        yield copy


def preload() -> None:
    """Import what is slow to import and not mutated: processes that run tests are forked from this one."""
    for name in ("numpy", "torch", "hypothesis", "httpx", "fastapi", "uvicorn", "psutil", "rich", "typer"):
        importlib.import_module(name)
    gc.freeze()  # else each process copies all that at a collection: 1.25 s for some short tests, not 0.73


def run_tests(tree: Path, tests: list[str], limit: float, test_limit: float) -> tuple[Outcome, str]:
    """Run tests in a copy of the tree until one fails; return the outcome and the last test.

    Args:
        limit: seconds for all of them.
        test_limit: seconds for each of them.
    """
    log = tree / "tests.log"
    log.touch()
    sys.stdout.flush()
    process = os.fork()  # an interpreter with torch takes longer to start than most mutants to be noticed
    if not process:
        _run_here(tree, tests, log, test_limit)
    end = time.monotonic() + limit
    ended = 0
    while not ended and time.monotonic() < end:
        time.sleep(0.02)
        ended, status = os.waitpid(process, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # servers that the tests have started end with them
    if not ended:
        os.waitpid(process, 0)
        return "timeout", _last_test(log.read_text())
    code = os.waitstatus_to_exitcode(status)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise SystemExit(f"there must be tests in {tests}, none was found")
    output = log.read_text(errors="replace")
    outcome: Outcome = "survived" if not code else "timeout" if "+ Timeout +" in output else "killed"
    return outcome, _last_test(output)


def _last_test(output: str) -> str:
    found = _FAILED.findall(output) or _BEGUN.findall(output)[-1:]
    return found[0] if found else ""


def _run_here(tree: Path, tests: list[str], log: Path, test_limit: float) -> NoReturn:
    """Run tests in this process, and end it."""
    code = 1
    try:
        os.setsid()
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        sys.path[:0] = [str(tree), str(tree / "client")]
        os.environ["PYTHONPATH"] = f"{tree}:{tree / 'client'}"
        options = ["-x", "-v", "--timeout", str(test_limit), "--hypothesis-seed", "0", "--no-header"]
        # Without the lines of faulthandler, which would come between those that `_last_test` reads.
        options += ["--timeout-method", "thread", "-o", "faulthandler_timeout=0"]
        options += ["-p", "no:schemathesis"]  # 0.2 s to load, and no test of these packages uses it
        code = pytest.main([*options, "-p", "no:cacheprovider", "-p", "no:xdist", "-W", _PRELOADED, *tests])
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - this process must not go on where its parent is
        traceback.print_exc()
    finally:
        os._exit(code)


class Bench:
    """A copy of the tree in which one mutant after another is tried; each process has one."""

    _here: Bench
    _until: float

    def __init__(self, tree: Path, *, near: bool = False) -> None:
        self._tree = tree
        self._near = near
        self._passes: dict[str, bool] = {}
        # Compiled files are told apart by whole seconds and sizes, which two mutants may share.
        self._time = 1_000_000_000

    @classmethod
    def open(cls, unused: SimpleQueue[Path], until: float, near: bool) -> None:
        """Take a copy of the tree for this process, which tries no more mutants after a time."""
        cls._here, cls._until = cls(unused.get(), near=near), until

    @classmethod
    def try_out(cls, mutant: Mutant) -> Result | None:
        """Make the change, run the tests, and undo the change; None: it is too late for that."""
        return cls._here._try_out(mutant) if time.monotonic() < cls._until else None

    def _try_out(self, mutant: Mutant) -> Result:
        path = self._tree / mutant.path
        original = path.read_text()
        changed = mutant.apply(self._tree)
        began = time.monotonic()
        try:
            self._write(path, changed)
            outcome, test = self._run(tests_of(self._tree, mutant.path, near=self._near), TEST_SECONDS)
        finally:
            self._write(path, original)
        if outcome != "survived" and not self._passes_without(test):
            outcome = "unclear"
        return Result(mutant, outcome, time.monotonic() - began, test)

    def _passes_without(self, test: str) -> bool:
        """Tell whether a test passes on the tree as it is, in a third of the time that a mutant has."""
        if test not in self._passes:
            self._passes[test] = self._run([test], TEST_SECONDS / 3)[0] == "survived"
        return self._passes[test]

    def _run(self, tests: list[str], test_limit: float) -> tuple[Outcome, str]:
        return run_tests(self._tree, tests, ALL_SECONDS, test_limit)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        self._time += 1
        os.utime(path, (self._time, self._time))
