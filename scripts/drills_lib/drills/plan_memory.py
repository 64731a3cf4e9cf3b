"""Requests on one connection, of which one in a hundred is a plan that nobody has asked for before."""

from __future__ import annotations

from pathlib import Path

from scripts.drills_lib.drill import Found
from scripts.drills_lib.requests import GROWTH_RULE, Growth
from scripts.drills_lib.training import Web
from tests.serving import RunningServer

ROWS = (29, 59)
COUNT = "70,000 requests, 700 new inline plans"
SECONDS = 90
ORACLE = "the file"
RULE = GROWTH_RULE


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    web = Web(folder)
    with RunningServer({"web": web.path}, folder) as server:
        growth = Growth(web, server)
        growth.ask(70_000, new_plan_every=100)
    growth.tell(found)
