"""Write what was recorded of rows to Parquet files of one rank, in a thread of its own.

    rank-00003-part-000017.parquet        step int64, row int32 of the global batch, source text, loss float32

A part is written anew every `flush_seconds` until it has `part_rows` rows: to a hidden file beside it, which
is then renamed. So a file is whole whenever a process is killed, and there are as few files as rows allow.
A part is of one `Session`, which its metadata describe under `METADATA_KEY` as JSON. A session goes on in
plans that continue its plan: the last of them has all rows.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from corpus_client import errors

METADATA_KEY = b"corpus-losses"
VERSION = 1
PART_ROWS = 1 << 18  # 1.5 MB on disk; a rank with 64 rows a step of 0.2 s fills a part in 14 minutes
FLUSH_SECONDS = 30.0  # what a killed process loses at most, beside the second before they come here
QUEUED_ROWS = 1 << 18  # rows that wait for the thread at most, 3 MiB; further ones are lost
STEP_ROWS = 8  # a step's numbers take as much memory as so many rows
JOIN_SECONDS = 15.0  # longest wait for the thread when the loader is closed

log = logging.getLogger("corpus_client")


@dataclass(frozen=True, slots=True)
class Session:
    """What the records of a loader have in common, from where it began or was sent to another step.

    sources: the names that numbers of sources stand for.
    began: nanoseconds since 1970; of two records of one row, that of the later session counts.
    """

    plan: str
    sources: tuple[str, ...]
    rank: int
    world_size: int
    first_step: int
    began: int

    def goes_on_in(self, later: Session) -> bool:
        """Return whether one part may hold the records of both: a plan has the rows of those it continues."""
        return (self.began, self.sources) == (later.began, later.sources)


class Rows(NamedTuple):
    """The records of some steps, of which each has its number of rows.

    losses: `(rows of all steps,) float32`; sources: the same, uint16.
    """

    session: Session
    steps: Sequence[int]
    lengths: Sequence[int]
    losses: npt.NDArray[np.float32]
    sources: npt.NDArray[np.uint16]


class _Columns(NamedTuple):
    """The columns of a part, or of some of its rows."""

    step: npt.NDArray[np.int64]
    row: npt.NDArray[np.int32]
    source: npt.NDArray[np.uint16]
    loss: npt.NDArray[np.float32]


class RowWriter:
    """Takes rows from the training loop and never keeps it waiting; used by one thread.

    `close` is idempotent; dropping the writer, or ending the interpreter, closes it, too.

    Raises:
        InvalidArgument: pyarrow is not installed, or the folder cannot be made.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        rank: int,
        *,
        part_rows: int = PART_ROWS,
        flush_seconds: float = FLUSH_SECONDS,
        queued_rows: int = QUEUED_ROWS,
    ) -> None:
        try:
            importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise errors.InvalidArgument(
                "record_dir= needs pyarrow, which is not installed; pip install 'corpus-client[record]'"
            ) from error
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise errors.InvalidArgument(f"record_dir must be a folder that can be made: {error}") from error
        self._queue = _Queue(queued_rows)
        parts = _Parts(folder, rank, part_rows, self._queue)
        thread = threading.Thread(
            target=_write, args=(self._queue, parts, flush_seconds), name="corpus-losses", daemon=True
        )
        self._closer = weakref.finalize(self, _close, self._queue, thread, os.getpid())
        thread.start()

    @property
    def num_written(self) -> int:
        """Rows that are in files."""
        return self._queue.num_written

    @property
    def num_lost(self) -> int:
        """Rows that no file will have."""
        return self._queue.num_lost

    def put(self, rows: Rows) -> None:
        """Hand rows over to the thread, or count them as lost; waits for nothing."""
        self._queue.put(rows)

    def close(self) -> None:
        """Have everything written, and wait a bounded time for that."""
        self._closer()


class _Queue:
    """Rows on their way to the thread, and what became of earlier ones; guarded by its condition."""

    def __init__(self, max_rows: int) -> None:
        self.num_written = self.num_lost = 0
        self._max_rows = max_rows
        self._changed = threading.Condition()
        self._rows: deque[Rows] = deque()
        self._num_rows = 0
        self._stopped = False
        self._told: set[str] = set()

    def put(self, rows: Rows) -> None:
        taken = len(rows.losses) + STEP_ROWS * len(rows.steps)
        with self._changed:
            fits = not self._stopped and self._num_rows + taken <= self._max_rows
            if fits:
                self._rows.append(rows)
                self._num_rows += taken
                if self._is_half_full():
                    self._changed.notify()
        if not fits:
            self.lose(len(rows.losses), "the disk is slower than the training, and the queue is full")

    def take(self, seconds: float) -> tuple[list[Rows], bool]:
        """Return what came within so many seconds, and whether nothing more will come.

        Earlier only if the queue is half full: else the thread would take the interpreter's lock each step.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._is_half_full(), seconds)
            found = list(self._rows)
            self._rows.clear()
            self._num_rows = 0
            return found, self._stopped

    def _is_half_full(self) -> bool:
        return 2 * self._num_rows >= self._max_rows

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def write(self, num_rows: int) -> None:
        with self._changed:
            self.num_written += num_rows

    def lose(self, num_rows: int, reason: str) -> None:
        with self._changed:
            self.num_lost += num_rows
        self.tell("recorded losses of rows are lost, and the training goes on", reason)

    def tell(self, what: str, reason: str) -> None:
        """Log a warning, once in the writer's life."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s: %s; see num_lost_rows of loader.stats()", what, reason)


class _Parts:
    """The part that is being filled, by the thread alone."""

    def __init__(self, folder: Path, rank: int, part_rows: int, queue: _Queue) -> None:
        self._folder = folder
        self._prefix = f"rank-{rank:05}-part-"
        self._part_rows = part_rows
        self._queue = queue
        self._session: Session | None = None
        self._begin()

    def _begin(self) -> None:
        self._columns: list[_Columns] = []
        self._num_rows = self._num_written = 0
        self._path: Path | None = None  # once a file of that name is there

    def add(self, rows: Rows) -> None:
        """Add rows; writes the part if they do not belong into it, or fill it."""
        if rows.session is not self._session:
            if self._session is None or not self._session.goes_on_in(rows.session):
                self.end()
            self._session = rows.session
        lengths = np.array(rows.lengths)
        firsts = rows.session.rank * lengths - (np.cumsum(lengths) - lengths)
        numbers = np.arange(len(rows.losses)) + np.repeat(firsts, lengths)
        steps = np.repeat(np.array(rows.steps, np.int64), lengths)
        self._columns.append(_Columns(steps, numbers.astype(np.int32), rows.sources, rows.losses))
        self._num_rows += len(rows.losses)
        if self._num_rows >= self._part_rows:
            self.end()

    def flush(self) -> None:
        """Write the part as it is now; after an error it is written the next time."""
        if self._session is None or self._num_written == self._num_rows:
            return
        self._columns = [_Columns(*map(np.concatenate, zip(*self._columns, strict=True)))]
        try:
            path = self._path or self._new_path()
            _write_whole(path, _table(self._session, self._columns[0]))
        except Exception as error:  # noqa: BLE001 - whatever the disk does, the training goes on
            self._queue.tell("recorded losses could not be written, and are tried again", repr(error))
            return
        self._queue.write(self._num_rows - self._num_written)
        self._num_written, self._path = self._num_rows, path

    def end(self) -> None:
        """Write the part for the last time, and begin another; idempotent."""
        self.flush()
        if lost := self._num_rows - self._num_written:
            self._queue.lose(lost, f"{self._folder} cannot be written to")
        self._begin()

    def _new_path(self) -> Path:
        """Return the path of the next part; earlier runs of the rank have numbers, too."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = re.compile(rf"\.?{self._prefix}(\d+)\.parquet(\.partial)?")
        names = (name.fullmatch(each.name) for each in self._folder.iterdir())
        taken = [int(found[1]) for found in names if found]
        number = max(taken, default=-1) + 1
        while True:
            path = self._folder / f"{self._prefix}{number:06}.parquet"
            with contextlib.suppress(FileExistsError):
                _hidden(path).open("xb").close()  # so that no two processes take one number
                if not path.exists():
                    return path
                _hidden(path).unlink()
            number += 1


def _table(session: Session, columns: _Columns) -> Any:
    arrow = importlib.import_module("pyarrow")
    names = arrow.array(session.sources, arrow.string())
    source = arrow.DictionaryArray.from_arrays(columns.source.astype(np.int32), names)
    described = json.dumps({"version": VERSION, **asdict(session)})
    table = arrow.table({**columns._asdict(), "source": source})
    return table.replace_schema_metadata({METADATA_KEY: described})


def _hidden(path: Path) -> Path:
    """Return the name of a file that is not whole: hidden, because readers of Parquet take all others."""
    return path.with_name(f".{path.name}.partial")


def _write_whole(path: Path, table: Any) -> None:
    body = importlib.import_module("pyarrow").BufferOutputStream()
    importlib.import_module("pyarrow.parquet").write_table(
        table, body, compression="zstd", write_page_checksum=True
    )
    partial = _hidden(path)
    try:
        with partial.open("wb") as file:
            file.write(body.getvalue())
            file.flush()
            os.fsync(file.fileno())  # the new name must not reach the disk before the content
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _write(queue: _Queue, parts: _Parts, flush_seconds: float) -> None:
    due, stopped = time.monotonic() + flush_seconds, False
    while not stopped:
        found, stopped = queue.take(max(0.0, due - time.monotonic()))
        for rows in found:
            parts.add(rows)
        if time.monotonic() >= due:
            parts.flush()
            due = time.monotonic() + flush_seconds
    parts.end()


def _close(queue: _Queue, thread: threading.Thread, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: the thread is the parent's
    queue.stop()
    thread.join(JOIN_SECONDS)
    if thread.is_alive():
        log.warning("recorded losses are still being written after %.0f s, and may be lost", JOIN_SECONDS)
