"""Try mutants in copies of the tree: run the nearest tests first, and stop at the first that fails."""

from __future__ import annotations

import contextlib
import importlib
import os
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

Outcome = Literal["killed", "survived", "timeout"]

PACKAGES: dict[str, list[str]] = {
    "corpus_server/plan": ["tests/server/plan", "tests/server/test_plan_store.py"],
    "corpus_server/corpus": ["tests/server/corpus", "tests/server/test_catalog.py"],
    "corpus_server/read": ["tests/server/read", "tests/server/stores/test_serving.py"],
    "corpus_server/data": ["tests/server/data", "tests/server/web"],
    "client/corpus_client/network": ["tests/client/network", "tests/contract/test_unix_socket.py"],
    "client/corpus_client/staging": ["tests/client/staging", "tests/client/test_loader.py"],
}
"""What is mutated, and the tests that must notice, in this order."""

_PRELOADED = "ignore::pytest.PytestAssertRewriteWarning"

TEST_SECONDS = 30
"""Of one test; a mutant that makes a loop endless is noticed by that."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a mutant."""

    mutant: Mutant
    outcome: Outcome
    seconds: float


def package_of(path: str) -> str:
    """Return the package in `PACKAGES` that a module belongs to."""
    return next(package for package in PACKAGES if path.startswith(package + "/"))


def tests_of(root: Path, path: str) -> list[str]:
    """Return the tests for a module: those that are named after it, then its package's."""
    package = package_of(path)
    named = sorted((root / PACKAGES[package][0]).rglob(f"test_{Path(path).stem}*.py"))
    return [*(str(each.relative_to(root)) for each in named), *PACKAGES[package]]


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


def run_tests(tree: Path, tests: list[str], limit: float) -> tuple[Outcome, str]:
    """Run tests in a copy of the tree; return what they say of it, and their output.

    Args:
        limit: seconds for all of them.
    """
    log = tree / "tests.log"
    log.touch()
    sys.stdout.flush()
    process = os.fork()  # an interpreter with torch takes longer to start than most mutants to be noticed
    if not process:
        _run_here(tree, tests, log)
    end = time.monotonic() + limit
    ended = 0
    while not ended and time.monotonic() < end:
        time.sleep(0.02)
        ended, status = os.waitpid(process, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # servers that the tests have started end with them
    if not ended:
        os.waitpid(process, 0)
        return "timeout", log.read_text()
    code = os.waitstatus_to_exitcode(status)
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise SystemExit(f"there must be tests in {tests}, none was found")
    return ("killed" if code else "survived"), log.read_text()


def _run_here(tree: Path, tests: list[str], log: Path) -> NoReturn:
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
        options = ["-x", "-q", "--timeout", str(TEST_SECONDS), "--hypothesis-seed", "0", "--no-header"]
        code = pytest.main([*options, "-p", "no:cacheprovider", "-p", "no:xdist", "-W", _PRELOADED, *tests])
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - this process must not go on where its parent is
        traceback.print_exc()
    finally:
        os._exit(code)


class Bench:
    """A copy of the tree in which one mutant after another is tried; each process has one.

    Args:
        seconds: that the tests of each package take without a change.
    """

    _here: Bench

    def __init__(self, tree: Path, seconds: dict[str, float]) -> None:
        self._tree = tree
        self._seconds = seconds
        # Compiled files are told apart by whole seconds and sizes, which two mutants may share.
        self._time = 1_000_000_000

    @classmethod
    def open(cls, unused: SimpleQueue[Path], seconds: dict[str, float]) -> None:
        """Take a copy of the tree for this process."""
        cls._here = cls(unused.get(), seconds)

    @classmethod
    def try_out(cls, mutant: Mutant) -> Result:
        """Make the change, run the tests, and undo the change."""
        return cls._here._try_out(mutant)

    def _try_out(self, mutant: Mutant) -> Result:
        path = self._tree / mutant.path
        original = path.read_text()
        changed = mutant.apply(self._tree)
        began = time.monotonic()
        try:
            self._write(path, changed)
            limit = 4 * self._seconds[package_of(mutant.path)] + 60
            outcome, _ = run_tests(self._tree, tests_of(self._tree, mutant.path), limit)
        finally:
            self._write(path, original)
        return Result(mutant, outcome, time.monotonic() - began)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        self._time += 1
        os.utime(path, (self._time, self._time))
