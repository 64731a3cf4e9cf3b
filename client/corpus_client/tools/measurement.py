"""One line of a report: something that was copied, and how long it took."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from corpus_client.tools.timing import Spread, Timing

SECTIONS = {
    "copies": "one copy, by size",
    "calls": "the call and the copy",
    "pieces": "one large copy against many small ones",
    "strided": "rows that do not lie side by side",
    "widening": "where tokens become int64",
    "waits": "what waits for the device, with other work queued before it",
    "concurrent": "a copy while the device computes",
    "loader": "batches as CorpusLoader sends them",
}
"""Name and title, in the order in which they are measured and shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What was measured.

    Args:
        section: one of `SECTIONS`.
        name: what was done, the same text at every size.
        bytes: of tokens that were moved, counted once.
        seconds: until they were there.
        held: how long the call held the CPU.
        parts: how many pieces, rows or batches they were moved in.
        waited: the call stood still until other work of the device was done; None where that is not asked.
    """

    section: str
    name: str
    bytes: int
    seconds: Spread
    held: Spread
    parts: int = 1
    waited: bool | None = None

    @property
    def bytes_per_second(self) -> float:
        """By the median."""
        return self.bytes / self.seconds.median

    def as_json(self) -> dict[str, Any]:
        """With the bandwidth."""
        return {**dataclasses.asdict(self), "bytes_per_second": self.bytes_per_second}


def measured(section: str, name: str, num_bytes: int, timing: Timing, *, parts: int = 1) -> Measurement:
    """A timing by its name."""
    return Measurement(
        section=section, name=name, bytes=num_bytes, seconds=timing.done, held=timing.held, parts=parts
    )
