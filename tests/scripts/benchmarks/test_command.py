"""The bench's command: axes found, reports shown and saved, servers ended."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from scripts.benchmarks import __main__ as command
from scripts.benchmarks.report import Options, Report, Table, Target
from scripts.benchmarks.servers import spawn_peer
from scripts.processes import ServerFailed, running

OPTIONS = Options(cache=Path("unused"))


REPORT = Report(
    data={"response": 42},
    tables=[Table(title="some", columns=["a", "b"], rows=[["x|y", "[red]2"]])],
    targets=[
        Target(figure="fast", reached=2.0, bound="at least", wanted=1.0),
        Target(figure="small", reached=2.0, bound="at most", wanted=1.0, unit="ms"),
    ],
    notes=["A note."],
)


class Axis:
    HELP = "an axis of the test"

    def __init__(self, error: BaseException | None = None) -> None:
        self._error = error

    def measure(self, options: Options) -> Report:
        if self._error:
            raise self._error
        return REPORT


def await_end(processes: Sequence[psutil.Process]) -> None:
    """Killed processes take a moment to go; some machines keep them as zombies."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit("did not start")], ids=repr)
def test_an_axis_that_fails_does_not_take_the_others_along(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    reports, failures = command.measure_all({"bad": Axis(error), "good": Axis()}, OPTIONS)
    assert reports == {"good": REPORT}
    assert failures == {"bad": f"{type(error).__name__}: {error}"}
    assert "Traceback" in capsys.readouterr().err


def test_the_command_prints_what_the_chosen_axes_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_axes", lambda: {"one": Axis(), "two": Axis()})
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert command.main(["two", "--json", "--save"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    found = json.loads(capsys.readouterr().out)
    assert list(found["axes"]) == ["two"]
    assert found["command"].startswith("scripts/bench two --json")
    assert "numpy" in found["machine"]
    assert [path.name for path in (tmp_path / "results").glob("*.md")] == [
        f"{found['title'][-10:]}-bench-two.md"
    ]


def test_a_bench_that_is_told_to_end_leaves_no_server_behind() -> None:
    words = [sys.executable, "-m", "scripts.benchmarks", "latency", "--quick"]
    with running(words, stop_seconds=60) as process:
        bench = psutil.Process(process.pid)
        while not (servers := bench.children(recursive=True)):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.wait()
    assert process.returncode not in (0, None)
    await_end(servers)


def test_a_process_and_its_children_are_gone_after_the_block() -> None:
    script = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True); child.wait()"
    )
    with running([sys.executable, "-c", script], stdout=subprocess.PIPE, stop_seconds=0.2) as process:
        assert process.stdout
        child = psutil.Process(int(process.stdout.readline()))
    assert process.returncode is not None
    await_end([child])


def test_a_peer_that_does_not_start_fails_with_its_last_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(ServerFailed, match="ended with exit code 1"),
        spawn_peer("bare", tmp_path / "absent.bin"),
    ):
        pytest.fail("it never was ready")
    assert "No such file" in capfd.readouterr().err
