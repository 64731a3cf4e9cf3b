"""A build that is killed, or whose disk is full: nothing half-made is published, and it can be continued.

CORPUS_SOAK_SECONDS=60 kills at 50 points instead of 6.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.server.tools.building.faults import fill_disk, kill_builds
from tests.server.tools.building.sources import texts, write_jsonl
from tests.serving import command, environment

SOAK = bool(os.environ.get("CORPUS_SOAK_SECONDS"))
NUM_KILLS = 50 if SOAK else 6
# Each build starts three interpreters, which takes seconds on a busy machine.
pytestmark = pytest.mark.timeout(1200 if SOAK else 600)


def test_a_build_that_was_killed_anywhere_is_continued_to_the_same_bytes(tmp_path: Path) -> None:
    """Catalogue row 16."""
    kill_builds(tmp_path, NUM_KILLS)


def test_a_full_disk_publishes_nothing_and_the_build_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    """Catalogue row 16."""
    fill_disk(tmp_path, small_disk)


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
