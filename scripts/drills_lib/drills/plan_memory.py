"""Requests on one connection, of which one in a hundred is a plan that nobody has asked for before.

A worker keeps the 1,024 plans used last (`KnownPlans`), all of which are there before half of the requests.
"""

from __future__ import annotations

from pathlib import Path

from scripts.drills_lib.drill import Found
from scripts.drills_lib.requests import GROWTH_RULE, measure_growth

ROWS = (29, 59)
COUNT = "210,000 requests, 2,100 new inline plans"
SECONDS = 180
ORACLE = "the file"
RULE = GROWTH_RULE


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    measure_growth(folder, found, 210_000, new_plan_every=100)
