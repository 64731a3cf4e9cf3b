"""The slots: host memory for what is fetched ahead, cut into reusable pieces."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from corpus_client import errors
from corpus_client.network.layout import Beside, arrays_of, starts
from corpus_client.plan.schedule import MAX_STEPS_PER_REQUEST
from corpus_client.staging.options import PREFETCH_BYTES
from corpus_client.staging.stager import SENT_DTYPES

REQUEST_BYTES = 16 << 20
"""Bytes; the fixed cost of a request hardly counts (requests half as large cost a tenth more CPU)."""

MAX_SLOTS = 1024


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

    def beside(
        self,
        named: Iterable[Beside],
        first: int,
        count: int,
        num_steps: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> dict[str, torch.Tensor]:
        """Return what is beside the tokens of these of `num_steps` batches: `(count, ...)` by name; views."""
        found = {}
        arrays = arrays_of(named, num_steps, shape)
        for array, start in zip(
            arrays, starts(num_steps * math.prod(shape) * dtype.itemsize, arrays), strict=False
        ):
            whole = self.storage[start : start + array.num_bytes].view(SENT_DTYPES[array.dtype])
            found[array.name] = whole.view(array.shape)[first : first + count]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSizes:
    """How many slots there are, and how many steps of the largest batches each holds."""

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
    def least_bytes(self) -> int:
        """Bytes of two slots of one batch each, with which a loader can work."""
        return 2 * -(-self.batch_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots together."""
        return self.num_slots * self.slot_bytes


class HostBudget:
    """What all loaders of the process may take for slots: half of the host's memory, by the ranks on it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._taken: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def share(self, processes_on_host: int) -> int:
        """Return the bytes of one process of so many that share the host."""
        return host_memory_bytes() // 2 // processes_on_host

    def taken(self, besides: object = None) -> int:
        """Return the bytes that loaders of this process have, without one of them."""
        with self._lock:
            self._forget_parents()
            return sum(num_bytes for owner, num_bytes in self._taken.items() if owner is not besides)

    def take(self, owner: object, num_bytes: int) -> None:
        """Count so many bytes for a loader, in place of what was counted for it; until it is collected."""
        with self._lock:
            self._forget_parents()
            self._taken[owner] = num_bytes

    def _forget_parents(self) -> None:
        if os.getpid() != self._pid:  # a forked child: it never writes to the parent's slots
            self._taken.clear()
            self._pid = os.getpid()


BUDGET = HostBudget()


def choose_slot_sizes(
    *,
    batch_bytes: int,
    prefetch_bytes: int | None,
    in_flight: int,
    ranks_on_host: int = 1,
    num_workers: int = 1,
    taken: int = 0,
) -> SlotSizes:
    """Return the most slots within `prefetch_bytes`, and within what is left of the process's budget.

    There is a slot for each request in flight, one being copied from and one that is ready, unless
    batches are so large that only two fit: one is filled while the other is used.

    Args:
        prefetch_bytes: as it was given; None: `PREFETCH_BYTES`, or two batches if these are larger.
        num_workers: of a DataLoader, each of which has slots of its own.
        taken: bytes of the process's other loaders.
    """
    least = SlotSizes(num_slots=2, steps_per_slot=1, batch_bytes=batch_bytes)
    if prefetch_bytes is not None and prefetch_bytes < least.least_bytes:
        raise errors.InvalidArgument(
            f"prefetch_bytes must hold two batches of {batch_bytes:,} bytes in whole pages, "
            f"{least.least_bytes:,} in all, got {prefetch_bytes:,}; raise it, leave it out, or lower "
            "global_batch_size"
        )
    share = BUDGET.share(ranks_on_host * num_workers)
    if share - taken < least.least_bytes:
        raise errors.InvalidArgument(
            f"two batches of {batch_bytes:,} bytes need {least.least_bytes:,} bytes of memory; half of this "
            f"host's, over {ranks_on_host} ranks of {num_workers} workers, is {share:,}, of which other "
            f"loaders of this process have {taken:,}; lower global_batch_size, take fewer workers, or close "
            "a loader"
        )
    wanted = max(PREFETCH_BYTES, least.least_bytes) if prefetch_bytes is None else prefetch_bytes
    budget = min(wanted, share - taken)
    per_slot = budget // (in_flight + 2) // mmap.PAGESIZE * mmap.PAGESIZE  # slots are whole pages
    steps = min(min(REQUEST_BYTES, per_slot) // batch_bytes, MAX_STEPS_PER_REQUEST)
    one = replace(least, num_slots=1, steps_per_slot=max(1, steps))
    return replace(one, num_slots=max(2, min(budget // one.slot_bytes, MAX_SLOTS)))


def cut_slots(memory: torch.Tensor, size: SlotSizes) -> tuple[Slot, ...]:
    """Return the slots of a piece of memory of `size.num_bytes`; they keep it alive."""
    view = memoryview(memory.numpy().data)
    cuts = range(0, size.num_bytes, size.slot_bytes)
    return tuple(Slot(view[at : at + size.slot_bytes], memory[at : at + size.slot_bytes]) for at in cuts)


def host_memory_bytes() -> int:
    """Return the bytes of memory that this process may use: the machine's, or less in a cgroup."""
    limits = [_physical_bytes()]
    with suppress(OSError):  # not Linux
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers == "":
                limits += _limits("/sys/fs/cgroup", group, "memory.max")
            elif "memory" in controllers.split(","):
                limits += _limits("/sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
    return min(limits)


def _physical_bytes() -> int:
    """Return the bytes of the machine's memory."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Windows: MEMORYSTATUSEX of sysinfoapi.h, whose first field is its length and third ullTotalPhys.
    status = (ctypes.c_uint64 * 8)(64)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(status)  # type: ignore[attr-defined]
    return int(status[1])


def _limits(root: str, group: str, name: str) -> Iterator[int]:
    """Yield the limits of a cgroup and of all above it; in a container its own group is the root."""
    folder = Path(root, group.lstrip("/"))
    for place in (folder, *folder.parents):
        if place.is_relative_to(root) and (place / name).is_file():
            text = (place / name).read_text().strip()
            if text.isdigit():  # not "max"
                yield int(text)
