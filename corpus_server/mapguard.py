"""Survive a page of a map that cannot be read.

Touching a page beyond the end of a file that was cut, or one that the disk fails to deliver, raises
SIGBUS, which ends the process. The guard's handler puts a page of zeros in its place and notes it,
so that the copy runs on; whoever copied looks afterwards, and throws the zeros away.

The signal comes synchronously, in the thread and at the instruction that touched the page: within a
copy, never within the interpreter or the allocator, so that the handler may be Python. Other memory
is none of its business: there the signal ends the process as before. The HotSpot JVM treats its
mapped buffers in the same way.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import sys
import threading
from collections.abc import Callable

_SA_SIGINFO = 4
_SA_NODEFER = 0x40000000
_MAP_FIXED = 0x10
_SIG_DFL = 0


class GuardedRange:
    """A stretch of mapped memory under guard.

    Attributes:
        start, stop: addresses.
        num_faults: pages that could not be read so far; they read as zeros from then on.
    """

    __slots__ = ("num_faults", "start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self.num_faults = 0


class _SignalInfo(ctypes.Structure):
    # siginfo_t of 64-bit Linux, as far as it is read here (asm-generic/siginfo.h).
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


# Replaced as a whole, so that the handler needs no lock.
_ranges: tuple[GuardedRange, ...] = ()
_lock = threading.Lock()
_installed: list[object] = []


def guard(start: int, num_bytes: int) -> GuardedRange:
    """Put a mapped range under guard, until `release`."""
    global _ranges
    guarded = GuardedRange(start, start + num_bytes)
    with _lock:
        _ranges = (*_ranges, guarded)
    return guarded


def release(guarded: GuardedRange) -> None:
    """Take a range out of guard, before it is unmapped; idempotent."""
    global _ranges
    with _lock:
        _ranges = tuple(each for each in _ranges if each is not guarded)


def install() -> bool:
    """Install the handler for this process; idempotent.

    Returns:
        Whether there is one: only on 64-bit Linux. Elsewhere a file that is cut while it is read may
        end the process.
    """
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    with _lock:
        if _installed:
            return True
        libc = ctypes.CDLL(None, use_errno=True)
        action = _SignalAction(sa_sigaction=_make_handler(libc), sa_flags=_SA_SIGINFO | _SA_NODEFER)
        if libc.sigaction(signal.SIGBUS, ctypes.byref(action), None) != 0:
            return False
        _installed.append(action)  # the handler must live as long as the process
        return True


def _make_handler(libc: ctypes.CDLL) -> Callable[..., None]:
    # Everything that the handler uses is made now: in it, as little as possible should happen.
    map_pages = libc.mmap
    map_pages.restype = ctypes.c_void_p
    map_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    page = mmap.PAGESIZE

    def handle(number: int, info: ctypes._Pointer[_SignalInfo], context: int) -> None:
        address = info.contents.si_addr
        for guarded in _ranges:
            if guarded.start <= address < guarded.stop:
                guarded.num_faults += 1
                first = address - address % page
                if map_pages(first, page, mmap.PROT_READ, flags, -1, 0) == first:
                    return
        # The instruction runs again, and this time ends the process. So it must where no page can be
        # mapped (vm.max_map_count, ulimit -v): it would fault for ever.
        libc.signal(number, _SIG_DFL)

    return _Handler(handle)
