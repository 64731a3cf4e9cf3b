"""Memory of one piece after another comes from the process itself, not anew from the kernel."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from corpus_server.data.heap import KEPT_BYTES, TRIMMED_FROM_BYTES
from corpus_server.read.reading import PIECE_BYTES

NUM_PIECES = 5
"""Above what is kept, so that trimming down to that would begin, and below what is trimmed."""

_PIECES = f"""
import resource, threading
import numpy as np
from corpus_server.data.heap import keep_freed

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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_pieces_are_made_of_memory_that_is_there() -> None:
    done = subprocess.run([sys.executable, "-c", _PIECES], capture_output=True, text=True, check=True)
    without, kept = map(int, done.stdout.split())
    assert without > 10_000
    assert kept < 100
    assert KEPT_BYTES < NUM_PIECES * PIECE_BYTES < TRIMMED_FROM_BYTES
