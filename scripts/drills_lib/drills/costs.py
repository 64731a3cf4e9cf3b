"""The dearest question of each kind is asked alone, and then by four callers who leave.

`scripts.benchmarks.questions` asks and measures.
"""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.questions import measure, questions, write_corpora
from scripts.drills_lib.drill import Found
from tests.serving import RunningServer

ROWS = (31, 47)
COUNT = "24 questions alone, and by 4 callers who leave"
SECONDS = 600
ORACLE = "a response of 200, or a refusal that the docs name"
RULE = "memory grows by less than 100 MiB, others wait less than 0.5 s (p99), all ends 1 s after callers left"
REFUSED = (422, 503)


def run(folder: Path, found: Found) -> None:
    """Run the drill."""
    corpora = write_corpora(folder)
    views = {name: f"docs?view={folder}/{name}.view" for name in ("one", "other")}
    worst = dict.fromkeys(
        ("CPU s", "MiB", "MiB of four who left", "p99 of others, ms", "s after they left"), 0.0
    )
    with RunningServer({**corpora, **views}, folder / "server") as server:
        for name, request in questions(server).items():
            its = measure(server, request(), timeout=120)
            found.expect(its.status in (200, *REFUSED), f"{name}: {its.status} {its.what}")
            memory = max(its.peak_mib, its.left_peak_mib)
            found.expect(memory < 100, f"{name}: {memory:.0f} MiB")
            found.expect(its.others_p99_ms < 500, f"{name}: others waited {its.others_p99_ms:.0f} ms (p99)")
            left = its.after_left_seconds
            found.expect(left < 1, f"{name}: {left:.2f} s of work after its callers had left")
            figures = (its.cpu_seconds, its.peak_mib, its.left_peak_mib, its.others_p99_ms, left)
            worst = {key: max(value, new) for (key, value), new in zip(worst.items(), figures, strict=True)}
    for key, value in worst.items():
        found.figure(f"worst {key}", float(value))
