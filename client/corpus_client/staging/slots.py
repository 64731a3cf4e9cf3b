"""Allocate the slots: host memory for what is fetched ahead, page-locked where a GPU reads it."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from corpus_client import errors
from corpus_client.plan.schedule import MAX_STEPS_PER_REQUEST

REQUEST_BYTES = 16 << 20
"""Bytes; the fixed cost of a request hardly counts (requests half as large cost a tenth more CPU)."""

MAX_SLOTS = 1024

Pin = Callable[[int, int], Callable[[], None]]
"""Page-lock (address, bytes); return the function that unlocks them. Raises `PinningFailed`."""


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One reusable buffer: `(slot_bytes,) uint8`, writable, twice.

    view: what the transport fills; storage: a tensor over the same memory, which the device reads.
    """

    view: memoryview
    storage: torch.Tensor

    def batches(self, first: int, count: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return batches `[first, first + count)`: `(count, rows, seq_len + 1)` as stored; views."""
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        part = self.storage[first * num_bytes : (first + count) * num_bytes]
        return part.view(dtype).view(count, *shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSize:
    """How many slots, and how many steps of the largest batches each holds."""

    num_slots: int
    steps_per_slot: int
    batch_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes of a full slot's batches."""
        return self.steps_per_slot * self.batch_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, a multiple of the page size."""
        return -(-self.used_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots together."""
        return self.num_slots * self.slot_bytes


def ring_size(*, batch_bytes: int, prefetch_bytes: int, in_flight: int, ranks_on_host: int = 1) -> RingSize:
    """Return the largest ring within `prefetch_bytes` and this rank's part of half of the host's memory.

    There is a slot for each request in flight, one being copied from and one that is ready, unless
    batches are so large that only two fit: one is filled while the other is used.
    """
    most = host_memory_bytes() // 2 // ranks_on_host
    budget = min(prefetch_bytes, most)
    least = RingSize(num_slots=2, steps_per_slot=1, batch_bytes=batch_bytes)
    if budget < 2 * least.slot_bytes:
        raise errors.InvalidArgument(
            f"prefetch_bytes must hold two slots of {least.slot_bytes:,} bytes, got {prefetch_bytes:,}, and "
            f"half of the host's memory gives each of {ranks_on_host} ranks {most:,}; "
            "raise it or lower global_batch_size"
        )
    share = budget // (in_flight + 2) // mmap.PAGESIZE * mmap.PAGESIZE  # slots are whole pages
    steps = min(min(REQUEST_BYTES, share) // batch_bytes, MAX_STEPS_PER_REQUEST)
    one = replace(least, num_slots=1, steps_per_slot=max(1, steps))
    return replace(one, num_slots=max(2, min(budget // one.slot_bytes, MAX_SLOTS)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ring:
    """The slots of a loader: one piece of page-aligned memory.

    It lives as long as any slot or any tensor made from one; page-locking ends with it.
    """

    size: RingSize
    slots: tuple[Slot, ...]


def allocate_ring(size: RingSize, pin: Pin | None = None) -> Ring:
    """Allocate all slots at once, page-locked by `pin`; pageable memory costs nothing until it is written.

    Not `torch.empty(pin_memory=True)`: its allocator takes the next power of two, which would break
    the budget, and keeps the memory when it is freed.
    """
    memory = mmap.mmap(-1, size.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The array is what views hold on to: its end is the moment to unpin, before the map's own.
    owner = np.frombuffer(memory, np.uint8)
    if pin is not None:
        # In a forked child these pages would be copied on write, and the parent's then no longer the
        # ones that the device reads.
        memory.madvise(mmap.MADV_DONTFORK)
        weakref.finalize(owner, _unpin_here, os.getpid(), pin(owner.ctypes.data, size.num_bytes))
    view = memoryview(owner.data)
    storage = torch.frombuffer(view, dtype=torch.uint8)
    cuts = range(0, size.num_bytes, size.slot_bytes)
    slots = tuple(Slot(view[at : at + size.slot_bytes], storage[at : at + size.slot_bytes]) for at in cuts)
    return Ring(size=size, slots=slots)


def _unpin_here(pid: int, unpin: Callable[[], None]) -> None:
    if os.getpid() == pid:
        unpin()


def host_memory_bytes() -> int:
    """Return the bytes of memory that this process may use: the machine's, or less in a cgroup."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError):  # not Linux
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                limits += _limits("/sys/fs/cgroup", group, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _limits("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
    return min(limits)


def _limits(root: str, group: str, name: str) -> Iterator[int]:
    """Yield the limits of a cgroup and of all above it; in a container its own group is the root."""
    folder = Path(root, group.lstrip("/"))
    for place in (folder, *folder.parents):
        if place.is_relative_to(root) and (place / name).is_file():
            text = (place / name).read_text().strip()
            if text.isdigit():  # not "max"
                yield int(text)
