"""Requests for batches on one connection that stays open."""

from __future__ import annotations

from pathlib import Path

from scripts.drills_lib.drill import Found
from scripts.drills_lib.requests import GROWTH_RULE, Growth
from scripts.drills_lib.training import Web
from tests.serving import RunningServer

ROWS = (20, 29, 59)
COUNT = "200,000 requests"
SECONDS = 150
ORACLE = "the file"
RULE = GROWTH_RULE


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder)
    with RunningServer({"web": web.path}, folder) as server:
        growth = Growth(web, server)
        growth.ask(200_000)
    growth.tell(found)
