"""Files of recorded rows: whole whatever ends the process, few, and never in the training loop's way."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as parquet  # type: ignore[import-untyped]
import pytest

from corpus_client import errors
from corpus_client.recording.files import METADATA_KEY, Rows, RowWriter, Session
from tests.serving import environment

SESSION = Session("f" * 64, ("chat", "web"), 1, 2, 0, 5)


def some_rows(step: int, num_rows: int = 4, session: Session = SESSION) -> Rows:
    sources = np.arange(num_rows, dtype=np.uint16) % 2
    return Rows(session, [step], [num_rows], np.full(num_rows, step + 0.5, np.float32), sources)


def read(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the rows of each file, in order of the names."""
    return [parquet.read_table(each).to_pylist() for each in sorted(folder.glob("[!.]*"))]


def wait_for(what: Any) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rows_are_in_parts_of_one_session(tmp_path: Path) -> None:
    """A part ends when it is full, and where another session begins; steps of it may differ in their rows."""
    later = Session("e" * 64, ("chat", "web", "math"), 1, 2, 3, 6)
    writer = RowWriter(tmp_path / "new", 1, part_rows=8)
    for step in range(2):
        writer.put(some_rows(step))
    writer.put(some_rows(2, 6)._replace(steps=[2, 3], lengths=[4, 2]))
    writer.put(some_rows(3, 2, later))
    writer.close()
    files = sorted((tmp_path / "new").iterdir())
    assert [each.name for each in files] == [f"rank-00001-part-{n:06}.parquet" for n in range(3)]
    assert [[(row["step"], row["row"]) for row in rows] for rows in read(tmp_path / "new")] == [
        [(0, 4), (0, 5), (0, 6), (0, 7), (1, 4), (1, 5), (1, 6), (1, 7)],
        [(2, 4), (2, 5), (2, 6), (2, 7), (3, 2), (3, 3)],
        [(3, 2), (3, 3)],
    ]
    table = parquet.read_table(files[0])
    assert [str(each.type) for each in table.schema] == [
        "int64",
        "int32",
        "dictionary<values=string, indices=int32, ordered=0>",
        "float",
    ]
    assert table.slice(5, 1).to_pylist() == [{"step": 1, "row": 5, "source": "web", "loss": 1.5}]
    assert json.loads(parquet.read_schema(files[2]).metadata[METADATA_KEY]) == {
        "version": 1,
        "plan": "e" * 64,
        "sources": ["chat", "web", "math"],
        "rank": 1,
        "world_size": 2,
        "first_step": 3,
        "began": 6,
    }
    assert (writer.num_written, writer.num_lost) == (16, 0)


def test_a_part_is_renewed_until_it_is_full(tmp_path: Path) -> None:
    """So a process that is killed loses some seconds, and there are no more files for it."""
    writer = RowWriter(tmp_path, 0, flush_seconds=0.01)
    for step in range(3):
        writer.put(some_rows(step))
        wait_for(lambda number=4 * step + 4: writer.num_written == number)
        assert [len(each) for each in read(tmp_path)] == [4 * step + 4]
    writer.close()


def test_another_run_takes_the_next_number(tmp_path: Path) -> None:
    """Also beside what a killed process left, and beside a second process of this rank."""
    (tmp_path / ".rank-00000-part-000004.parquet.partial").touch()
    writers = [RowWriter(tmp_path, 0, part_rows=4, flush_seconds=0.01) for _ in range(2)]
    for step in range(8):
        for writer in writers:
            writer.put(some_rows(step))
    for writer in writers:
        writer.close()
    names = sorted(each.name for each in tmp_path.glob("rank*"))
    assert names == [f"rank-00000-part-{n:06}.parquet" for n in range(5, 21)]
    assert sorted(row["step"] for rows in read(tmp_path) for row in rows) == sorted([*range(8)] * 8)


def test_what_does_not_fit_is_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = RowWriter(tmp_path, 0, queued_rows=100)
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            writer.put(some_rows(step, 101))
    writer.put(some_rows(3))
    writer.close()
    assert (writer.num_written, writer.num_lost) == (4, 303)
    assert [each.message for each in caplog.records] == [
        "recorded losses of rows are lost, and the training goes on: the disk is slower than the training, "
        "and the queue is full; see num_lost_rows of loader.stats()"
    ]


def test_a_folder_that_went_away_comes_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """While it cannot be made the rows are kept, up to those of one part."""
    folder = tmp_path / "records"
    writer = RowWriter(folder, 0, part_rows=12, flush_seconds=0.01)
    folder.rmdir()
    folder.touch()
    for step in range(4):
        writer.put(some_rows(step))
    wait_for(lambda: writer.num_lost == 12)
    folder.unlink()
    writer.close()
    assert [[row["step"] for row in rows] for rows in read(folder)] == [[3] * 4]
    assert writer.num_written == 4
    said = [each.message for each in caplog.records]
    assert len(said) == 2
    assert "could not be written, and are tried again: FileExistsError" in said[0]
    assert f"are lost, and the training goes on: {folder} cannot be written to" in said[1]


def test_files_are_whole_whenever_the_process_is_killed(tmp_path: Path) -> None:
    """The rows of all files are those of the first steps, without a gap."""
    program = (
        "import sys, itertools; from tests.client.recording.test_files import RowWriter, some_rows\n"
        "from pathlib import Path\n"
        f"writer = RowWriter(Path({str(tmp_path)!r}), 0, part_rows=40, flush_seconds=1e-4)\n"
        "for step in itertools.count():\n"
        "    writer.put(some_rows(step))\n"
        "    while writer.num_written < 4 * step - 20: pass\n"
    )
    for number in range(3):
        before = len(list(tmp_path.glob("rank*")))
        with subprocess.Popen([sys.executable, "-c", program], env=environment()) as process:
            wait_for(lambda before=before: len(list(tmp_path.glob("rank*"))) > before + 3)
            time.sleep(0.003 * number)
            process.send_signal(signal.SIGKILL)
        rows = [row for part in read(tmp_path)[before:] for row in part]
        assert [row["step"] for row in rows] == [n // 4 for n in range(len(rows))]
        assert len(rows) >= 120


def test_a_process_that_ends_writes_what_was_put(tmp_path: Path) -> None:
    program = (
        "from tests.client.recording.test_files import RowWriter, some_rows; from pathlib import Path\n"
        f"writer = RowWriter(Path({str(tmp_path)!r}), 0); writer.put(some_rows(7))\n"
        "import os, sys\n"
        "if os.fork() == 0: sys.exit()\n"  # the thread is not the child's
        "os.wait()"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment(), check=True)
    assert [len(each) for each in read(tmp_path)] == [4]


def test_what_cannot_work_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.InvalidArgument, match="record_dir must be a folder that can be made"):
        RowWriter(tmp_path / "file", 0)
    with (
        mock.patch.dict(sys.modules, {"pyarrow.parquet": None}),
        pytest.raises(errors.InvalidArgument, match=r"pip install 'corpus-client\[record\]'"),
    ):
        RowWriter(tmp_path, 0)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
