"""Survive a page of a map that cannot be read.

Touching a page beyond the end of a file that was cut, or one that the disk does not deliver, raises SIGBUS,
which would end the training process without a word. The handler maps a page of zeros in its place and counts
it, so that the copy goes on; who copied looks at the count afterwards, and discards the zeros.

The signal is synchronous: it comes in the thread and at the instruction that touched the page, which is a
copy by NumPy, never the interpreter or the allocator. That is why the handler may be Python.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import sys
import weakref
from dataclasses import dataclass
from typing import Any

_SA_SIGINFO, _SA_NODEFER, _MAP_FIXED = 4, 0x40000000, 0x10


@dataclass(slots=True, eq=False)
class GuardedMap:
    """A map under guard: addresses [start, stop)."""

    start: int
    stop: int
    num_faults: int = 0  # pages that could not be read; from then on they read as zeros


class _SignalInfo(ctypes.Structure):
    # The first fields of siginfo_t on 64-bit Linux (asm-generic/siginfo.h).
    _fields_ = (
        *((name, ctypes.c_int) for name in ("signo", "errno", "code", "pad")),
        ("addr", ctypes.c_size_t),
    )


class _SignalAction(ctypes.Structure):
    # struct sigaction of glibc and musl on 64-bit Linux; sigset_t has 1,024 bits.
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


# Each change, and the handler's copy, is one operation of C code, which nothing interrupts: without a lock.
_maps: set[GuardedMap] = set()


def guard(view: mmap.mmap, address: int) -> GuardedMap:
    """Put a map under guard for as long as it lives; nothing is done but on 64-bit Linux."""
    guarded = GuardedMap(address, address + len(view))
    if _HANDLER is not None:
        _maps.add(guarded)
        weakref.finalize(view, _maps.discard, guarded)
        _HANDLER.install()
    return guarded


class _Handler:
    """The handler of this process, and what handled the signal before: of other pages it still does."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._map, self._set = libc.mmap, libc.sigaction  # looked up before the signal
        kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.POINTER(_SignalInfo), ctypes.c_void_p)
        self._function = kind(self._handle)
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        self._own = _SignalAction(handler=address, flags=_SA_SIGINFO | _SA_NODEFER)
        self._before = _SignalAction()

    def install(self) -> None:
        """Handle the signal from now on.

        Each time anew: a worker of a `DataLoader` sets a handler of its own after it was forked.
        """
        before = _SignalAction()
        self._set(signal.SIGBUS, ctypes.byref(self._own), ctypes.byref(before))
        if before.handler != self._own.handler:
            self._before = before

    def _handle(self, number: int, info: Any, context: int) -> None:
        address, page = info.contents.addr, mmap.PAGESIZE
        guarded = [each for each in _maps.copy() if each.start <= address < each.stop]
        for each in guarded:
            each.num_faults += 1
        first = address - address % page
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if not guarded or self._map(first, page, mmap.PROT_READ, flags, -1, 0) != first:
            self._set(number, ctypes.byref(self._before), None)  # the instruction runs again


_HANDLER = _Handler() if sys.platform == "linux" and ctypes.sizeof(ctypes.c_void_p) == 8 else None
