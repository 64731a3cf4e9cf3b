"""A plan's steps in micro batches, for trainers that fetch one per forward pass and accumulate gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Self

from corpus_client import errors
from corpus_client.batch import Batch
from corpus_client.loader import CorpusLoader


class MicroBatches(Iterator[Batch]):
    """Yield a loader's batches in parts of `num_rows`: a step of the plan is one of the optimizer.

        plan: 12 rows a step    2 ranks, num_rows=3    a rank's micro batches: 3 3 | 3 3 | ...
                                3 ranks, num_rows=2                            2 2 | 2 2 | ...

    So another number of ranks, or of rows in a forward pass, goes on with the same steps. The trainer must
    not read ahead: the state is that of the micro batches yielded.
    """

    def __init__(self, loader: CorpusLoader, num_rows: int) -> None:
        self.loader = loader
        self._num_rows = num_rows
        self._parts: deque[Batch] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next micro batch; `step` is the plan's."""
        if not self._parts:
            self._parts.extend(next(self.loader).split(self._num_rows))
        return self._parts.popleft()

    @property
    def num_left(self) -> int:
        """Micro batches of the current step that are still to come."""
        return len(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state.

        Raises:
            StepOutOfOrder: the trainer's step is over and the plan's is not.
        """
        if self._parts:
            raise errors.StepOutOfOrder(
                f"a checkpoint was asked for with {len(self._parts)} micro batches of step "
                f"{self.loader.step - 1} left; the plan's global_batch_size must be the trainer's, "
                "gradient accumulation included"
            )
        return self.loader.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on at the state's next step."""
        self._parts.clear()
        self.loader.load_state_dict(saved)
