"""Memory of one piece after another comes from the heap that all threads share, not anew from the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from corpus_server.answers.heap import KEPT_BYTES, MAX_HEAPS, TRIMMED_FROM_BYTES
from corpus_server.read.reading import PIECE_BYTES

NUM_PIECES = 5
"""Above what is kept, so that trimming down to that would begin, and below what is trimmed."""

_PIECES = f"""
import resource, threading
import numpy as np
from corpus_server.answers.heap import keep_freed

def fill(number):
    for _ in range(number):
        [np.ones({PIECE_BYTES}, np.uint8) for _ in range({NUM_PIECES})]

def faults():
    fill(10)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    fill(100)
    found.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

found = []
for prepare in (bool, keep_freed):
    prepare()
    thread = threading.Thread(target=faults)
    thread.start()
    thread.join()
print(*found)
"""

_THREADS = """
import ctypes, threading
from corpus_server.answers.heap import keep_freed

def work():
    kept = bytearray(10_000)  # a thread gets its heap with its first memory
    started.wait()
    over.wait()

keep_freed()
started, over = threading.Barrier(9), threading.Event()
threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
started.wait()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
over.set()
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")


def _output_of(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


def test_pieces_are_made_of_memory_that_is_there() -> None:
    without, kept = map(int, _output_of(_PIECES).split())
    assert without > 10_000
    assert kept < 100
    assert KEPT_BYTES < NUM_PIECES * PIECE_BYTES < TRIMMED_FROM_BYTES


def test_threads_share_one_heap() -> None:
    assert _output_of(_THREADS).count("<heap nr=") == MAX_HEAPS == 1
