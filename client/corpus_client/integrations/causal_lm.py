"""A batch as the dict that Hugging Face's causal language models take, whole rows or documents in rows."""

from __future__ import annotations

from typing import Any

import torch

from corpus_client.batch import Batch
from corpus_client.integrations.feed import masked_targets, targets_in

IGNORED = -100
"""Labels that the losses of transformers leave out."""


def causal_lm(batch: Batch) -> dict[str, torch.Tensor]:
    """Return `{"input_ids", "labels"}`: the whole windows, `(rows, seq_len + 1)` each.

    These models shift labels themselves: position i is compared with label i + 1. Given a row's inputs and
    targets they would shift twice, and learn to predict the token after the next one. Given the window as
    both, they learn exactly the row's targets:

        window     5 6 9 7         seq_len 3: inputs 5 6 9, targets 6 9 7
        input_ids  5 6 9 7         the last position's prediction is compared with nothing
        labels     . 6 9 7         the first label is never compared, so it is ignored: . is -100

    A model of 1,024 positions takes `seq_len=1023`. A target that is masked (by `ignore_index`, or by its
    corpus) is -100 among the labels.
    """
    return _windows(batch, masked_targets(batch, IGNORED))


def packed_lm(batch: Batch) -> dict[str, Any]:
    """Return `{"input_ids", "labels", "position_ids", "use_cache"}`: each document of a row stands by itself.

    Positions begin at 0 with each document. A model of transformers that gets positions, no attention mask
    and no cache lets no document see another one; so `use_cache` is False. The first token of a document is
    -100 among the labels; all else is as in `causal_lm`. The batch needs its end-of-text id.
    """
    within, positions = batch.loss_mask, batch.position_ids
    windows = _windows(batch, targets_in(batch, within, IGNORED))
    last = torch.where(within[:, -1:], positions[:, -1:] + 1, 0)
    return {**windows, "position_ids": torch.cat((positions, last), dim=1), "use_cache": False}


def _windows(batch: Batch, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """targets: the batch's own, IGNORED where they are masked."""
    inputs = batch.inputs
    rows, seq_len = inputs.shape
    input_ids, labels = (inputs.new_empty(rows, seq_len + 1) for _ in range(2))
    ids, shifted, first, second = map(_writable, (input_ids, labels, inputs, targets))
    ids[:, :-1] = first
    ids[:, -1:] = _writable(batch.targets[:, -1:].clamp_min(0))  # nothing is predicted from it, masked or not
    shifted[:, :1] = IGNORED
    shifted[:, 1:] = second
    return {"input_ids": input_ids, "labels": labels}


def _writable(tensor: torch.Tensor) -> Any:
    """Return the tensor, on the CPU as NumPy sees it: torch would wake its threads for copies this small."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor
