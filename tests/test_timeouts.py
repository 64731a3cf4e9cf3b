"""A deadlock ends a run of the tests, wherever it is: it must not hold up a machine for hours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT

HANGS = {
    "in a test": """
def test_it():
    lock = threading.Lock()
    with lock, lock:
        pass
""",
    "in the clean-up of a test that has timed out": """
@pytest.fixture
def hanging():
    yield
    threading.Event().wait()

def test_it(hanging):
    threading.Event().wait()
""",
    "in a thread that a test waits for": """
def test_it():
    thread = threading.Thread(target=threading.Event().wait)
    thread.start()
    thread.join()
""",
    "in a thread that blocks every signal": """
def test_it():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    thread = threading.Thread(target=threading.Event().wait)
    thread.start()
    thread.join()
""",
    "in C": """
def test_it():
    ctypes.CDLL(None).pause()
""",
    "in C, with the interpreter's lock": """
def test_it():
    ctypes.PyDLL(None).pause()
""",
    "in a thread that a test leaves": """
def test_it():
    threading.Thread(target=threading.Event().wait).start()
""",
    "in a module of tests": """
threading.Event().wait()

def test_it():
    pass
""",
}

CONFTEST = """
from tests import conftest

conftest.COLLECTION_SECONDS = 4
conftest.EXIT_SECONDS = 1
pytest_collection = conftest.pytest_collection
pytest_unconfigure = conftest.pytest_unconfigure
"""

SEVERAL = (ROOT / "scripts" / "test").read_text().partition("-m pytest ")[2].split()[:-1]
"""How `scripts/test` runs them in several processes; without its own arguments."""

IMPORTS = "import ctypes\nimport signal\nimport threading\n\nimport pytest\n"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder, which may hang, as the project's own are run."""
    (folder / "conftest.py").write_text(CONFTEST)
    limits = ["-o", "timeout=1", "-o", "faulthandler_timeout=3"]
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", *limits, *options]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", folder],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"},
        capture_output=True,
        text=True,
        timeout=100,  # else the deadlock would go on here
        check=False,
    )


@pytest.mark.parametrize("code", HANGS.values(), ids=HANGS)
def test_a_deadlock_ends_the_run_and_shows_where_it_is(tmp_path: Path, code: str) -> None:
    (tmp_path / "test_hang.py").write_text(IMPORTS + code)
    ended = run(tmp_path)
    shown = ended.stdout + ended.stderr
    assert ended.returncode == 1, shown
    assert "in wait" in shown or "in test_it" in shown


@pytest.mark.parametrize(
    "where", ["in a thread that a test waits for", "in C", "in C, with the interpreter's lock"]
)
def test_a_deadlock_ends_a_run_in_several_processes(tmp_path: Path, where: str) -> None:
    (tmp_path / "test_hang.py").write_text(IMPORTS + HANGS[where])
    (tmp_path / "test_other.py").write_text("def test_it():\n    pass\n")
    ended = run(tmp_path, *SEVERAL)
    assert ended.returncode == 1
    assert "crashed while running 'test_hang.py::test_it'" in ended.stdout
    assert "1 failed, 1 passed" in ended.stdout


def test_a_process_that_has_finished_waits_for_the_others(tmp_path: Path) -> None:
    """A left thread does not hold up the end either."""
    (tmp_path / "test_long.py").write_text("import time\n\ndef test_it():\n    time.sleep(2.5)\n")
    (tmp_path / "test_left.py").write_text(IMPORTS + HANGS["in a thread that a test leaves"])
    ended = run(tmp_path, *SEVERAL, "-o", "timeout=60", "-o", "faulthandler_timeout=60")
    assert (ended.returncode, "2 passed" in ended.stdout) == (0, True)
    assert "Timeout" not in ended.stdout + ended.stderr


def test_a_module_that_hangs_ends_a_run_in_several_processes(tmp_path: Path) -> None:
    (tmp_path / "test_hang.py").write_text(IMPORTS + HANGS["in a module of tests"])
    ended = run(tmp_path, *SEVERAL)
    assert ended.returncode
    assert "in wait" in ended.stdout + ended.stderr
