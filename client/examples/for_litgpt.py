"""litgpt: a data module for `litgpt pretrain`. Copy this file to where you start it, with `PYTHONPATH=.`.

    data:
      class_path: for_litgpt.CorpusData
      init_args: {url: http://data:8000, corpus: web, val_corpus: held-out, global_batch_size: 512}

The lines are those of its configuration file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader, IterableDataset

from corpus_client import Batch, CorpusLoader
from corpus_client.integrations.feed import masked_targets


@dataclass
class CorpusData(DataModule):  # type: ignore[misc]
    """The batches of a plan, whose state litgpt keeps in its checkpoints."""

    url: str
    """Of the server."""
    corpus: str
    """What to train on."""
    val_corpus: str
    """What to validate on: its beginning, the same at each validation."""
    global_batch_size: int
    """litgpt's `train.global_batch_size`: a step of the plan is one of the optimizer."""
    seed: int = 42
    """Of the plan."""

    batch_size: int = field(default=1, init=False, repr=False)
    max_seq_length: int = field(default=-1, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__init__()

    def connect(
        self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None
    ) -> None:
        """Take what litgpt knows; batch_size: rows of a micro batch."""
        self.batch_size = batch_size
        self.max_seq_length = max_seq_length or -1

    def train_dataloader(self) -> _Loader:
        """Return the micro batches of this rank."""
        return _Loader(self._rows(self.corpus, seed=self.seed))

    def val_dataloader(self) -> _Loader:
        """Return the micro batches of this rank, at each iteration from the beginning."""
        return _Loader(self._rows(self.val_corpus, order="sequential"), keeps_place=False)

    def _rows(self, corpus: str, **plan: Any) -> _Rows:
        plan |= {"seq_len": self.max_seq_length, "global_batch_size": self.global_batch_size}
        return _Rows(CorpusLoader(self.url, corpus=corpus, **plan), self.batch_size)


class _MicroBatch:
    """Rows of `seq_len + 1` tokens, which count as trained on once litgpt cuts its inputs out of them.

    litgpt fetches one batch more than it trains on before its last checkpoint. That one is never cut.
    What litgpt cuts out, `[:, 0:seq_len]` and `[:, 1:seq_len + 1]`, the loader made already: contiguous and
    int64, so that litgpt's `.contiguous().long()` copies nothing.
    """

    def __init__(self, batch: Batch, taken: Callable[[], None]) -> None:
        self._batch = batch
        self._taken = taken

    def __getitem__(self, key: Any) -> torch.Tensor:
        self._taken()
        seq_len = self._batch.inputs.shape[1]
        if key == (slice(None), slice(0, seq_len)):
            return self._batch.inputs
        if key == (slice(None), slice(1, seq_len + 1)):
            return masked_targets(self._batch, -100)  # litgpt's loss leaves -100 out
        return self._batch.tokens[key]

    def to(self, device: torch.device, **_: Any) -> _MicroBatch:
        """Return the same on a device; Fabric asks for it."""
        return _MicroBatch(self._batch.to(device), self._taken)


class _Rows(IterableDataset[_MicroBatch]):
    """Micro batches from the first step on that was not trained on as a whole."""

    def __init__(self, loader: CorpusLoader, num_rows: int) -> None:
        super().__init__()
        self.loader = loader
        self.step = 0
        self.num_taken = 0  # micro batches of `step` that were trained on
        self._num_rows = num_rows

    def __iter__(self) -> Iterator[_MicroBatch]:
        self.loader.seek(self.step)
        for batch in self.loader:
            parts = batch.split(self._num_rows)
            for number, part in enumerate(parts, 1):
                after = (batch.step, number) if number < len(parts) else (batch.step + 1, 0)
                yield _MicroBatch(part, partial(self._taken, *after))

    def _taken(self, step: int, num_taken: int) -> None:
        self.step, self.num_taken = step, num_taken


class _Loader(DataLoader[_MicroBatch]):
    """A DataLoader, because Fabric takes nothing else; in this process, since the loader has a thread."""

    def __init__(self, rows: _Rows, *, keeps_place: bool = True) -> None:
        super().__init__(rows, batch_size=None)
        self._rows = rows
        self._keeps_place = keeps_place

    def __iter__(self) -> Any:
        if not self._keeps_place:
            self._rows.step = 0
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run that goes on behind the steps trained on."""
        if self._rows.num_taken:
            warnings.warn(
                f"a checkpoint within step {self._rows.step} of the plan: a resumed run repeats the "
                f"{self._rows.num_taken} micro batches that were trained on; is CorpusData's "
                "global_batch_size litgpt's train.global_batch_size?",
                stacklevel=2,
            )
        return self._rows.loader.state_at(self._rows.step)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on at the state's next step."""
        self._rows.loader.load_state_dict(saved)
        self._rows.step, self._rows.num_taken = self._rows.loader.step, 0
