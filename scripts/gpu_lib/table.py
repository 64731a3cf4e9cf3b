"""Which parts there are: what each needs, how it is measured, what it should reach, how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks.report import Target
from scripts.gpu_lib import parts, report
from scripts.gpu_lib.needs import CLIENT, CUDA, SERVER, TESTS


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run.

    Args:
        needs: modules, and `CUDA`; without one of them the part is skipped.
        lines: of its data, in Markdown.
        targets: what its data should reach.
    """

    help: str
    needs: tuple[str, ...]
    run: Callable[[parts.Run], Any]
    lines: Callable[[Any], Iterator[str]]
    targets: Callable[[Any], list[Target]] = lambda data: []


SERVED = (CUDA, *CLIENT, *SERVER)

PARTS = {
    "tests": Part(
        "the tests that need a GPU; a skip is a failure",
        (*SERVED, *TESTS),
        parts.run_tests,
        report.test_lines,
        report.test_targets,
    ),
    "transfer": Part(
        "copies from pageable, torch-pinned and registered memory, and how long they hold the CPU",
        (CUDA, *CLIENT),
        parts.transfer,
        report.transfer_lines,
        report.transfer_targets,
    ),
    "overlap": Part(
        "how long training steps wait for data, by each way of feeding them",
        SERVED,
        parts.overlap,
        report.overlap_lines,
        report.overlap_targets,
    ),
    "delivered": Part(
        "tokens/s onto the GPU from one server process", SERVED, parts.delivered, report.delivered_lines
    ),
    "soak": Part(
        "10,000 steps with random delays: every token compared, memory constant",
        SERVED,
        parts.soak,
        report.soak_lines,
        report.soak_targets,
    ),
    "server": Part(
        "one server with 1 to 8 workers and 1 to 16 clients, beside bare TCP; needs no GPU",
        (*CLIENT, *SERVER),
        parts.server,
        report.server_lines,
    ),
}
