"""Lightning: a `LightningDataModule` whose checkpoints name the step that was trained, not the one fetched.

    data = CorpusDataModule(url, corpus="web", seq_len=1024, global_batch_size=512)
    Trainer(max_steps=100_000).fit(model, datamodule=data, ckpt_path=path_or_none)

`training_step(self, batch, batch_idx)` gets a `Batch`: `inputs, targets = batch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule

from corpus_client import errors
from corpus_client.batch import Batch
from corpus_client.integrations.feed import open_at
from corpus_client.loader import CorpusLoader


class CorpusDataModule(LightningDataModule):  # type: ignore[misc]
    """Give Lightning the batches of a plan: each of its batches, accumulated or not, is a step of the plan.

    Lightning holds one batch ahead, and drops it where `limit_train_batches` ends an epoch. So the place in
    the plan is the trainer's own count of processed batches: checkpoints get it, and each epoch begins there.

    Args:
        start_step: the step of the run's first batch.
        options: of `CorpusLoader`. Device and placement are the trainer's unless given.
    """

    def __init__(self, urls: str | Sequence[str], *, start_step: int = 0, **options: Any) -> None:
        super().__init__()
        self._urls = urls
        self._options = options
        self._start_step = start_step
        self._loader: CorpusLoader | None = None
        self._loaded: dict[str, Any] = {}

    @property
    def trained_step(self) -> int:
        """The step after the last one that was trained on."""
        if self.trainer is None:
            return self._start_step
        return self._start_step + int(self.trainer.fit_loop.epoch_loop.batch_progress.total.processed)

    def train_dataloader(self) -> _Steps:
        """Return the batches from `trained_step` on; Lightning asks when the process group is set up.

        Raises:
            StateMismatch: the checkpoint is of another plan or corpus, or its trainer is at another step.
        """
        if self.trainer is None:
            raise errors.InvalidArgument("a CorpusDataModule needs a trainer; pass it as datamodule= to fit")
        self._close()
        # Lightning's word for which part of the data a process gets; None where there is one process.
        share = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        place = share["rank"], share["num_replicas"]
        self._loader = open_at(self._urls, place, self.trainer.strategy.root_device, self._options)
        if self._loaded:
            self._loader.load_state_dict(self._loaded, trained_steps=self.trained_step)
        self._loaded = {}
        return _Steps(self, self._loader)

    def record(self, step: int, losses: Any) -> None:
        """Take the loss of each row of a batch; see `CorpusLoader.record`."""
        if self._loader is None:
            raise errors.InvalidArgument("losses are recorded in training_step, once the trainer has batches")
        self._loader.record(step, losses)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a loader whose next step is the next to train on, for checkpoints."""
        return self._loaded if self._loader is None else self._loader.state_at(self.trained_step)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the trainer's count is restored, too."""
        self._loaded = state_dict

    def teardown(self, stage: str) -> None:
        """Stop fetching."""
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        """Stop fetching."""
        self._close()

    def _close(self) -> None:
        if self._loader is not None:
            self._loader.close()


class _Steps:
    """What Lightning iterates over, from epoch to epoch.

    Not the loader itself: Lightning would save its `state_dict`, which counts the batch that is held ahead.
    """

    def __init__(self, data: CorpusDataModule, loader: CorpusLoader) -> None:
        self._data = data
        self._loader = loader

    def __iter__(self) -> Iterator[Batch]:
        self._loader.seek(self._data.trained_step)
        return iter(self._loader)
