"""OLMo-core: the data loader of its `Trainer`.

data_loader = CorpusDataLoader(url, work_dir=work_dir, dp_process_group=train_module.dp_process_group,
                               corpus="web", seq_len=1024, global_batch_size=512)
trainer = trainer_config.build(train_module, data_loader)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from olmo_core.data import DataLoaderBase
from olmo_core.distributed.utils import get_rank, get_world_size
from torch.distributed import ProcessGroup

from corpus_client import errors
from corpus_client.integrations.feed import masked_targets, open_at

IGNORED = -100
"""Labels that OLMo-core's losses leave out by default (`label_ignore_index`)."""


class CorpusDataLoader(DataLoaderBase):  # type: ignore[misc]
    """Give OLMo-core a step of a plan for each of its own; the train module cuts micro batches.

    OLMo-core's epoch has no end here, since steps go on from one epoch of the corpus into the next: set
    `max_duration` in steps or tokens. Its checkpoints hold the state, which does not depend on the degrees.

    Args:
        work_dir, dp_process_group: as OLMo-core's own loaders have them.
        options: of `CorpusLoader`. `global_batch_size` is in rows, where OLMo-core counts tokens.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        work_dir: str | Path,
        dp_process_group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        rank, world_size = get_rank(dp_process_group), get_world_size(dp_process_group)
        # The train module moves each micro batch to its device itself.
        self._loader = open_at(urls, (rank, world_size), "cpu", options)
        self._shape = self._loader.peek(0).inputs.shape
        tokens = self._shape.numel() * world_size
        super().__init__(work_dir=work_dir, global_batch_size=tokens, dp_world_size=world_size, dp_rank=rank)

    @property
    def total_batches(self) -> None:
        """None: the plan has no last step."""
        return

    def _iter_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self._loader:
            if batch.inputs.numel() != self.rank_batch_size:
                raise errors.InvalidArgument(
                    f"step {batch.step} of the plan has {batch.inputs.numel()} tokens for this rank, a batch "
                    f"of OLMo-core {self.rank_batch_size}; change the batch size by a stage of the plan and "
                    "data_loader.global_batch_size at one step"
                )
            yield {"input_ids": batch.inputs, "labels": masked_targets(batch, IGNORED)}

    def reshuffle(self, epoch: int | None = None, **_: object) -> None:
        """Note the epoch; the plan's order does not depend on it."""
        self._epoch = epoch or 1

    def get_mock_batch(self) -> dict[str, torch.Tensor]:
        """Return a batch of zeros, for the forward and backward pass before training."""
        return {"input_ids": torch.zeros(self._shape, dtype=torch.int64)}

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        """Return the tokens of a step over all ranks."""
        return int(self.global_batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the batches yielded; OLMo-core holds none ahead."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the state's next step."""
        self._loader.load_state_dict(state_dict)
        self.batches_processed = self._loader.step
