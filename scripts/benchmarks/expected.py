"""What a server must answer, worked out in this process: no figure counts for wrong bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from corpus_server.plan import Plan, Sampler, Stage
from scripts.benchmarks.corpus import NAME, windows_at


def plan_of(rows: int, seq_len: int, seed: int = 0) -> Plan:
    """The bench's corpus, shuffled; what a request that names no plan asks for."""
    return Plan(seq_len=seq_len, seed=seed, stages=(Stage(global_batch_size=rows, mixture={NAME: 1.0}),))


class Expected:
    """The steps of a plan over the bench's corpus.

    Args:
        path: of the corpus, raw uint16.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self.plan = plan
        self._tokens = np.memmap(path, dtype=np.uint16, mode="r")
        self._sampler = Sampler(plan, {NAME: [len(self._tokens)]})

    def starts(
        self, step: int, count: int = 1, *, rank: int = 0, world_size: int = 1
    ) -> npt.NDArray[np.int64]:
        """Where the windows of a rank's steps from `step` on begin, `(count * rows,)`."""
        rows = self._sampler.locate(step, count=count, rank=rank, world_size=world_size)
        starts: npt.NDArray[np.int64] = rows[:, :, 1].ravel()
        return starts

    def batches(
        self, step: int, count: int = 1, *, rank: int = 0, world_size: int = 1
    ) -> npt.NDArray[np.uint16]:
        """The tokens of these steps, `(count * rows, seq_len + 1)`."""
        starts = self.starts(step, count, rank=rank, world_size=world_size)
        return windows_at(self._tokens, starts, self.plan.seq_len + 1)

    def check(self, digests: Iterable[tuple[int, str]], *, count: int = 1) -> None:
        """Compare answers, (first step, hash) each, with what they must be.

        Raises:
            SystemExit: one differs, or there is none.
        """
        wanted: dict[int, str] = {}
        for step, digest in digests:
            if step not in wanted:
                wanted[step] = xxhash.xxh3_64(self.batches(step, count).data).hexdigest()
            if digest != wanted[step]:
                raise SystemExit(f"step {step} was answered with other tokens than the plan's")
        if not wanted:
            raise SystemExit("no answer came that could be checked")
