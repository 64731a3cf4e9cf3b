"""nanoGPT: its `get_batch(split)`, from a plan. Copy this file beside `train.py`:

from for_nanogpt import GetBatch
get_batch = GetBatch(url, {"train": "owt-train", "val": "owt-val"}, batch_size, block_size, device=device)
get_batch.load_state_dict(checkpoint["data"])     # with init_from = "resume"
checkpoint["data"] = get_batch.state_dict()       # where train.py saves
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from corpus_client import CorpusLoader, Placement
from corpus_client.integrations.feed import masked_targets


class GetBatch:
    """Return `(x, y)` of a split: each call takes the next step of one plan.

    Evaluating takes no steps from training, though `estimate_loss` asks for batches of "train", too: it does
    so without gradients, and such calls are answered by loaders of their own. Every evaluation has the same
    batches, so that its losses can be compared, and are the same after a resume.

    nanoGPT's loop holds a batch while it saves a checkpoint: the one got last is not trained on yet, and the
    state goes on with it.

    Args:
        corpora: name of the corpus of each split; "train" is one of them.
        batch_size: rows of a call on each rank; the plan has `batch_size * world_size`, which must stay.
        block_size: the plan's `seq_len`.
        options: of `CorpusLoader`, as `order`: nanoGPT itself draws in the order "random".
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        corpora: Mapping[str, str],
        batch_size: int,
        block_size: int,
        *,
        seed: int = 1337,
        placement: Placement | None = None,
        **options: Any,
    ) -> None:
        placement = placement or Placement()
        options = {**options, "seq_len": block_size}
        rows = batch_size * placement.find().world_size
        self._train = CorpusLoader(
            urls, corpus=corpora["train"], global_batch_size=rows, seed=seed, placement=placement, **options
        )
        # Whole batches on the rank that evaluates, so that losses do not depend on the number of ranks.
        alone = Placement(rank=0, world_size=1)
        self._evaluated = {
            split: CorpusLoader(
                urls, corpus=name, global_batch_size=batch_size, seed=seed + 1, placement=alone, **options
            )
            for split, name in corpora.items()
        }
        self._held_step: int | None = None
        self._evaluating = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets: `(batch_size, block_size) int64` each, contiguous, on the device."""
        if split == "train" and torch.is_grad_enabled():
            self._evaluating = False
            batch = next(self._train)
            self._held_step = batch.step
        else:
            if not self._evaluating:
                for loader in self._evaluated.values():
                    loader.seek(0)
            self._evaluating = True
            batch = next(self._evaluated[split])
        return batch.inputs, masked_targets(batch, -1)  # nanoGPT's loss leaves -1 out

    def state_dict(self) -> dict[str, Any]:
        """Return the state of a run whose next batch is the one that the loop holds."""
        step = self._train.step if self._held_step is None else self._held_step
        return self._train.state_at(step)

    def load_state_dict(self, saved: Mapping[str, Any], *, trained_steps: int | None = None) -> None:
        """Go on with the batch that the state names; before the first call.

        trained_steps: `iter_num * gradient_accumulation_steps`, to compare with the state.
        """
        self._train.load_state_dict(saved, trained_steps=trained_steps)
        self._held_step = None

    def close(self) -> None:
        """Stop fetching; idempotent."""
        for loader in (self._train, *self._evaluated.values()):
            loader.close()
