"""accelerate: batches that `Accelerator` neither divides again nor replays; their state is in `save_state`.

loader = AccelerateLoader(accelerator, url, corpus="web", seq_len=1023, global_batch_size=512)
for batch in loader:                                     # {"input_ids", "labels"}
    with accelerator.accumulate(model): ...
accelerator.save_state(folder)                           # load_state goes on after the step trained on
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from accelerate import Accelerator
from torch.utils.data import DataLoader

from corpus_client import errors
from corpus_client.batch import Batch
from corpus_client.dataset import CorpusIterableDataset
from corpus_client.integrations.causal_lm import causal_lm
from corpus_client.integrations.feed import Feed, check_place, open_at


class AccelerateLoader(Feed):
    """The batches of a plan for this process, on its device; `accelerator.prepare` returns it as it is.

    It registers itself, so that `save_state` and `load_state` save and load its place. The place is after
    the last batch for which `accelerator.accumulate` was entered, whatever the loop holds ahead. Where a loop
    does without `accumulate`, it is after the last batch yielded: save when that one was trained on.

    Args:
        convert: what a batch becomes; None: it stays a `Batch`, `inputs, targets = batch`.
        options: of `CorpusLoader`. Device and placement are the accelerator's unless given.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        urls: str | Sequence[str],
        *,
        convert: Callable[[Batch], Any] | None = causal_lm,
        **options: Any,
    ) -> None:
        super().__init__(open_at(urls, place_of(accelerator), accelerator.device, options), convert)
        self._accelerator = accelerator
        self._begun = accelerator.step  # it counts how often `accumulate` was entered
        accelerator.register_for_checkpointing(self)

    @property
    def dataset(self) -> NoReturn:
        """Refuse: `accelerator.skip_first_batches` asks for it, and would skip twice what was trained on."""
        raise _NotADataLoader(
            "accelerator.skip_first_batches is not for an AccelerateLoader: load_state has moved it to the "
            "first batch that was not trained on; to begin at step n without a state call "
            "loader.load_state_dict(loader.loader.state_at(n))"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run that goes on after the last batch trained on.

        Raises:
            StepOutOfOrder: `accumulate` was entered more often than batches were yielded.
        """
        entered = self._accelerator.step - self._begun
        self.trained(entered if entered else self.loader.step - self.step)
        self._begun = self._accelerator.step
        return super().state_dict()

    def load_state_dict(self, saved: Mapping[str, Any], *, trained_steps: int | None = None) -> None:
        """Go on at the state's next step; `load_state` calls it, after it has set the accelerator's step."""
        super().load_state_dict(saved, trained_steps=trained_steps)
        self._begun = self._accelerator.step


class _NotADataLoader(errors.InvalidArgument, AttributeError):
    """An AttributeError too, so that `hasattr` says no."""


def already_sharded(data_loader: DataLoader[Batch], accelerator: Accelerator) -> DataLoader[Batch]:
    """Declare that a DataLoader over a `CorpusIterableDataset` has this process's rows; return it.

    `accelerator.prepare` then leaves it alone, where it would divide its batches again or send rank 0's rows
    to all. It moves no batch to the device: `batch.to(accelerator.device, non_blocking=True)` does.

    Raises:
        WrongRows: the dataset has the rows of another rank.
    """
    dataset = data_loader.dataset
    if not isinstance(dataset, CorpusIterableDataset):
        raise errors.InvalidArgument(
            f"data_loader must be over a CorpusIterableDataset, got one over a {type(dataset).__name__}"
        )
    check_place(dataset.place, place_of(accelerator), "accelerate")
    dataset.declared = True
    data_loader._is_accelerate_prepared = True  # what `prepare` asks for
    return data_loader


def place_of(accelerator: Accelerator) -> tuple[int, int]:
    """Return (rank, world size) of this process's rows, which tensor and context parallel ranks share."""
    config = getattr(accelerator, "parallelism_config", None)
    sharing = 1 if config is None else config.non_data_parallel_size
    return accelerator.process_index // sharing, accelerator.num_processes // sharing
