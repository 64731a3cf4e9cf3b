"""The only worker of a server is killed again and again: alone, and under a training loop.

`scripts.start_cost` has what is measured, and compares commits.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

from scripts.drills_lib.drill import Found
from scripts.processes import ROOT
from scripts.start_cost import longest_wait, measure
from tests.corpora import some_tokens, write_raw

ROWS = (8, 32, 57)
COUNT = "20 starts and kills; 20 kills under a loop"
SECONDS = 100
ORACLE = "every batch in order, with its checksum"
RULE = "the worker is back within 0.5 s, always; ready takes 1 s of CPU; the loop waits less than 0.5 s"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    corpus = write_raw(folder / "web.bin", some_tokens(2_000_000))
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(20):
        measure(ROOT, corpus, seconds)
    limits = {"ready, s": 10.0, "CPU, s": 1.0, "replaced, s": 0.5}
    for name, measured in seconds.items():
        found.figure(f"median {name}", statistics.median(measured))
        found.figure(f"worst {name}", max(measured), most=limits[name])
    found.figure("longest wait of the loop, s", longest_wait(ROOT, corpus, 20), most=0.5)
