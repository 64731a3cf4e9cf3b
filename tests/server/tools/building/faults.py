"""Builds that are killed at chosen points, and builds on a full disk."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path

from tests.server.tools.building.sources import content, texts, write_jsonl
from tests.serving import command, environment

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
        check=False,
    )


def kill_builds(folder: Path, num_kills: int) -> None:
    """Kill builds at random points, and check that each can be continued to the same bytes."""
    source = write_jsonl(folder / "a.jsonl", texts(300, most_words=200))
    whole = build(source, folder / "whole", FAULT_LOG=str(folder / "log"))
    assert whole.returncode == 0, whole.stderr
    expected = content(folder / "whole")
    # Each worker does about half of what all of them do; half of it is reached by one at least.
    events = Counter((folder / "log").read_text().split())
    points = [f"parent:{1 + number}" for number in range(events["parent"])]
    points += [f"worker:{1 + number}" for number in range(events["worker"] // 2)]
    assert len(points) > 100

    for point in random.Random(1).sample(points, num_kills):
        out = folder / point.replace(":", "-")
        killed = build(source, out, FAULT_AT=point)
        assert killed.returncode in (-signal.SIGKILL, 2), (point, killed)
        assert not out.exists() or content(out) == expected, point
        again = build(source, out)
        assert again.returncode == 0, (point, again.stderr)
        assert content(out) == expected, point
        assert not list(folder.glob(f"*{out.name}.*")), point


def fill_disk(folder: Path, disk: Path) -> None:
    """Build on a disk of 1 MB: the corpus fits, its parts fit, but not both at once; then make room."""
    source = write_jsonl(folder / "a.jsonl", texts(2000, most_words=120))
    assert build(source, folder / "whole").returncode == 0
    full = build(source, disk / "out")
    assert full.returncode == 2
    assert "No space left on device" in full.stderr
    assert "make room" in full.stderr
    assert "Traceback" not in full.stderr
    assert not (disk / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
    again = build(source, disk / "out")
    assert again.returncode == 0, again.stderr
    assert content(disk / "out") == content(folder / "whole")
    assert [path.name for path in disk.iterdir()] == ["out"]
