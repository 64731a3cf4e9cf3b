"""Survive a page of a map that cannot be read.

Touching a page beyond the end of a truncated file, or one that the disk fails to deliver, raises SIGBUS,
which ends the process. The guard's signal handler maps a page of zeros in its place and counts the
fault, so that the copy continues. The caller checks the count after the copy and discards the zeros.

The signal is synchronous: it comes in the thread and at the instruction that touched the page, which is
a copy by NumPy, never the interpreter or the allocator. That is why the handler may be Python. At an
address outside guarded ranges the signal ends the process, as before. The HotSpot JVM treats mapped
buffers in the same way.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

_SA_SIGINFO = 4
_SA_NODEFER = 0x40000000
MAP_FIXED = 0x10
_SIG_DFL = 0


@dataclass(slots=True, eq=False)
class GuardedRange:
    """A range of mapped memory under guard: addresses [start, stop)."""

    start: int
    stop: int
    num_faults: int = 0  # pages that could not be read; from then on they read as zeros


class _SignalInfo(ctypes.Structure):
    # The first fields of siginfo_t on 64-bit Linux (asm-generic/siginfo.h).
    _fields_ = (
        ("si_signo", ctypes.c_int),
        ("si_errno", ctypes.c_int),
        ("si_code", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("si_addr", ctypes.c_size_t),
    )


_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_SignalInfo), ctypes.c_void_p)


class _SignalAction(ctypes.Structure):
    # struct sigaction of glibc and musl on 64-bit Linux; sigset_t has 1,024 bits.
    _fields_ = (
        ("sa_sigaction", _Handler),
        ("sa_mask", ctypes.c_ulong * 16),
        ("sa_flags", ctypes.c_int),
        ("sa_restorer", ctypes.c_void_p),
    )


_fault_numbers = itertools.count(1)
_last_fault = [0]

# Each change, and the handler's copy, is one operation of C code that no other thread and no garbage
# collection interrupts: no lock is needed. A garbage collection may close files at any time.
_ranges: set[GuardedRange] = set()


def guard(start: int, num_bytes: int) -> GuardedRange:
    """Put a mapped range under guard, until `release`."""
    guarded = GuardedRange(start, start + num_bytes)
    _ranges.add(guarded)
    return guarded


def last_fault() -> int:
    """Return the number of the last page of all ranges that could not be read.

    While it stays, no range has had a fault: cheaper than to look at each of hundreds.
    """
    return _last_fault[0]


def release(guarded: GuardedRange) -> None:
    """End the guard of a range before it is unmapped; idempotent."""
    _ranges.discard(guarded)


@cache
def libc() -> ctypes.CDLL:
    """Return the C library with the types of `mmap`, `madvise` and `signal`."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal.restype = ctypes.c_void_p
    return library


def install() -> bool:
    """Install the handler for this process; return whether it is installed.

    Each time anew: a library that was loaded since may have installed its own, as Ray does. Only 64-bit Linux
    is supported. Elsewhere a file that is truncated while it is read may end the process.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    return bool(libc().sigaction(signal.SIGBUS, ctypes.byref(_action()), None) == 0)


@cache  # the handler must live as long as the process
def _action() -> _SignalAction:
    return _SignalAction(sa_sigaction=_make_handler(), sa_flags=_SA_SIGINFO | _SA_NODEFER)


def _make_handler() -> Callable[..., None]:
    # Looked up before the signal, so that the handler does as little as possible.
    map_pages, set_action = libc().mmap, libc().signal
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    page = mmap.PAGESIZE

    def handle(number: int, info: ctypes._Pointer[_SignalInfo], context: int) -> None:
        address = info.contents.si_addr
        is_guarded = False
        for guarded in _ranges.copy():
            if guarded.start <= address < guarded.stop:  # those of two extents may overlap
                guarded.num_faults += 1
                is_guarded = True
        _last_fault[0] = next(_fault_numbers)  # before others can read the zeros
        first = address - address % page
        if is_guarded and map_pages(first, page, mmap.PROT_READ, flags, -1, 0) == first:
            return
        # With the default action restored, the instruction runs again and ends the process. If no page
        # can be mapped (vm.max_map_count, ulimit -v), it would otherwise fault for ever.
        set_action(number, _SIG_DFL)

    return _Handler(handle)
