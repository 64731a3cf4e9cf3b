"""Compute in this process what a server must answer: a figure of wrong bytes does not count."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from corpus_server.plan import Plan, Sampler
from scripts.benchmarks.contender import Shape
from scripts.benchmarks.corpus import NAME, windows_at

Order = str | dict[str, dict[str, int]]


def document_of(shape: Shape, order: Order = "shuffle") -> dict[str, Any]:
    """Return the plan of the bench as users write it: the corpus, one stage.

    It has no field that an older server would not know.
    """
    stage = {"from_step": 0, "global_batch_size": shape.rows, "mixture": {NAME: 1.0}}
    return {"seq_len": shape.length - 1, "seed": 0, "order": order, "stages": [stage]}


class Expected:
    """Give the steps of the bench's plan.

    Args:
        path: of the corpus, raw uint16.
        shape: of a global batch.
        order: of the plan.
    """

    def __init__(self, path: Path, shape: Shape, order: Order = "shuffle") -> None:
        self._length = shape.length
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self._sampler = Sampler(Plan.from_json(document_of(shape, order)), {NAME: [len(self._tokens)]})

    def starts(
        self, step: int, count: int = 1, *, rank: int = 0, world_size: int = 1
    ) -> npt.NDArray[np.int64]:
        """Return where the windows of `count` steps of a rank begin, `(count * rows,)`."""
        rows = self._sampler.locate(step, count=count, rank=rank, world_size=world_size)
        starts: npt.NDArray[np.int64] = rows[:, :, 1].ravel()
        return starts

    def batches(
        self, step: int, count: int = 1, *, rank: int = 0, world_size: int = 1
    ) -> npt.NDArray[np.uint16]:
        """Return the tokens of these steps, `(count * rows, seq_len + 1)`."""
        starts = self.starts(step, count, rank=rank, world_size=world_size)
        return windows_at(self._tokens, starts, self._length)

    def check(self, digests: Iterable[tuple[int, str]], *, count: int = 1) -> None:
        """Compare the hashes of answers' tokens, (first step, hash) each, with the expected ones.

        Raises:
            SystemExit: a hash differs, or there is none.
        """
        wanted: dict[int, str] = {}
        for step, digest in digests:
            if step not in wanted:
                wanted[step] = xxhash.xxh3_64(self.batches(step, count).data).hexdigest()
            if digest != wanted[step]:
                raise SystemExit(f"step {step} was answered with other tokens than the plan's")
        if not wanted:
            raise SystemExit("no answer came that could be checked")
