"""Requests for batches on one connection that stays open."""

from __future__ import annotations

from pathlib import Path

from scripts.drills_lib.drill import Found
from scripts.drills_lib.requests import GROWTH_RULE, measure_growth

ROWS = (20, 29, 59)
COUNT = "200,000 requests"
SECONDS = 150
ORACLE = "the file"
RULE = GROWTH_RULE


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    measure_growth(folder, found, 200_000)
