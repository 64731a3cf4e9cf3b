"""Host memory that a device copies from: page-locked where that is possible.

Three ways, in the order in which they are tried. Each that fails logs one warning, which names what failed:

1. *Registered*: a map of our own that the device's runtime page-locks (`cudaHostRegister`, on ROCm too). It
   takes what it needs to the byte, and is given back to the system when it is freed.
2. *Pinned by torch*: its allocator takes the next power of two, and keeps the memory when it is freed.
3. *Pageable*: right, but each copy to the device passes through a buffer of the driver and blocks.

A runtime is the module of an accelerator: `torch.cuda`, or another one with the same names. One that has a
`cudart` can register memory.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from corpus_client import errors

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process

MADV_WIPEONFORK = 18
"""Linux 4.14, <asm-generic/mman-common.h>: a forked child finds zeros there. Python has no name for it.

Copied on write, the parent's pages would no longer be the ones that the device reads. With `MADV_DONTFORK`
the child would have nothing there, its own allocations would get the address, and dropping the slots in the
child would unmap those.
"""

log = logging.getLogger("corpus_client")

_locked: dict[int, tuple[weakref.finalize[Any, Any], Callable[[], None]]] = {}
"""Registered memory by its address: the finaliser of its array, and what unlocks it."""

_abandoned: list[mmap.mmap] = []
"""Maps that stay locked to the process's end; kept, so that nothing else gets their addresses."""


def staging_memory(
    num_bytes: int, device: torch.device, runtime: Any = None, wait: Callable[[], None] | None = None
) -> torch.Tensor:
    """Return `(num_bytes,) uint8` of page-aligned memory; page-locked if a runtime is given and can do it.

    wait: called before registered memory is unlocked; returns when no copy reads it any more.
    """
    if runtime is None:
        return pageable(num_bytes)
    if hasattr(runtime, "cudart"):
        try:
            return registered(num_bytes, device, runtime, wait or (lambda: None))
        except errors.PinningFailed as error:
            _warn(f"{error}; falling back to memory that torch pins")
    try:
        return pinned_by_torch(num_bytes)
    except errors.PinningFailed as error:
        _warn(f"{error}; falling back to pageable memory, from which copies to the device block")
    return pageable(num_bytes)


def pageable(num_bytes: int) -> torch.Tensor:
    """Return memory that costs nothing until it is written."""
    return torch.frombuffer(_new_map(num_bytes), dtype=torch.uint8)


def pinned_by_torch(num_bytes: int) -> torch.Tensor:
    """Return memory of torch's pinned allocator; `PinningFailed` if it has none."""
    try:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise errors.PinningFailed(
            f"torch.empty(pin_memory=True) of {num_bytes:,} bytes failed: {str(error).splitlines()[0]}"
        ) from error
    if not memory.is_pinned():
        raise errors.PinningFailed(f"torch.empty(pin_memory=True) of {num_bytes:,} bytes is not page-locked")
    return memory


def registered(num_bytes: int, device: torch.device, runtime: Any, wait: Callable[[], None]) -> torch.Tensor:
    """Return a map that the runtime has page-locked, until `unlock`, or until nothing refers to it any more.

    Unlocking calls the device. If the last reference goes in another thread than the one that registered the
    memory (a loader that was dropped without `close`), and that one still runs, the memory stays locked, and
    a warning says so.
    """
    memory = _new_map(num_bytes)
    try:
        if hasattr(os, "fork"):
            memory.madvise(MADV_WIPEONFORK)
    except OSError as error:  # a kernel that does not know it, as gVisor's
        raise errors.PinningFailed(f"madvise(MADV_WIPEONFORK) failed: {error.strerror}") from error
    # The array is what views hold on to: its end is the moment to unlock, before the map's own.
    owner = np.frombuffer(memory, np.uint8)
    address = owner.ctypes.data
    cudart = runtime.cudart()
    # On the loader's own device: the process's first one would get a context, hundreds of megabytes.
    with runtime.device(device):
        code = cudart.cudaHostRegister(address, num_bytes, PORTABLE)
        if int(code):
            # The runtime reports a failure once more at the next launch, whoever's that is: launch here.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device)
    if int(code):
        text = getattr(cudart, "cudaGetErrorString", lambda _: "")(code)
        said = f" ({text})" if text else ""
        raise errors.PinningFailed(
            f"cudaHostRegister of {num_bytes:,} bytes failed with error {int(code)}{said}"
        )

    def unlock() -> None:
        wait()
        with runtime.device(device):
            cudart.cudaHostUnregister(address)

    def dropped() -> None:
        _locked.pop(address, None)
        if os.getpid() != pid:
            return  # a forked child: what is locked is the parent's
        if thread is threading.current_thread() or not thread.is_alive():
            unlock()
        else:
            _abandoned.append(memory)
            log.warning(
                "%d bytes stay page-locked until the process ends: a loader was dropped by thread %r, and "
                "only thread %r may call its device; close loaders where they are iterated over",
                num_bytes,
                threading.current_thread().name,
                thread.name,
            )

    pid, thread = os.getpid(), threading.current_thread()
    _locked[address] = weakref.finalize(owner, dropped), unlock
    return torch.from_numpy(owner)


def pinned_bytes(memory: torch.Tensor) -> int:
    """Return the bytes that page-locked memory takes: torch's allocator rounds up to a power of two."""
    is_registered = memory.data_ptr() in _locked
    return memory.nbytes if is_registered else 1 << (memory.nbytes - 1).bit_length()


def unlock(memory: torch.Tensor) -> None:
    """Unlock registered memory now, whatever refers to it; for a thread that may call the device."""
    finalizer, unlock_it = _locked.pop(memory.data_ptr(), (None, None))
    if finalizer is not None and unlock_it is not None and finalizer.detach() is not None:
        unlock_it()


def _new_map(num_bytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, where no process is forked that could share it
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@functools.cache
def _warn(text: str) -> None:
    """Log a warning once a process: each loader of it would fail in the same way."""
    log.warning("%s", text)
