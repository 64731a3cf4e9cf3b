"""What a loader yields: inputs and targets, and their document structure where it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from corpus_client import errors, structure
from corpus_client.network.control import BoundPlan
from corpus_client.plan.iteration import PlanLoader
from corpus_client.plan.state import make_state
from corpus_client.plan.world import WHOLE, Context
from corpus_client.staging.stager import BESIDE, Views, joined, own


@dataclass(frozen=True, slots=True)
class Origin:
    """Where batches come from; all batches of a loader share one.

    Args:
        plan: None: not known, as under a DataLoader, whose workers would send it along with every batch.
        context: the part of each sequence that inputs and targets are.
        fills_ends: whether end of text also fills rows, as in rows of documents: what follows the end of
            text that ends a document, or several where documents begin with it. They are then one document
            more, and not one for each token.
        eot_first: whether documents begin with end of text, and not end with it; None: some of each.
    """

    plan: BoundPlan | None = None
    step_stride: int = 1
    eot_id: int | None = None
    context: Context = WHOLE
    fills_ends: bool = False
    eot_first: bool | None = False


UNKNOWN = Origin()

_NEEDS_ROWS = (
    "the document structure of a slice needs whole rows, which next_into does not make; take the batch by "
    "next(loader)"
)


class Batch(list[torch.Tensor]):
    """One rank's part of one step: `[inputs, targets]`, so that `x, y = batch` works.

    It is a list because `accelerate` takes batches apart as lists, and torch's collate functions copy a list
    with its attributes. What they make of several batches (`step` -1) has no state and no structure.

    The structure (`position_ids` to `loss_mask`) is computed on the device when it is first asked for, then
    kept; it needs `eot_id`. Only `cu_seqlens` and `max_seqlen` wait for a GPU. Under context parallelism
    everything but `tokens` and `sources` is this rank's part of the sequence, and `seq_len` its length.

    Args:
        tensors: inputs and targets, `(rows, seq_len)` each; then what else a `Views` has.
        step: the training step whose tokens these are.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor | None], step: int = -1, origin: Origin = UNKNOWN
    ) -> None:
        inputs, targets, *more = tensors
        super().__init__((inputs, targets))  # type: ignore[arg-type]
        self.step = step
        self._origin = origin
        self._more = more

    def __repr__(self) -> str:
        return f"Batch(step={self.step}, {', '.join(f'{tuple(t.shape)} {t.dtype}' for t in self)})"

    def __copy__(self) -> Batch:
        """Return the same without the kept structure: collate functions put other tensors into the copy."""
        return self._changed(lambda _, tensor: tensor)

    def __setitem__(self, index: Any, tensor: Any) -> None:
        """Put a tensor into a copy; torch's DataLoader does so when it collates or pins a batch.

        Raises:
            InvalidArgument: a DataLoader stacks the batches of a `CorpusIterableDataset`.
        """
        is_tensor = isinstance(tensor, torch.Tensor)
        if self._origin.plan is None and is_tensor and tensor.ndim > self[index].ndim:
            raise errors.InvalidArgument(
                "the DataLoader puts the batches of several steps together, and each is a whole rank batch "
                "already; pass batch_size=None to it"
            )
        is_new = is_tensor and tensor is not self[index]
        super().__setitem__(index, tensor)
        # Torch 2.4 pins the items of a list, and not the list. A worker puts a batch's own tensors into
        # copies, and must not ask: `is_pinned` makes CUDA's context, which a forked child cannot have.
        if is_new and get_worker_info() is None and tensor.is_pinned():
            views = self._views._replace(inputs=tensor, targets=tensor)  # the list's own are not its matter
            self._more = list(views.changed(lambda _, each: each.pin_memory())[2:])

    @property
    def inputs(self) -> torch.Tensor:
        """`(rows, seq_len)`, contiguous, of the loader's `dtype`, on its device.

        The caller's own. Only with `dtype=None` on the CPU inputs and targets ARE VIEWS OF SLOT MEMORY, not
        contiguous and OVERWRITTEN AFTER THE NEXT `__next__`: no copy is made there. Clone what must live on.
        """
        return self[0]

    @property
    def targets(self) -> torch.Tensor:
        """`(rows, seq_len)`, like `inputs`, one token further; `ignore_index` where a target is masked."""
        return self[1]

    @property
    def tokens(self) -> torch.Tensor:
        """`(rows, whole seq_len + 1)`: inputs and the last target of each row, in C order.

        A copy, except where inputs and targets are views of the same rows: then a third view of them. With
        `ignore_index` the last column may be masked. Of a context rank the whole rows, no copy.
        """
        if self._views.rows is not None:
            return self._views.rows
        rows, seq_len = self.inputs.shape
        one_further = self.inputs.data_ptr() + self.inputs.element_size()
        # Copies of one token each may be neighbours, too, and no row has a place for one token more.
        apart = self.inputs.stride(0) > seq_len and self.targets.stride() == self.inputs.stride()
        if apart and self.targets.data_ptr() == one_further:
            return self.inputs.as_strided((rows, seq_len + 1), self.inputs.stride())
        return torch.cat((self.inputs, self.targets[:, -1:]), dim=1)

    @property
    def sources(self) -> torch.Tensor:
        """`(rows,) int64`: the source of each row, by its number in `CorpusLoader.sources`.

        Raises:
            InvalidArgument: the loader was not asked for it.
        """
        if self._views.sources is None:
            raise errors.InvalidArgument("a batch has no sources; pass sources=True to CorpusLoader")
        return self._views.sources

    def as_dict(self) -> dict[str, torch.Tensor]:
        """Return `{"inputs": inputs, "targets": targets}`, for those who want names."""
        return {"inputs": self.inputs, "targets": self.targets}

    def split(self, num_rows: int) -> list[Batch]:
        """Return the rows in parts of `num_rows`, views all: the micro batches of gradient accumulation.

        Raises:
            InvalidArgument: the rows do not divide into such parts.
        """
        if num_rows < 1 or len(self.inputs) % num_rows:
            raise errors.InvalidArgument(
                f"a micro batch must divide this rank's {len(self.inputs)} rows of step {self.step}, got "
                f"{num_rows}; the plan's global_batch_size is that of an optimizer step over all ranks"
            )
        columns = (repeat(None) if each is None else torch.split(each, num_rows) for each in self._views)
        return [Batch(part, self.step, self._origin) for part in zip(*columns, strict=False)]

    def state_after(self) -> dict[str, Any]:
        """Return the state to save once this batch was trained on: a run resumed from it begins behind it.

        Raises:
            InvalidArgument: the batch does not know its plan; see `CorpusIterableDataset.state_at`.
        """
        origin = self._origin
        if origin.plan is None:
            raise errors.InvalidArgument(
                "state_after needs a batch of a CorpusLoader, got one of a DataLoader or of a collate "
                "function; save dataset.state_at(batch.step + 1)"
            )
        return make_state(origin.plan, self.step + origin.step_stride)

    def detached(self, *, copy: bool) -> Batch:
        """Return the same without its plan, which other processes need not be sent with every batch.

        copy: also put it into memory of its own; for views of slot memory.
        """
        clone = partial(torch.clone, memory_format=torch.contiguous_format)
        batch = self._changed(lambda _, tensor: clone(tensor)) if copy else self.__copy__()
        batch._origin = replace(batch._origin, plan=None)
        return batch

    def pin_memory(self) -> Batch:
        """Return the same in page-locked memory of its own; a DataLoader with `pin_memory=True` calls it."""
        return self._changed(lambda _, tensor: tensor.pin_memory())

    def to(
        self, device: str | torch.device, *, dtype: torch.dtype | None = None, non_blocking: bool = False
    ) -> Batch:
        """Return the same on a device, widened to `dtype` there: tokens travel as they are.

        Returns before the copies are done only with `non_blocking` and from page-locked memory.
        """

        def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.to(device, non_blocking=non_blocking)
            return tensor if dtype is None or name in BESIDE else tensor.to(dtype)

        return self._changed(moved)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """`(rows, seq_len) int64`: place in the document, 0 after each end of text.

        A document that began before its row counts from the row's start; one that began in another
        context rank's part goes on counting.
        """
        return self._own(structure.places(self._starts))

    @cached_property
    def document_ids(self) -> torch.Tensor:
        """`(rows, seq_len) int32`: the number of the document in its row, from 0."""
        return self._own(self._starts.cumsum(dim=1, dtype=torch.int32) - 1)

    @property
    def corpus_mask(self) -> torch.Tensor | None:
        """`(rows, seq_len) bool`: False where a corpus's mask leaves the target out; None if none came.

        float32, with the weight of each target's loss, where a mask of the plan's corpora holds weights.
        """
        return self._views.loss_mask

    @cached_property
    def loss_mask(self) -> torch.Tensor:
        """`(rows, seq_len) bool`: False where the target is the first token of another document, or masked.

        Where documents begin with end of text, that is a target, and False only where it fills a row.

        Where `corpus_mask` holds weights, so does this: multiply losses by it, and divide their sum by its
        sum. Of a batch with `corpus_mask` the end-of-text id may be unknown: then it is that mask alone.
        """
        if self.corpus_mask is not None and self._origin.eot_id is None:
            return self.corpus_mask
        within = self._within() if self._eot_first else ~structure.ends(self.inputs, self._known_eot_id)
        return within if self.corpus_mask is None else within * self.corpus_mask

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """`(documents + 1,) int32`: borders of documents in `inputs.flatten()`; waits for a GPU.

        Rows, and the chunks of a context rank, are always borders.
        """
        if not self._origin.context.by_document:
            return structure.borders(own(self._starts, self._origin.context))
        begins = self._own(self._starts)
        begins[:, 1:] |= self.chunk_ids.diff(dim=1) != 0
        begins[:, 1:] |= self.document_ids.diff(dim=1) != 0
        return structure.borders(begins)

    @property
    def chunk_ids(self) -> torch.Tensor:
        """`(rows, seq_len) int64`: the chunk of its document of each input, with `context_order=documents`.

        A document is cut into twice as many chunks as there are ranks, neighbours in it; rank r of n has the
        chunks r and 2n - 1 - r of each. The chunks of a document differ by one input at most, and over a row
        all numbers have as many inputs: where 2n does not divide a document, the inputs that are left go to
        the numbers that come next, over all documents of the row.
        """
        if not self._origin.context.by_document:
            raise errors.InvalidArgument("chunk_ids needs Placement(context_order='documents')")
        return self._own(self._chunks)

    @cached_property
    def _chunks(self) -> torch.Tensor:
        """The chunk of each input of the whole rows."""
        return structure.chunks(self._starts, self._origin.context.num_chunks)

    @cached_property
    def _chosen(self) -> torch.Tensor:
        """`(rows, seq_len)`: which inputs of whole rows this rank has: two chunks of each document."""
        return structure.chosen(self._chunks, self._origin.context)

    def of_documents(self) -> Batch:
        """Return a context rank's part of each document of whole rows."""

        def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor if name in ("rows", "sources") else self._own(tensor)

        batch = self._changed(part)
        batch._chosen = self._chosen
        return batch

    @cached_property
    def max_seqlen(self) -> int:
        """The longest document between `cu_seqlens`, in tokens; waits for a GPU."""
        return int(self.cu_seqlens.diff().max())

    @cached_property
    def _starts(self) -> torch.Tensor:
        """Where documents begin in the whole rows, also under context parallelism; a row's start counts."""
        inputs, _ = self._whole
        return structure.starts(
            inputs, self._known_eot_id, eot_first=self._eot_first, fills_ends=self._origin.fills_ends
        )

    def _within(self) -> torch.Tensor:
        """`loss_mask` where documents begin with end of text: all but several of them, which fill rows."""
        eot_id = self._known_eot_id
        if not self._origin.fills_ends:
            return torch.ones_like(self.inputs, dtype=torch.bool)
        return self._own(structure.within(*self._whole, eot_id))

    @property
    def _whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of whole rows, and the last target of each: `(rows, whole seq_len)` and `(rows, 1)`."""
        rows = self._views.rows
        if rows is not None:
            return rows[:, :-1], rows[:, -1:]
        if self._origin.context.size > 1:
            raise errors.InvalidArgument(_NEEDS_ROWS)
        return self.inputs, self.targets[:, -1:]

    @property
    def _eot_first(self) -> bool:
        if self._origin.eot_first is None:
            raise errors.InvalidArgument(
                "documents of some corpora of the plan begin with end of text, those of others end with it, "
                "so no rule tells the documents of a batch apart; use corpora of one kind"
            )
        return self._origin.eot_first

    @property
    def _known_eot_id(self) -> int:
        if self._origin.eot_id is None:
            raise errors.InvalidArgument(
                "a batch's document structure needs the end-of-text id, got none; "
                "pass eot_id= to CorpusLoader (50256 for GPT-2's tokenizer)"
            )
        return self._origin.eot_id

    @property
    def _views(self) -> Views:
        return Views(self[0], self[1], *self._more)

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        if not self._origin.context.by_document:
            return joined(own(whole, self._origin.context))
        signed = structure.SIGNED.get(whole.dtype, whole.dtype)  # torch gathers few unsigned types
        return whole.view(signed).gather(1, self._chosen).view(whole.dtype)

    def _changed(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Batch:
        return Batch(self._views.changed(change), self.step, self._origin)


class NoDataset(IterableDataset[Batch]):
    """Makes `DataLoader(loader)` an error at once; it would be one at the first batch only.

    A DataLoader first asks whether it got an `IterableDataset`, and Python asks the subclasses of that, too.
    """

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        if issubclass(kind, PlanLoader):
            kind.refuse_dataloader()
        return False  # a `CorpusIterableDataset` is found by its own bases
