"""Questions that take long are generators, so that a server can stop between two slices of work."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

_Answer = TypeVar("_Answer")


def finish(slices: Generator[None, None, _Answer]) -> _Answer:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as stopped:
            answer: _Answer = stopped.value
            return answer
