"""A DataLoader with the methods of torchdata's `StatefulDataLoader`, whose state is a step of the plan.

dataset = CorpusIterableDataset(url, corpus="web", seq_len=1024, global_batch_size=512)
loader = StatefulCorpusLoader(dataset, num_workers=2, pin_memory=True)
checkpoint["data"] = loader.state_dict()
loader.load_state_dict(checkpoint["data"])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from corpus_client import errors
from corpus_client.batch import Batch
from corpus_client.dataset import CorpusIterableDataset
from corpus_client.plan.iteration import check_asker


class StatefulCorpusLoader(DataLoader[Batch]):
    """A DataLoader that gives the dataset's batches one by one, in order, and knows which comes next.

    torchdata's own state is of its workers, and needs as many to be resumed. This one is that of the dataset
    and of `CorpusLoader`, so any number of workers goes on. It counts the batches yielded here: a loop that
    holds one ahead saves `dataset.state_at(batch.step + 1)` of the batch that it trained on.

    Args:
        options: of torch's `DataLoader`, but for `batch_size`.
    """

    dataset: CorpusIterableDataset

    def __init__(self, dataset: CorpusIterableDataset, **options: Any) -> None:
        super().__init__(dataset, batch_size=None, **options)
        self._next_step = dataset.first_step

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # DataLoader names a private class
        """Yield a pass.

        Raises:
            StepOutOfOrder: a worker gave another step than the next one.
        """
        self._next_step = self.dataset.first_step
        for batch in super().__iter__():
            if batch.step != self._next_step:
                raise errors.StepOutOfOrder(
                    f"the next batch must be of step {self._next_step}, got one of {batch.step}; do workers "
                    "share the dataset with something else that iterates over it?"
                )
            self._next_step += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch yielded: `{"plan", "plan_id", "next_step"}`.

        Raises:
            StateMismatch: Lightning asks, and holds a batch ahead.
        """
        check_asker(self)
        return self.dataset.state_at(self._next_step)

    def load_state_dict(self, state_dict: Mapping[str, Any], *, trained_steps: int | None = None) -> None:
        """Go on at the state's next step, with the next pass; `trained_steps` as `CorpusLoader` has it."""
        self.dataset.load_state_dict(state_dict, trained_steps=trained_steps)
        self._next_step = self.dataset.first_step
