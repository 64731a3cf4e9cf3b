"""Where batches go: which device is meant, what the pipeline asks of it, and the devices without streams.

    slot (host) --copy, as stored--> device --widened to int64--> tokens; inputs and targets are views

Everything here is called by the training loop's thread alone. Another thread must not even ask whether a
copy is done: while a CUDA graph is captured, an event query anywhere in the process breaks the capture.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from corpus_client import errors
from corpus_client.buffers import Pin
from corpus_client.groups import Group, Transfer
from corpus_client.streams import StreamDevice

STORED_DTYPES: dict[str, torch.dtype] = {
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "int32": torch.int32,
    "int64": torch.int64,
}
"""Tensor types of tokens as answered, by their numpy name; int64 where shards are uint32 and int32."""


class Device(Protocol):
    """A place for batches; used by one thread."""

    @property
    def pin(self) -> Pin | None:
        """What page-locks the slots; None: they stay pageable."""

    @property
    def borrows(self) -> bool:
        """Whether a claimed batch is a view of slot memory, which must then outlive the batch's use."""

    @property
    def lookahead(self) -> int:
        """How many batches are put on their way before they are asked for."""

    @property
    def group_bytes(self) -> int:
        """Batches, as stored, are grouped up to this; one goes alone whatever its size."""

    @property
    def copies_on_host(self) -> bool:
        """Whether `upload` copies by this CPU, rather than ask a device to."""

    def pace(self) -> None:
        """Wait while the device is too far behind the training loop.

        Raises:
            InvalidArgument: batches cannot be moved at this moment.
        """

    def upload(self, stored: torch.Tensor) -> Transfer:
        """Put batches on their way. stored: `(batches, rows, seq_len + 1)`, a view of slot memory."""

    def drain(self) -> None:
        """Wait until no slot is read any more."""

    def seconds(self) -> tuple[float, float]:
        """(of copies on the device, of the consumer's stream standing still for them), where measured."""


def open_device(device: torch.device, dtype: torch.dtype | None, *, timed: bool = False) -> Device:
    """The device's implementation.

    Args:
        dtype: of the batches; None: as stored.
        timed: measure copies, and stalls of the consumer's stream.

    Raises:
        InvalidArgument: torch sees no such device.
    """
    device = find_device(device)
    runtime = getattr(torch, device.type)
    if device.type == "cpu" or not hasattr(runtime, "Stream"):
        return HostDevice(device, dtype, timed=timed)
    return StreamDevice(device, dtype, runtime, timed=timed)


def default_device() -> torch.device:
    """CUDA where there is one, else another accelerator, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    accelerator = getattr(torch, "accelerator", None)  # since torch 2.6
    if accelerator is not None and accelerator.is_available():
        return torch.device(accelerator.current_accelerator())
    return torch.device("cpu")


def find_device(device: torch.device, environ: Mapping[str, str] = os.environ) -> torch.device:
    """The device with its index, checked to exist.

    Without an index it is the current device if that is not the first, so somebody set it; else the one
    of LOCAL_RANK, which torchrun sets: eight ranks that all forgot `set_device` do not share one GPU.
    """
    if device.type == "cpu":
        return device
    runtime: Any = getattr(torch, device.type, None)
    count = int(runtime.device_count()) if hasattr(runtime, "device_count") else 0
    if count == 0:
        raise errors.InvalidArgument(
            f"device must be 'cpu' or an accelerator that torch sees here, got {str(device)!r}; "
            f"the one it sees is {str(default_device())!r}"
        )
    index = device.index
    if index is None:
        current = int(runtime.current_device()) if hasattr(runtime, "current_device") else 0
        index = device_index(current, count, environ)
    if not index < count:
        raise errors.InvalidArgument(
            f"device must be {device.type}:0 to {device.type}:{count - 1}, got {str(device)!r}; "
            "does CUDA_VISIBLE_DEVICES hide it?"
        )
    return torch.device(device.type, index)


def device_index(current: int, count: int, environ: Mapping[str, str]) -> int:
    """Which of `count` devices a rank means that names none: with LOCAL_RANK=3, `current` 0 of 8: 3."""
    local_rank = environ.get("LOCAL_RANK", "")
    if current == 0 and local_rank.isdecimal() and int(local_rank) < count:
        return int(local_rank)
    return current


def widened(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fresh copy in host memory.

    NumPy copies it, on this thread: torch would wake its OpenMP threads, whose spinning takes the
    cores from the fetcher and from the model.
    """
    tokens = torch.empty(stored.shape, dtype=dtype)
    np.copyto(tokens.numpy(), stored.numpy(), casting="unsafe")
    return tokens


class HostDevice:
    """Host memory, or an accelerator without streams (mps): every copy is over when `upload` returns.

    On the CPU a batch is a fresh widened copy, or with `dtype=None` the slot itself. An accelerator is
    sent what was widened here, as some have no unsigned types.
    """

    pin = None
    lookahead = 0
    copies_on_host = True

    def __init__(self, device: torch.device, dtype: torch.dtype | None, *, timed: bool = False) -> None:
        self._device = device
        self._dtype = dtype
        self._timed = timed
        self._seconds = 0.0
        self.borrows = dtype is None and device.type == "cpu"
        self.group_bytes = sys.maxsize if self.borrows else 0  # what is not copied is ready all at once

    def pace(self) -> None:
        """Never too far ahead."""

    def upload(self, stored: torch.Tensor) -> Transfer:
        """Copy at once; on the CPU with `dtype=None` nothing is copied."""
        started = time.perf_counter()
        tokens = stored if self._dtype is None else widened(stored, self._dtype)
        if self._device.type != "cpu":
            tokens = tokens.to(self._device)
        if not self._timed:
            return _Copied(tokens, None)
        ended = time.perf_counter()
        self._seconds += ended - started
        return _Copied(tokens, (started, ended))

    def drain(self) -> None:
        """Nothing is under way."""

    def seconds(self) -> tuple[float, float]:
        """Seconds of copies."""
        return self._seconds, 0.0


class _Copied:
    def __init__(self, tokens: torch.Tensor, interval: tuple[float, float] | None) -> None:
        self._group = Group(tokens)
        self._interval = interval

    def claim(self) -> torch.Tensor:
        return self._group.take()[1]

    def done(self) -> bool:
        return True

    def interval(self) -> tuple[float, float] | None:
        return self._interval
