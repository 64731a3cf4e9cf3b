"""Where batches go: the device owns its stream and its events.

    slot (host, pinned) --copy, as stored--> device --widened to int64--> tokens
    `------------------ one stream of its own ------------------'  event --> the consumer's stream

How the allocator is told: `tokens` is allocated on the transfer stream and read on the consumer's
stream, so `claim` calls `record_stream`: memory that is dropped in Python is not reused before the
work that is queued on the consumer's stream at that moment has run. A consumer that reads a batch on
a further stream of its own must call `record_stream` for that one. The copy as stored is allocated,
read and freed on the transfer stream alone, whose order protects it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from corpus_client import errors

STORED_DTYPES: dict[str, torch.dtype] = {
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "int64": torch.int64,
}
"""Tensor types of tokens as answered, by their numpy name; int64 where shards are uint32 and int32."""


class Transfer(Protocol):
    """One batch on its way from a slot to the device."""

    def claim(self) -> torch.Tensor:
        """The batch, `(rows, seq_len + 1)`, safe to use on the caller's current stream.

        Once: the transfer then forgets it, so that a batch the consumer drops is freed at that moment
        and not when its slot comes round.
        """

    def done(self) -> bool:
        """Whether the slot is not read any more; never blocks."""


class Device(Protocol):
    """A place for batches."""

    @property
    def pinned(self) -> bool:
        """Whether slots should be page-locked."""

    @property
    def borrows(self) -> bool:
        """Whether a claimed batch is a view of slot memory, which must then outlive the batch's use."""

    @property
    def lookahead(self) -> int:
        """How many batches are put on their way before they are asked for."""

    def upload(self, stored: torch.Tensor) -> Transfer:
        """Put a batch on its way. stored: `(rows, seq_len + 1)`, a view of slot memory."""


def open_device(device: torch.device, dtype: torch.dtype | None) -> Device:
    """The device's implementation. dtype: of the batches; None: as stored."""
    if device.type == "cpu":
        return CpuDevice(dtype)
    if device.type == "cuda":
        return CudaDevice(device, dtype)
    raise errors.InvalidArgument(f"device must be a 'cpu' or 'cuda' device, got {str(device)!r}")


def widened(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fresh copy in host memory.

    NumPy copies it, on this thread: torch would wake its OpenMP threads, whose spinning takes the
    cores from the fetcher and from the model.
    """
    tokens = torch.empty(stored.shape, dtype=dtype)
    np.copyto(tokens.numpy(), stored.numpy(), casting="unsafe")
    return tokens


class CpuDevice:
    """Host memory: a fresh widened copy, or with `dtype=None` the slot itself."""

    pinned = False
    lookahead = 0

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self.borrows = dtype is None

    def upload(self, stored: torch.Tensor) -> Transfer:
        """Copy at once; with `dtype=None` nothing is copied."""
        return _HostTransfer(stored if self._dtype is None else widened(stored, self._dtype))


class _HostTransfer:
    def __init__(self, tokens: torch.Tensor) -> None:
        self._unclaimed = [tokens]

    def claim(self) -> torch.Tensor:
        return self._unclaimed.pop()

    def done(self) -> bool:
        return True


class CudaDevice:
    """A GPU: one non-blocking copy per batch on a stream of its own, widened on that same stream."""

    pinned = True
    borrows = False
    lookahead = 2  # one being copied while one waits to be claimed

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._dtype = dtype
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def upload(self, stored: torch.Tensor) -> Transfer:
        """Queue copy, widening and event; returns before any of them has run."""
        with torch.cuda.stream(self._stream):
            tokens = stored.to(self._device, non_blocking=True)
            if self._dtype is not None:
                tokens = tokens.to(self._dtype)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _CudaTransfer(tokens, event)


class _CudaTransfer:
    def __init__(self, tokens: torch.Tensor, event: torch.cuda.Event) -> None:
        self._unclaimed = [tokens]
        self._event = event

    def claim(self) -> torch.Tensor:
        tokens = self._unclaimed.pop()
        current = torch.cuda.current_stream(tokens.device)
        current.wait_event(self._event)
        tokens.record_stream(current)
        return tokens

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]
