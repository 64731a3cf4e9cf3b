"""Each signal that ends a process by default goes to all processes of a server."""

from __future__ import annotations

import signal
from pathlib import Path

from scripts.drills_lib.drill import Found
from tests.corpora import some_tokens, write_raw
from tests.faults.signals import ENDING, end_by

ROWS = (10, 57)
COUNT = f"{len(ENDING) + 2} signals"
SECONDS = 19
ORACLE = "what is left of the server"
RULE = "the exit code is 0, and no process and no folder of metrics is left"


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    path = write_raw(folder / "web.bin", some_tokens(10_000))
    for number in (*ENDING, signal.SIGTERM, signal.SIGINT):
        end_by(number, {"web": path}, folder / str(int(number)))
    found.figure("signals", len(ENDING) + 2)
