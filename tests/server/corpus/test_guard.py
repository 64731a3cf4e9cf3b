"""Pages that cannot be read: zeros and a count inside a guarded range, the usual end outside.

The handler is the whole process's, so every case runs in a process of its own; -7 is SIGBUS.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import some_tokens, write_raw
from tests.serving import environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no guard elsewhere")

PRELUDE = """
import mmap, os, sys, threading
from pathlib import Path
import numpy as np
from corpus_server.corpus import guard as mapguard

PAGE = mmap.PAGESIZE
path = Path(sys.argv[1])

def mapped(num_pages):
    path.write_bytes(b"\\x07" * (num_pages * PAGE))
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

def guard(view):
    return mapguard.guard(view.ctypes.data, view.nbytes)
"""


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )


def test_a_page_behind_a_cut_file_reads_as_zeros_and_is_counted(tmp_path: Path) -> None:
    """Once for each page, at whatever byte; the pages before the cut keep their bytes."""
    ended = run(
        """
assert mapguard.install()
view = mapped(10)
guarded = guard(view)
os.truncate(path, 4 * PAGE)
assert guarded.num_faults == 0
assert view[5 * PAGE + 17] == 0
assert guarded.num_faults == 1
copied = view[4 * PAGE - 8 :].copy()
assert (copied[:8] == 7).all() and not copied[8:].any()
assert guarded.num_faults == 6
assert (view[: 4 * PAGE] == 7).all() and not view[4 * PAGE :].any()
print(guarded.num_faults)
""",
        tmp_path / "cut",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "6\n", "")


@pytest.mark.parametrize(
    "case",
    [
        "",
        "mapguard.install()",
        "mapguard.install(); guard(other)",
        "mapguard.install(); mapguard.release(guard(view))",
        "mapguard.install(); mapguard.guard(view.ctypes.data, 6 * PAGE)",
        "guard(view)",
    ],
    ids=["nothing", "no-range", "another-range", "released", "range-ends-before", "not-installed"],
)
def test_elsewhere_the_signal_ends_the_process(tmp_path: Path, case: str) -> None:
    program = f"""
view = mapped(10)
other = np.frombuffer(mmap.mmap(-1, 10 * PAGE), np.uint8)
{case}
os.truncate(path, 2 * PAGE)
print("alive", flush=True)
view[6 * PAGE]
print("still alive", flush=True)
"""
    ended = run(program, tmp_path / "cut")
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "alive\n")


def test_it_is_installed_anew_after_another_handler_was(tmp_path: Path) -> None:
    """Ray installs its own in a process that starts it, as `faulthandler` does here."""
    program = """
import faulthandler
assert mapguard.install()
faulthandler.enable()
assert mapguard.install()
view = mapped(1)
guarded = guard(view)
os.truncate(path, 0)
print(view[0], guarded.num_faults)
"""
    ended = run(program, tmp_path / "cut")
    assert (ended.returncode, ended.stdout) == (0, "0 1\n"), ended.stderr


@pytest.mark.parametrize("closes", [False, True])
def test_a_file_is_under_guard_until_it_is_closed(tmp_path: Path, closes: bool) -> None:
    """Then other memory may come to lie at its addresses."""
    ended = run(
        f"""
from corpus_server.corpus.files import OpenFile
mapguard.install()
path.write_bytes(bytes(10 * PAGE))
file = OpenFile(path)
view = np.frombuffer(file.map(), np.uint8)
if {closes}:
    file.close()
os.truncate(path, 0)
print("alive", flush=True)
view[0], view[-1]
print("still alive", flush=True)
""",
        tmp_path / "cut",
    )
    if closes:
        assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "alive\n")
    else:
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alive\nstill alive\n", "")


def test_garbage_collection_may_close_files_at_any_time(tmp_path: Path) -> None:
    """Also while the guard of another one begins or ends: the error of opening a file keeps it in a cycle."""
    ended = run(
        """
import gc
from corpus_server.corpus.files import OpenFile
path.write_bytes(bytes(PAGE))
view = np.zeros(PAGE, np.uint8)
start, guarded = view.ctypes.data, guard(view)
for num_objects in range(1, 100):  # so many are made before the next collection
    gc.disable()
    gc.collect()
    file = OpenFile(path)
    file.map()
    file.cycle = file
    del file
    gc.set_threshold(num_objects)
    gc.enable()
    mapguard.release(guarded)
    guarded = mapguard.guard(start, PAGE)
print("alive")
""",
        tmp_path / "file",
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alive\n", "")


def test_memory_that_cannot_be_mapped_ends_the_process_and_no_loop(tmp_path: Path) -> None:
    """Without a page of zeros the same instruction would fault for ever."""
    ended = run(
        """
import resource
mapguard.install()
view = mapped(10)
guard(view)
os.truncate(path, 0)
resource.setrlimit(resource.RLIMIT_AS, (1, resource.RLIM_INFINITY))
view[PAGE]
""",
        tmp_path / "cut",
    )
    assert ended.returncode == -signal.SIGBUS


TRUNCATIONS = """
import random
from corpus_server.errors import CorpusChanged
from corpus_server.read.gather import Gatherer
from corpus_server.corpus.shards import open_runs

mapguard.install()
original = path.read_bytes()
tokens = np.frombuffer(original, "<u2")
draw = random.Random(int(sys.argv[2]))
right = changed = 0
wrong = []
for trial in range(20):
    path.write_bytes(original)
    with open_runs(path)[0] as shard:
        gatherer = Gatherer([shard])
        cut = threading.Event()
        begun = threading.Barrier(4)

        def work(seed):
            global right, changed
            numbers = np.random.default_rng(seed)
            begun.wait()
            for turn in range(100_000):
                last = cut.is_set()
                starts = numbers.integers(0, tokens.size - 129, 256)
                locations = np.stack((np.zeros_like(starts), starts), 1)
                try:
                    out = gatherer.gather(locations, 129, np.dtype("<u2"))
                except CorpusChanged:
                    changed += 1
                    break
                if last or not (out == tokens[starts[:, None] + np.arange(129)]).all():
                    wrong.append((trial, turn))
                    break
                right += 1

        threads = [threading.Thread(target=work, args=(1000 * trial + k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        begun.wait()
        threading.Event().wait(draw.uniform(0, 0.03))
        os.truncate(path, draw.randrange(len(original)))
        cut.set()
        for thread in threads:
            thread.join()
print(wrong, changed, right > 100)
"""


@pytest.mark.parametrize("seed", [1, 2])
def test_a_file_cut_while_threads_gather_never_gives_a_wrong_batch(tmp_path: Path, seed: int) -> None:
    """Catalogue row 13, 20 trials: each batch is right, or CorpusChanged; the process lives."""
    path = write_raw(tmp_path / "a.bin", some_tokens(1_000_000))
    ended = run(TRUNCATIONS, path, seed)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "[] 60 True\n", "")
