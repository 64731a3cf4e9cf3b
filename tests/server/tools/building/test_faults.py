"""A build that is killed, or whose disk is full: nothing half-made is published, and it can be continued.

CORPUS_SOAK_SECONDS=60 kills at 50 points instead of 6.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.server.tools.building.sources import content, texts, write_jsonl
from tests.serving import command, environment

SOAK = bool(os.environ.get("CORPUS_SOAK_SECONDS"))
NUM_KILLS = 50 if SOAK else 6
# Each build starts three interpreters, which takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(1200 if SOAK else 300)
FAULT = Path(__file__).with_name("fault")
# Small parts and shards, so that there are many files to be killed at.
PRELUDE = "import corpus_server.tools.building.sources as s; s.PART_BYTES = 20_000"
OPTIONS = ("--tokenizer", "bytes", "--shard-tokens", "30000", "--split", "val=0.2", "--processes", "2")
OPTIONS += ("--keep", "n")


def build(source: Path, out: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `corpus-server build` to its end, whatever that is."""
    env = environment(**variables)
    env["PYTHONPATH"] = os.pathsep.join((str(FAULT), env["PYTHONPATH"]))
    return subprocess.run(
        command("build", source, "--out", out, *(options or OPTIONS), prelude=PRELUDE),
        capture_output=True,
        text=True,
        env=env,
        timeout=100,
        check=False,
    )


def test_a_build_that_was_killed_anywhere_is_continued_to_the_same_bytes(tmp_path: Path) -> None:
    """Catalogue row 16."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(300, most_words=200))
    whole = build(source, tmp_path / "whole", FAULT_LOG=str(tmp_path / "log"))
    assert whole.returncode == 0, whole.stderr
    expected = content(tmp_path / "whole")
    # Each worker does about half of what all of them do; half of it is reached by one at least.
    events = Counter((tmp_path / "log").read_text().split())
    points = [f"parent:{1 + number}" for number in range(events["parent"])]
    points += [f"worker:{1 + number}" for number in range(events["worker"] // 2)]
    assert len(points) > 100

    for point in random.Random(1).sample(points, NUM_KILLS):
        out = tmp_path / point.replace(":", "-")
        killed = build(source, out, FAULT_AT=point)
        assert killed.returncode in (-signal.SIGKILL, 2), (point, killed)
        assert not out.exists() or content(out) == expected, point
        again = build(source, out)
        assert again.returncode == 0, (point, again.stderr)
        assert content(out) == expected, point
        assert not list(tmp_path.glob(f"*{out.name}.*")), point


def test_a_full_disk_publishes_nothing_and_the_build_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    """Catalogue row 16. The corpus fits, its parts fit, but not both at once."""
    source = write_jsonl(tmp_path / "a.jsonl", texts(2000, most_words=120))
    assert build(source, tmp_path / "whole").returncode == 0
    full = build(source, small_disk / "out")
    assert full.returncode == 2
    assert "No space left on device" in full.stderr
    assert "make room" in full.stderr
    assert "Traceback" not in full.stderr
    assert not (small_disk / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
    again = build(source, small_disk / "out")
    assert again.returncode == 0, again.stderr
    assert content(small_disk / "out") == content(tmp_path / "whole")
    assert [path.name for path in small_disk.iterdir()] == ["out"]


def peak_bytes(source: Path, out: Path, *options: str) -> int:
    """Build a corpus; return the sum of the most memory that each of its processes ever had."""
    prelude = "import corpus_server.tools.building.sources as s; s.PART_BYTES = 1_000_000"
    arguments = command("build", source, "--out", out, *options, prelude=prelude)
    peaks: dict[int, int] = {}
    with subprocess.Popen(arguments, env=environment(), stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            for process in (psutil.Process(running.pid), *psutil.Process(running.pid).children()):
                with contextlib.suppress(OSError, psutil.Error):  # it has ended
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    if peak := re.search(r"VmHWM:\s+(\d+) kB", status):
                        peaks[process.pid] = int(peak[1]) * 1024
            time.sleep(0.01)
    assert running.returncode == 0
    return sum(peaks.values())


def test_ten_times_the_input_takes_no_more_memory(tmp_path: Path) -> None:
    small = write_jsonl(tmp_path / "small.jsonl", texts(2500, most_words=600))
    assert 4e6 < small.stat().st_size < 6e6
    large = tmp_path / "large.jsonl"
    large.write_bytes(10 * small.read_bytes())
    options = ("--tokenizer", "bytes", "--processes", "2", "--shard-tokens", "2000000")
    before = peak_bytes(small, tmp_path / "of-small", *options)
    after = peak_bytes(large, tmp_path / "of-large", *options)
    print(f"{before >> 20} MiB, then {after >> 20} MiB")
    assert after < 1.1 * before
