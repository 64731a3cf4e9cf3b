"""A file that a loader reads itself is cut, or its disk fails: training gets an error, and does not die."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import some_tokens, write_raw
from tests.faults.failing_disk import failing_disk, why_not
from tests.serving import RunningServer, environment

NUM_TOKENS = 8_000_000

# In a process of its own, because without the guard it dies.
TRAINING = """
import sys
from pathlib import Path
from corpus_client import CorpusLoader, Staging, errors

source, local_root, fault = sys.argv[1:]
staging = Staging(local_root=local_root) if local_root else Staging()
plan = {"corpus": "web", "seq_len": 64, "global_batch_size": 64}
with CorpusLoader(source, **plan, device="cpu", staging=staging) as loader:
    try:
        for batch in loader:
            if batch.step == 2:
                Path(fault).write_bytes(b"eio" if fault.endswith("fault") else b"")
            assert batch.step < 2000, "nobody noticed"
    except errors.LocalCopyMismatch as error:
        print(error)
"""


def run_training(folder: Path, source: str | Path, local_root: str | Path, fault: Path) -> str:
    (folder / "runtime").mkdir(mode=0o700)
    own = {"XDG_RUNTIME_DIR": str(folder / "runtime"), "XDG_STATE_HOME": str(folder / "state")}
    words = [sys.executable, "-X", "faulthandler", "-c", TRAINING, *map(str, (source, local_root, fault))]
    done = subprocess.run(words, capture_output=True, text=True, env=environment() | own)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(why_not() is not None, reason=f"no FUSE here: {why_not()}")
@pytest.mark.parametrize("way", ["by path", "local_root"])
def test_a_disk_that_fails_is_an_error_of_the_loader(way: str, tmp_path: Path) -> None:
    with failing_disk(tmp_path) as disk:
        path, fault = write_raw(disk.path / "web.bin", some_tokens(NUM_TOKENS)), tmp_path / "fault"
        if way == "by path":
            said = run_training(tmp_path, path, "", fault)
        else:
            good = write_raw(tmp_path / "web.bin", some_tokens(NUM_TOKENS))
            with RunningServer({"web": good}, tmp_path) as server:
                said = run_training(tmp_path, server.url, disk.path, fault)
        disk.fail("")
    assert "web.bin: the disk did not deliver" in said


@pytest.mark.parametrize("way", ["by path", "local_root"])
def test_a_file_that_is_cut_is_an_error_of_the_loader(way: str, tmp_path: Path) -> None:
    (tmp_path / "copy").mkdir()
    path = write_raw(tmp_path / "copy" / "web.bin", some_tokens(NUM_TOKENS))
    if way == "by path":
        said = run_training(tmp_path, path, "", path)
    else:
        good = write_raw(tmp_path / "web.bin", some_tokens(NUM_TOKENS))
        with RunningServer({"web": good}, tmp_path) as server:
            said = run_training(tmp_path, server.url, tmp_path / "copy", path)
    assert "web.bin changed while it was in use" in said


OTHERS = """
import mmap, sys
import numpy as np
from corpus_client.staging.guard import guard

views = []
for path in sys.argv[1:]:
    with open(path, "r+b") as file:
        views.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        file.truncate(0)
own, other = (np.frombuffer(view, np.uint8) for view in views)
guarded = guard(views[0], own.ctypes.data)
print(own.sum(), guarded.num_faults, flush=True)
other.sum()
"""


def test_pages_of_others_end_the_process_as_before(tmp_path: Path) -> None:
    paths = [write_raw(tmp_path / f"{number}.bin", some_tokens(4096)) for number in range(2)]
    words = [sys.executable, "-X", "faulthandler", "-c", OTHERS, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "0 2\n"), done.stderr
    assert "Fatal Python error: Bus error" in done.stderr, "the handler that was there before"
