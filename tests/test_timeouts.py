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
    "in a thread that blocks every signal": """
def test_it():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    thread = threading.Thread(target=threading.Event().wait)
    thread.start()
    thread.join()
""",
    "in a thread that a test leaves": """
def test_it():
    threading.Thread(target=threading.Event().wait).start()
""",
}


@pytest.mark.parametrize("code", HANGS.values(), ids=HANGS)
def test_a_deadlock_ends_the_run_and_shows_where_it_is(tmp_path: Path, code: str) -> None:
    hook = "from tests import conftest\nconftest.EXIT_SECONDS = 1\n"
    hook += "pytest_unconfigure = conftest.pytest_unconfigure\n"
    (tmp_path / "conftest.py").write_text(hook)
    (tmp_path / "test_hang.py").write_text(f"import signal\nimport threading\n\nimport pytest\n\n{code}")
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-o", "timeout=1"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"}
    ended = subprocess.run(
        [*command, "-p", "no:cacheprovider", tmp_path / "test_hang.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,  # else the deadlock would go on here
        check=False,
    )
    assert ended.returncode == 1
    assert "in wait" in ended.stdout + ended.stderr or "in test_it" in ended.stdout + ended.stderr
