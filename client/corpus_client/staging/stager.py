"""Put batches where the training loop wants them: what the pipeline asks for, and how host memory does it.

    slot (host) --copy as stored--> staging buffer (device) --widen--> inputs, targets

Everything here is called by the training loop's thread alone. Another thread must not even ask whether a
copy is done: while a CUDA graph is captured, an event query anywhere in the process breaks the capture.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from corpus_client import errors
from corpus_client.plan.world import WHOLE, Context
from corpus_client.staging import pinning

T = TypeVar("T")

_FREE_BLOCKS = 8
"""Kept for the next batches: tokens, whole rows and what is beside them of two."""

STORED_DTYPES: dict[str, torch.dtype] = {
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "int64": torch.int64,
}
"""Tensor types of stored tokens, by NumPy name; int64 is sent where shards are uint32 and int32."""

SENT_DTYPES = {**STORED_DTYPES, "float16": torch.float16}
"""... and of what is beside the tokens."""

_NUMPY_DTYPES = {dtype: np.dtype(name) for name, dtype in STORED_DTYPES.items()} | {
    torch.bool: np.dtype(np.bool_),
    torch.float32: np.dtype(np.float32),
}

BESIDE: frozenset[str] = frozenset({"sources", "loss_mask"})
"""Names of what is beside the tokens in batches."""


class Stored(NamedTuple):
    """A batch as it lies in a slot or a staging buffer: views.

    A context rank's part of two chunks is `(rows, 2, seq_len / 2)` until it is copied.

    pair: `(2, rows, seq_len)`: inputs and targets, which overlap, so that one copy makes both.
    rows, sources, loss_mask: as `Views` has them.
    array: the pair as NumPy sees it, in host memory. Made for all batches of a group at once, because making
        one costs 1 us, and 60 after 20 ms of the training loop's own work.
    """

    pair: torch.Tensor
    rows: torch.Tensor | None = None
    sources: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None
    array: npt.NDArray[Any] | None = None


class Views(NamedTuple):
    """The tensors of a batch.

    inputs, targets: `(rows, seq_len)` each.
    rows: of a context rank, the whole rows of which they are a part.
    sources: `(rows,)`; loss_mask: `(rows, seq_len)`, of the targets. None where they were not asked for.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor | None = None
    sources: torch.Tensor | None = None
    loss_mask: torch.Tensor | None = None

    def changed(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Views:
        """Return what `change` makes of the name and the tensor of each that is there."""
        pairs = zip(self._fields, self, strict=True)
        return Views(*[None if each is None else change(name, each) for name, each in pairs])  # type: ignore[arg-type]


def _mask_dtype(sent: torch.Tensor) -> torch.dtype:
    """Return the type of a loss mask in batches: bool, or float32 for weights."""
    return torch.float32 if sent.is_floating_point() else torch.bool


def holds(dtype: torch.dtype, value: int) -> bool:
    """Return whether a type is one of integers (bool is not), and has this value."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return False
    span = torch.iinfo(dtype)
    return span.min <= value <= span.max


def shifted(
    stored: torch.Tensor, context: Context = WHOLE, beside: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> list[Stored]:
    """Return the batches of a group, as views of it.

    All at once, because `unbind` makes a view in 0.4 microseconds and slicing in 2.
    stored: `(batches, rows, whole seq_len + 1)`; beside: `(batches, ...)` by name.
    """
    mask = beside.get("loss_mask")
    (count, num_rows, width), (each, row, token) = stored.shape, stored.stride()
    pair = stored.as_strided((count, 2, num_rows, width - 1), (each, token, row, token))
    parts = Stored(
        pair=own(pair, context),
        rows=stored if context.size > 1 else None,  # where documents begin shows in whole rows only
        sources=beside.get("sources"),
        loss_mask=None if mask is None else own(mask[..., 1:], context),
    )
    columns: list[Any] = [repeat(None) if part is None else part.unbind() for part in parts[:-1]]
    arrays = parts.pair.numpy() if stored.device.type == "cpu" else repeat(None)
    return list(map(Stored, *columns, arrays))


def own(whole: torch.Tensor, context: Context) -> torch.Tensor:
    """Return a context rank's part of sequences `(..., whole seq_len)`, a view: `(..., seq_len)`.

    Of two chunks, `(..., 2, seq_len / 2)`.
    """
    rank, size, zigzag, by_document = context
    if by_document:
        return whole  # the batch takes its part: the tokens alone say where documents are
    if not zigzag:
        width = whole.shape[-1] // size
        return whole[..., rank * width : (rank + 1) * width]
    last = 2 * size - 1 - rank
    chunks = whole.view(*whole.shape[:-1], 2 * size, -1)
    return chunks[..., rank : last + 1 : last - rank, :]


def joined(part: torch.Tensor) -> torch.Tensor:
    """Return the chunks of rows as one; a view where memory allows."""
    return part.flatten(-2) if part.ndim > 2 else part


def widened(
    stored: npt.NDArray[Any], dtype: torch.dtype, memory: HostMemory | None = None
) -> npt.NDArray[Any]:
    """Return a new array of another type in host memory.

    NumPy copies it, on this thread: torch would wake its OpenMP threads, whose spinning takes the
    cores from the fetcher and from the model.
    """
    shape, numpy_dtype = stored.shape, _NUMPY_DTYPES[dtype]
    copy = np.empty(shape, numpy_dtype) if memory is None else memory.empty(shape, numpy_dtype)
    copy[...] = stored
    return copy


class _Block(np.ndarray[Any, Any]):
    """Memory that is lent. A type of its own: NumPy would let a part of a lent array refer to the block, and
    not to what was lent. No `bytearray`: NumPy asks for huge pages (0.87 in place of 1.3 ms for a batch of
    512 x 2,049).
    """


class HostMemory:
    """Memory of batches that nobody holds any more, for the next ones.

    The C library gives large blocks back to the kernel, and the page faults of new ones take several times
    as long as the copy: 4.4 instead of 1.3 ms for a batch of 512 x 2,049.
    """

    def __init__(self) -> None:
        self._free: deque[_Block] = deque(maxlen=_FREE_BLOCKS)
        self._lent: dict[int, tuple[weakref.ref[Any], _Block]] = {}

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return an array; its memory is used again once neither it nor a view of it is left."""
        num_bytes = math.prod(shape) * dtype.itemsize
        for _ in range(len(self._free)):
            block = self._free.pop()
            if block.nbytes == num_bytes:
                break
            self._free.appendleft(block)
        else:
            block = _Block(num_bytes, np.uint8)
        lent = np.ndarray(shape, dtype, block)  # an object of its own, which all views keep alive
        reference = weakref.ref(lent, self._take_back)  # half of the time of `weakref.finalize`
        self._lent[id(reference)] = reference, block
        return lent

    def _take_back(self, reference: weakref.ref[Any]) -> None:
        self._free.append(self._lent.pop(id(reference))[1])


class Group:
    """Consecutive batches of a slot, on their way into a staging buffer or there already.

    In host memory they are read where they lie, so the slot is free when the last one is read.

    next_step: of the batch that is read next; for whoever uploads it to keep.
    unread: views of the batches that were not read yet.
    """

    def __init__(
        self, stager: Stager, stored: torch.Tensor, beside: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> None:
        self.next_step = -1
        self._stager = stager
        self._timed = stager.timed
        self.unread = deque(shifted(stored, stager.context, beside))
        self._interval: tuple[float, float] | None = None

    def read_next(self, use: Callable[[Stored], T]) -> T:
        """Return what `use` makes of the next batch; after an error it is still the next.

        use: gets the batch as it is stored, to be read by copies that it queues on the current stream.
        """
        started = time.perf_counter() if self._timed else 0.0
        made = use(self.unread[0])
        if self._timed:
            self._interval = started, time.perf_counter()
            self._stager.copy_seconds += self._interval[1] - started
        self.unread.popleft()
        return made

    def done(self) -> bool:
        """Whether the slot is not read any more; never blocks."""
        return not self.unread

    def interval(self) -> tuple[float, float] | None:
        """When the copy ran, `time.perf_counter` seconds; None: not done, or not measured."""
        return self._interval


class Stager:
    """A place for batches, used by one thread: host memory, or an accelerator without streams (mps).

    Here the slot itself is the staging buffer; `DeviceRing` has buffers of its own.

    Args:
        location: where batches are made.
        context: the part of each sequence that inputs and targets are.
        timed: measure copies, and stalls of the consumer's stream.
    """

    num_buffers = 1  # how many groups may be uploaded and not yet read to the end
    num_bytes = 0  # of the staging buffers
    copies_on_host = True  # whether this CPU copies, rather than ask a device to

    def __init__(self, location: torch.device, *, context: Context = WHOLE, timed: bool = False) -> None:
        self.location = location
        self.context = context
        self.timed = timed
        # Batches, as stored, are uploaded together up to this. Where copies are measured, each goes alone.
        self.group_bytes = 0 if timed else sys.maxsize
        self.copy_seconds = self.stall_seconds = 0.0
        self._memory = HostMemory()

    def check_not_capturing(self) -> None:
        """Raise `InvalidArgument` while batches cannot be moved."""

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Return `(num_bytes,) uint8` of page-aligned host memory for the slots."""
        return pinning.pageable(num_bytes)

    def is_pinned(self, memory: torch.Tensor) -> bool:
        """Return whether host memory is page-locked; asks no device where it cannot be.

        `Tensor.is_pinned` makes CUDA's context, which a forked child (a DataLoader's worker) cannot have.
        """
        return False

    def prepare(self, batch_bytes: int) -> None:
        """Allocate staging buffers for batches of at most this size, as stored."""

    def upload(
        self, stored: torch.Tensor, beside: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> Group:
        """Put batches on their way.

        stored: `(batches, rows, seq_len + 1)`, a view of slot memory; beside: `(batches, ...)` by name, too.
        """
        return Group(self, stored, beside)

    def make(self, dtype: torch.dtype | None, stored: Stored) -> Views:
        """Copy a batch into tensors of its own, of which inputs and targets are one piece of memory.

        As stored on the CPU no tokens are copied, except to join two chunks: the tensors are then views of
        slot memory, valid until the next batch is asked for.

        dtype: of the copied tokens; None: as stored.
        """
        pair, rows = stored.pair, stored.rows
        if dtype is None and self.location.type == "cpu":
            # Contiguous targets would cost 7 % more CPU for each batch of 64 x 1,025 and 11 % for one of
            # 512 x 2,049 than the whole way of its bytes.
            inputs, targets = pair.unbind()
        else:
            inputs, targets = self.copied_pair(stored, dtype or pair.dtype)
            rows = None if rows is None else self.copied(rows, dtype or rows.dtype)
        return Views(joined(inputs), joined(targets), rows, *self._beside(stored))

    def copied_pair(self, stored: Stored, dtype: torch.dtype) -> Iterable[torch.Tensor]:
        """Copy inputs and targets into one piece of memory."""
        copy = map(torch.from_numpy, widened(stored.array, dtype, self._memory))  # type: ignore[arg-type]
        return copy if self.location.type == "cpu" else (each.to(self.location) for each in copy)

    def copied(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy what is staged into a new tensor of another type."""
        copy = torch.from_numpy(widened(source.numpy(), dtype, self._memory))
        return copy if self.location.type == "cpu" else copy.to(self.location)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Copy staged tokens of any strides into a tensor of another type."""
        if into.device.type == "cpu":
            np.copyto(into.numpy(), source.numpy(), casting="unsafe")
        else:
            into.copy_(
                torch.from_numpy(widened(source.numpy(), into.dtype))
            )  # some accelerators have no unsigned types

    def fill(
        self, inputs: torch.Tensor, targets: torch.Tensor, stored: Stored, *, ignored: int | None = None
    ) -> Views:
        """Copy a batch into the caller's tensors, of any strides, whose type holds every token.

        ignored: what the loader will put into masked targets; their type must hold it, too.
        """
        if ignored is not None and not holds(targets.dtype, ignored):
            raise errors.InvalidArgument(f"targets must hold ignore_index={ignored}, got {targets.dtype}")
        pairs = {"inputs": (inputs, stored.pair[0]), "targets": (targets, stored.pair[1])}
        for name, (tensor, view) in pairs.items():
            span = torch.iinfo(view.dtype)
            shape = len(view), view[0].numel()
            fits = holds(tensor.dtype, span.min) and holds(tensor.dtype, span.max)
            if tensor.shape != shape or tensor.device != self.location or not fits:
                raise errors.InvalidArgument(
                    f"{name} must be an integer tensor of shape {shape} on {self.location} that "
                    f"holds every {view.dtype}, got {tensor.dtype} of shape {tuple(tensor.shape)} on "
                    f"{tensor.device}"
                )
        for tensor, view in pairs.values():
            self.copy(view, tensor.view(view.shape))
        return Views(inputs, targets, None, *self._beside(stored))

    def _beside(self, stored: Stored) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return copies of the sources and the loss mask, where they came."""
        sources, mask = stored.sources, stored.loss_mask
        return (
            None if sources is None else self.copied(sources, torch.int64),
            None if mask is None else joined(self.copied(mask, _mask_dtype(mask))),
        )

    def measure(self) -> None:
        """Bring `copy_seconds` and `stall_seconds` up to date, where they are measured."""

    def drain(self) -> None:
        """Wait until no slot is read any more; raises nothing."""

    def close(self) -> None:
        """Give the staging buffers back; `prepare` makes new ones."""
