"""Define what is measured: a source that delivers one batch of windows after another into a torch tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from scripts.benchmarks.corpus import windows_at

Delivered = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Whole windows `(rows, length)`, or inputs and targets, each `(rows, length - 1)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Describe a batch of `rows` windows of `length` tokens (seq_len + 1)."""

    rows: int
    length: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.length:,}"

    @property
    def num_tokens(self) -> int:
        """Tokens of a batch."""
        return self.rows * self.length

    @property
    def num_bytes(self) -> int:
        """Bytes of a batch of uint16 tokens."""
        return 2 * self.num_tokens


class Contender(Protocol):
    """Deliver batches, from construction to `close`.

    Attributes:
        name: for tables.
        pids: processes that work for it besides this one.
        ahead_bytes: how much it may prefetch.
    """

    name: str
    pids: list[int]
    ahead_bytes: int

    def next(self) -> Delivered:
        """Return the next step's batch, as the consumer reads it; valid until the next call."""

    def starts(self, step: int) -> npt.NDArray[np.int64]:
        """Return where the windows of a step begin in the corpus, `(rows,)`; steps count calls of `next`."""

    def close(self) -> None:
        """Release connections and threads."""


def check(contender: Contender, path: Path, shape: Shape, *, first: int = 0, num_steps: int = 3) -> None:
    """Compare the next batches of a contender with the corpus; `first` have been taken before.

    Raises:
        RuntimeError: it delivers other tokens than it should; its figures would mean nothing.
    """
    data = np.memmap(path, dtype=np.uint16, mode="r")
    for step in range(first, first + num_steps):
        tokens = windows_of(contender.next())
        starts = contender.starts(step)
        expected = windows_at(data, starts, shape.length)
        if len(starts) != shape.rows or not np.array_equal(tokens, expected):
            raise RuntimeError(
                f"{contender.name}: step {step} of {shape} must hold the windows at "
                f"{starts[:3].tolist()}..., got {tokens.shape} tokens that begin with "
                f"{tokens[:3, :3].tolist()}"
            )


def windows_of(delivered: Delivered) -> npt.NDArray[np.integer]:
    """Return the windows of a delivered batch, `(rows, length)`, of the delivered tokens' type."""
    if isinstance(delivered, torch.Tensor):
        return delivered.numpy()
    inputs, targets = (half.numpy() for half in delivered)
    if not np.array_equal(inputs[:, 1:], targets[:, :-1]):
        raise RuntimeError("targets must be the inputs moved by one token")
    return np.concatenate((inputs, targets[:, -1:]), axis=1)
