"""Builds are killed at random points, and one meets a full disk; each is begun again."""

from __future__ import annotations

from pathlib import Path

from scripts.drills_lib.drill import Found, Skipped
from scripts.drills_lib.training import small_disk
from scripts.processes import ROOT
from tests.server.tools.building.faults import fill_disk, kill_builds
from tests.serving import RunningServer

ROWS = (16,)
COUNT = "20 kills, a full disk"
SECONDS = 240
ORACLE = "the files of a build that nothing happened to"
RULE = "nothing half-made is published, and the same command makes the same bytes"
NUM_KILLS = 20


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    if RunningServer.tree != ROOT:
        raise Skipped("a build needs no server")
    for name in ("killed", "full"):
        (folder / name).mkdir()
    kill_builds(folder / "killed", NUM_KILLS)
    found.figure("kills", NUM_KILLS)
    with small_disk(folder / "disk", "1m") as disk:
        fill_disk(folder / "full", disk)
