"""Compute in this process what a server must answer: a figure of wrong bytes does not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from corpus_server.plan import Plan, Sampler
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.corpus import NAME, windows_at

Order = str | dict[str, dict[str, int]]


def document_of(shape: Shape, **fields: Any) -> dict[str, Any]:
    """Return the plan of the bench as users write it: the corpus, one stage; `fields` are added.

    It has no field that an older server would not know.
    """
    stage = {"from_step": 0, "global_batch_size": shape.rows, "mixture": {NAME: 1.0}}
    return {"seq_len": shape.length - 1, "seed": 0, "order": "shuffle", "stages": [stage], **fields}


class Expected:
    """Give the steps of the bench's plan.

    Args:
        path: of the corpus, raw uint16.
        shape: of a global batch.
        fields: as of `document_of`.
    """

    def __init__(self, path: Path, shape: Shape, **fields: Any) -> None:
        self._length = shape.length
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self._sampler = Sampler(Plan.from_json(document_of(shape, **fields)), {NAME: [len(self._tokens)]})

    def starts(
        self, step: int, count: int = 1, *, rank: int = 0, world_size: int = 1
    ) -> npt.NDArray[np.int64]:
        """Return where the windows of `count` steps of a rank begin, `(count * rows,)`."""
        rows = self._sampler.locate(step, count=count, rank=rank, world_size=world_size)
        starts: npt.NDArray[np.int64] = rows[:, :, 1].ravel()
        return starts

    def batch(self, step: int, *, rank: int, world_size: int) -> npt.NDArray[np.uint16]:
        """Return the tokens of a step of a rank, `(rows, seq_len + 1)`."""
        return windows_at(self._tokens, self.starts(step, rank=rank, world_size=world_size), self._length)
