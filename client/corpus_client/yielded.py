"""What a loader yields: tokens, their two views, their document structure when asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from corpus_client import errors, structure


@dataclass(frozen=True, eq=False)
class Batch:
    """One rank's part of one step.

    The structure (`positions` to `loss_mask`) is computed on the device when it is first asked for, then
    kept; it needs `eot_id`. Only `cu_seqlens` and `max_seqlen` wait for a GPU. Under context parallelism
    everything but `tokens` is this rank's contiguous slice of the sequence, `seq_len` its length.

    Args:
        step: the training step whose tokens these are.
        tokens: `(rows, seq_len + 1)`, C order, on the loader's device. With `dtype=None` on the CPU IT IS
            A VIEW OF SLOT MEMORY, OVERWRITTEN AFTER THE NEXT `__next__`: clone what must live longer, and
            ask for the structure before. Otherwise it is the caller's own.
        eot_id: the token that ends a document; None: not told.
        context: (rank, size) of the slice; (0, 1) is the whole sequence.
    """

    step: int
    tokens: torch.Tensor
    eot_id: int | None = None
    context: tuple[int, int] = (0, 1)

    def pin_memory(self) -> Batch:
        """The same in page-locked memory of its own; what a DataLoader's `pin_memory=True` calls."""
        return replace(self, tokens=self.tokens.pin_memory())

    def to(
        self, device: str | torch.device, *, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> Batch:
        """The same on a device, by one transfer, and widened to `dtype` there: tokens travel as they are.

        Does not wait for the transfer only with `non_blocking` and out of page-locked memory.
        """
        tokens = self.tokens.to(device, non_blocking=non_blocking)
        return replace(self, tokens=tokens if dtype is None else tokens.to(dtype))

    @cached_property
    def inputs(self) -> torch.Tensor:
        """`(rows, seq_len)`, a view of `tokens`."""
        return self.tokens[:, self._columns]

    @cached_property
    def targets(self) -> torch.Tensor:
        """`(rows, seq_len)`, a view of `tokens`, one token further than `inputs`."""
        columns = self._columns
        return self.tokens[:, columns.start + 1 : columns.stop + 1]

    @cached_property
    def positions(self) -> torch.Tensor:
        """`(rows, seq_len) int64`: place in the document, 0 after each end of text.

        A document that began before its row counts from the row's start; one that began in another
        context rank's slice goes on counting.
        """
        return structure.positions(self._starts)[:, self._columns]

    @cached_property
    def document_ids(self) -> torch.Tensor:
        """`(rows, seq_len) int32`: the number of the document in its row, from 0."""
        return structure.document_ids(self._starts)[:, self._columns]

    @cached_property
    def loss_mask(self) -> torch.Tensor:
        """`(rows, seq_len) bool`: False where the target is the first token of another document."""
        return structure.loss_mask(self.inputs, self._known_eot_id)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """`(documents + 1,) int32`: borders of documents in `inputs.flatten()`; waits for a GPU.

        Rows, and a context rank's slices, are always borders.
        """
        return structure.cu_seqlens(self._starts[:, self._columns])

    @cached_property
    def max_seqlen(self) -> int:
        """The longest document between `cu_seqlens`; waits for a GPU."""
        return structure.max_seqlen(self.cu_seqlens)

    @cached_property
    def _starts(self) -> torch.Tensor:
        """Of the whole rows, also under context parallelism."""
        return structure.document_starts(self.tokens[:, :-1], self._known_eot_id)

    @property
    def _known_eot_id(self) -> int:
        if self.eot_id is None:
            raise errors.InvalidArgument(
                "a batch's document structure needs the end-of-text id, got none; "
                "pass eot_id= to CorpusLoader (50256 for GPT-2's tokenizer)"
            )
        return self.eot_id

    @property
    def _columns(self) -> slice:
        rank, size = self.context
        width = (self.tokens.shape[1] - 1) // size
        return slice(rank * width, (rank + 1) * width)
