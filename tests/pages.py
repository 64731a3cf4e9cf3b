"""Which pages of a file the page cache holds, and how to be rid of them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest


def drop(path: Path) -> None:
    """Take a file out of the page cache; no map of it may have been touched. Skips where that cannot be."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what is not on disk yet stays
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_of(path).any():
        pytest.skip("this file system keeps its pages in memory")


def resident(view: np.ndarray) -> np.ndarray:
    """Return for each page of a map whether the page cache holds it."""
    pages = np.empty(-(-view.nbytes // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(view.ctypes.data, view.nbytes, pages.ctypes.data) == 0, os.strerror(
        ctypes.get_errno()
    )
    return (pages & 1).astype(bool)


def resident_of(path: Path) -> np.ndarray:
    """Return for each page of a file whether the page cache holds it, through a map of its own."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return resident(np.frombuffer(mapped, np.uint8))  # the view goes before the map does
