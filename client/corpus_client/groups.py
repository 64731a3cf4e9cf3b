"""Batches on their way together.

Consecutive batches of a slot that are small travel as one group: one copy, one widening, one event; each
batch is a view of the group. Grouping never waits, it takes what lies in the slot. Its bound is also what
a kept batch may hold on to.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Transfer(Protocol):
    """A group of batches on its way from a slot to the device."""

    def claim(self) -> torch.Tensor:
        """The group's next batch, `(rows, seq_len + 1)`, safe to use on the caller's current stream.

        Each once: the transfer forgets what was claimed, so that memory goes when the consumer drops it
        and not when the slot comes round.
        """

    def done(self) -> bool:
        """Whether the slot is not read any more; never blocks."""

    def interval(self) -> tuple[float, float] | None:
        """When the copy ran, `time.perf_counter` seconds; None: not done, or not measured."""


class Group:
    """Batches of one tensor, handed out one after another and then forgotten.

    tokens: `(batches, rows, seq_len + 1)`.
    """

    __slots__ = ("_next", "_tokens")

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens: torch.Tensor | None = tokens
        self._next = 0

    def take(self) -> tuple[int, torch.Tensor]:
        """(its number, the next batch)."""
        tokens, number = self._tokens, self._next
        if tokens is None:
            raise IndexError(f"all {number} batches of the group are claimed")
        self._next += 1
        if self._next == tokens.shape[0]:
            self._tokens = None
        return number, tokens[number]
