"""What must not grow: with connections, with the number of a step, with tokens, with plans.

Here are whole requests to a server; `plans` measures the arithmetic of large plans by itself, `start` a
loader's first batch and a server with many shards.
"""

from __future__ import annotations

from scripts.benchmarks.growth import connections, kept_plans, opening, steps, waiting
from scripts.benchmarks.report import Options, Report

HELP = "throughput, memory and latency against connections, step, corpus size and number of plans"


def measure(options: Options) -> Report:
    """All parts, one after another."""
    parts = [part.measure(options) for part in (connections, waiting, opening, steps, kept_plans)]
    return Report(
        data={name: value for part in parts for name, value in part.data.items()},
        tables=[table for part in parts for table in part.tables],
        targets=[target for part in parts for target in part.targets],
        plots=[plot for part in parts for plot in part.plots],
    )
