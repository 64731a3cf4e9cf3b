"""What ends a run of the tests: a deadlock wherever it is, and a lost process, whose tests are counted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.serving import ROOT, wait_until

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

conftest.COLLECTION_SECONDS = {collection_seconds}
conftest.EXIT_SECONDS = {exit_seconds}
pytest_collection = conftest.pytest_collection
pytest_configure = conftest.pytest_configure
pytest_unconfigure = conftest.pytest_unconfigure
"""

SEVERAL = (ROOT / "scripts" / "test").read_text().partition("-m pytest ")[2].split()[:-1]
"""How `scripts/test` runs them in several processes; without its own arguments."""

PLUGINS = ("-p", "pytest_timeout", "-p", "xdist.plugin")
"""All that have to do with an end; to import the others takes more than half of the time of a process."""

IMPORTS = "import ctypes\nimport signal\nimport threading\n\nimport pytest\n"


def run(
    folder: Path, *options: str, prefix: Sequence[str] = (), hangs: str = "", seconds: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder as the project's own are run.

    hangs: where they do, a key of `HANGS`; the limit that ends this is short, all others are not reached.
    seconds: the short limit; that of the watchdog, which comes after it, is three times as long.
    """
    is_collected = hangs != "in a module of tests"
    limits = {
        "collection_seconds": 600 if is_collected else seconds,
        "exit_seconds": seconds if hangs else 600,
    }
    (folder / "conftest.py").write_text(CONFTEST.format(**limits))
    limits_of_a_test = (seconds, 3 * seconds) if hangs and is_collected else (600, 640)
    words = [
        word
        for name, limit in zip(("timeout", "faulthandler_timeout"), limits_of_a_test, strict=True)
        for word in ("-o", f"{name}={limit}")
    ]
    command = [sys.executable, "-m", "pytest", *PLUGINS, "-c", ROOT / "pyproject.toml", *words, *options]
    return subprocess.run(
        [*prefix, *command, "-p", "no:cacheprovider", folder],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def run_into_deadlock(folder: Path, *options: str, where: str, shown: str) -> int:
    """Return the exit code of a run that has shown the deadlock, in words that a pattern finds.

    A limit of a second may be over before a busy machine has come there; then a longer one must show it.
    """
    (folder / "test_hang.py").write_text(IMPORTS + HANGS[where])
    for seconds in (1, 20):
        ended = run(folder, *options, hangs=where, seconds=seconds)
        if re.search(shown, ended.stdout + ended.stderr, re.DOTALL):
            break
    else:
        pytest.fail(ended.stdout + ended.stderr)
    return ended.returncode


@pytest.mark.parametrize("where", HANGS)
def test_a_deadlock_ends_the_run_and_shows_where_it_is(tmp_path: Path, where: str) -> None:
    assert run_into_deadlock(tmp_path, where=where, shown="in (wait|test_it)") == 1


@pytest.mark.parametrize(
    "where", ["in a thread that a test waits for", "in C", "in C, with the interpreter's lock"]
)
def test_a_deadlock_ends_a_run_in_several_processes(tmp_path: Path, where: str) -> None:
    (tmp_path / "test_other.py").write_text("def test_it():\n    pass\n")
    shown = "crashed while running 'test_hang.py::test_it'.*1 failed, 1 passed"
    assert run_into_deadlock(tmp_path, *SEVERAL, where=where, shown=shown) == 1


def test_a_process_that_has_finished_waits_for_the_others(tmp_path: Path) -> None:
    """A left thread does not hold up the end either."""
    (tmp_path / "test_long.py").write_text("import time\n\ndef test_it():\n    time.sleep(2.5)\n")
    (tmp_path / "test_left.py").write_text(IMPORTS + HANGS["in a thread that a test leaves"])
    ended = run(tmp_path, *SEVERAL)
    assert (ended.returncode, "2 passed" in ended.stdout) == (0, True)
    assert "Timeout" not in ended.stdout + ended.stderr


def test_a_module_that_hangs_ends_a_run_in_several_processes(tmp_path: Path) -> None:
    assert run_into_deadlock(tmp_path, *SEVERAL, where="in a module of tests", shown="in wait")


@pytest.mark.parametrize("when", ["in a test", "between two tests"])
def test_a_lost_process_fails_the_run_which_counts_the_tests_that_did_not_run(
    tmp_path: Path, when: str
) -> None:
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    if when == "between two tests":
        (tmp_path / "test_0_killed.py").write_text(f"""
import os, signal, pytest

@pytest.fixture(scope="module", autouse=True)
def killed():
    yield
    {kill}

@pytest.mark.parametrize("number", range(30))
def test_it(number): pass
""")
    else:
        (tmp_path / "test_0_killed.py").write_text(f"""
import os, signal, pytest

@pytest.mark.parametrize("number", range(30))
def test_it(number):
    if number == 10:
        {kill}
""")
    (tmp_path / "test_1_whole.py").write_text("def test_it(): pass")
    ended = run(tmp_path, *SEVERAL)
    assert ended.returncode == 1, ended.stdout
    numbers = {"in a test": 19, "between two tests": 0}
    assert re.search(rf"lost processes: gw\d; {numbers[when]} of 31 tests did not run", ended.stdout)


def test_a_whole_run_says_nothing_of_tests_that_did_not_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(): pass")
    ended = run(tmp_path, *SEVERAL)
    assert ended.returncode == 0, ended.stdout
    assert "did not run" not in ended.stdout


def test_signals_that_were_ignored_at_the_start_are_not_in_the_tests(tmp_path: Path) -> None:
    """A background job of a shell ignores SIGINT, `nohup` SIGHUP; tests and their children get both."""
    (tmp_path / "test_it.py").write_text("""
import signal, subprocess, sys, pytest

CHILD = "import signal; print(*map(int, map(signal.getsignal, (signal.SIGHUP, signal.SIGTERM))))"

def test_an_interrupt_is_raised():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

def test_a_child_does_not_ignore_signals():
    assert subprocess.check_output([sys.executable, "-c", CHILD]).split() == [b"0", b"0"]
""")

    ignoring = ["sh", "-c", 'trap "" INT HUP TERM; exec "$@"', "sh"]
    ended = run(tmp_path, *SEVERAL, prefix=ignoring)
    assert ended.returncode == 0, ended.stdout


def test_a_server_ends_with_the_test_process_that_started_it(tmp_path: Path) -> None:
    """Its process is killed, so no fixture ends the server: the kernel does, and the workers follow."""
    (tmp_path / "test_it.py").write_text("""
import os, signal
from tests.corpora import some_tokens, write_raw
from tests.serving import RunningServer

def test_it(tmp_path):
    corpus = write_raw(tmp_path / "web.bin", some_tokens(100))
    with RunningServer({"web": corpus}, tmp_path) as server:
        (tmp_path.parents[0] / "pids").write_text(f"{server.pid} {server.worker_pid}")
        os.kill(os.getpid(), signal.SIGKILL)
""")
    ended = run(tmp_path, f"--basetemp={tmp_path / 'base'}")
    assert ended.returncode == -signal.SIGKILL, ended.stdout + ended.stderr
    pids = [int(pid) for pid in (tmp_path / "base" / "pids").read_text().split()]
    wait_until(lambda: not any(map(is_running, pids)), "the server lives on")


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
