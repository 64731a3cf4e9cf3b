"""The SQLite file that holds plans: its tables, their bounds, and going on where it is damaged or gone.

A file that is damaged, or of a newer release, is renamed, and one that was deleted is made again, also while
the server runs. What cannot be read or written now, on a full disk for example, is `StateUnavailable`; the
next call tries again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from corpus_server.corpus.files import Closing
from corpus_server.errors import InvalidParameter, StateUnavailable
from corpus_server.user_files import locked_folder, reason_of

T = TypeVar("T")
Row = tuple[Any, ...]

_BUSY_SECONDS = 2.0
"""For another process that writes, which takes milliseconds. Readiness and metrics wait as long."""

_PROBE_BYTES = 64 * 1024
"""Of what readiness writes: the document of a plan of 1,000 stages."""

_SCHEMA_VERSION = 3
"""Version 2 did not know who posted a plan."""
_SCHEMA = f"""
    DROP TABLE IF EXISTS plans;
    CREATE TABLE plans (
        id TEXT PRIMARY KEY, seen REAL NOT NULL, num_bytes INTEGER NOT NULL,
        owner TEXT NOT NULL,  -- name of the token that posted it first
        kept INTEGER NOT NULL DEFAULT 0,  -- whether it may not be removed to make room
        document TEXT NOT NULL  -- last: SQLite reads a row up to the column that it needs
    ) WITHOUT ROWID;
    CREATE INDEX plans_seen ON plans (seen DESC, id);  -- else a list of the newest would read every document
    CREATE INDEX plans_of_owner ON plans (owner, seen DESC, id);
    CREATE TABLE totals (num_plans INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
    INSERT INTO totals VALUES (0, 0);
    CREATE TRIGGER plans_added AFTER INSERT ON plans BEGIN
        UPDATE totals SET num_plans = num_plans + 1, num_bytes = num_bytes + new.num_bytes;
    END;
    CREATE TRIGGER plans_removed AFTER DELETE ON plans BEGIN
        UPDATE totals SET num_plans = num_plans - 1, num_bytes = num_bytes - old.num_bytes;
    END;
    PRAGMA user_version = {_SCHEMA_VERSION};
"""

_LATER = """
    CREATE TABLE IF NOT EXISTS runs (
        plan TEXT NOT NULL, run TEXT NOT NULL, seen REAL NOT NULL, PRIMARY KEY (plan, run)
    ) WITHOUT ROWID;
    CREATE TRIGGER IF NOT EXISTS runs_removed AFTER DELETE ON plans BEGIN
        DELETE FROM runs WHERE plan = old.id;
    END;

    CREATE TABLE IF NOT EXISTS links (
        id TEXT PRIMARY KEY, parent TEXT NOT NULL, root TEXT NOT NULL, number INTEGER NOT NULL,
        placed BLOB NOT NULL, document TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS links_of_root ON links (root, number);
    CREATE TRIGGER IF NOT EXISTS links_added AFTER INSERT ON links BEGIN
        UPDATE totals SET num_bytes = num_bytes + length(new.document) + length(new.placed);
    END;
    CREATE TRIGGER IF NOT EXISTS links_removed AFTER DELETE ON links BEGIN
        UPDATE totals SET num_bytes = num_bytes - length(old.document) - length(old.placed);
    END;
    CREATE TRIGGER IF NOT EXISTS root_removed AFTER DELETE ON plans BEGIN
        DELETE FROM links WHERE root = old.id;
    END;
"""
"""Not in the schema, whose change would lose the plans: a release that does not know them goes on without."""

_EVICT = """
    DELETE FROM plans WHERE id = (
        SELECT CASE WHEN num_plans > ? OR num_bytes > ? THEN
            (SELECT id FROM plans WHERE id != ? AND NOT kept ORDER BY seen, id DESC LIMIT 1)
        END FROM totals
    )
"""
"""Removes the plan not seen for the longest time if there are too many; never the newest, nor a kept one."""

_log = logging.getLogger(__name__)


class Database(Closing):
    """The file `STATE_DIR/plans.sqlite`; safe to use from several threads and processes.

    Every method raises StateUnavailable while it cannot be read or written.

    Args:
        state_dir: made if it does not exist.
        read_only: create nothing; the server may be running or not.
        max_plans, max_bytes: of documents; plans that were not seen for the longest time make room.

    Raises:
        InvalidParameter: the folder cannot be written, or no server has kept plans there.
    """

    def __init__(
        self, state_dir: Path, *, read_only: bool = False, max_plans: int = 100_000, max_bytes: int = 2**30
    ) -> None:
        self._path, self.read_only = state_dir / "plans.sqlite", read_only
        self._opened: os.stat_result
        self._limits = max_plans, max_bytes
        self._lock = threading.Lock()  # of all below
        self._failure = ""  # that was logged
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            what, remedy = f"cannot be written: {error}", "give another with --state-dir"
            if read_only:
                what = f"holds no plans that can be read{f': {error}' if self._path.exists() else ''}"
                remedy = "give the URL of a server, or the folder that it was given with --state-dir"
            detail = f"state_dir {state_dir} {what}; {remedy}"
            raise InvalidParameter(detail, parameter="state_dir", received=str(state_dir)) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            self._connection.close()

    def rows(self, statement: str, *values: object) -> list[Row]:
        """Run one statement; return its rows, or one with their number if it changed some."""

        def execute(connection: sqlite3.Connection) -> list[Row]:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() or ([(cursor.rowcount,)] if cursor.rowcount > 0 else [])

        return self.run(execute)

    def has(self, table: str) -> bool:
        """Tell whether there is a table: a folder that is only read may be of an older release."""
        return bool(self.rows("SELECT 1 FROM sqlite_master WHERE name = ?", table))

    def make_room(self, newest: str) -> None:
        """Remove plans, but not the newest, until the others are within their bounds."""
        # One at a time: other threads and processes may write in between.
        while self.rows(_EVICT, *self._limits, newest):
            pass

    def check_writable(self) -> None:
        """Raise StateUnavailable where nothing could be written.

        A transaction alone would not show it: SQLite writes into space that its log has already.
        """

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            with TemporaryFile(dir=self._path.parent) as probe:
                probe.write(bytes(_PROBE_BYTES))

        self.run(write)

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `work` does; where the file was deleted or is damaged, with a new one."""
        with self._lock:
            try:
                done = self._try(work)
            except (OSError, sqlite3.Error) as error:
                failure = reason_of(error)
                if failure != self._failure:
                    _log.error("%s cannot be used: %s", self._path, failure)
                    self._failure = failure
                detail = f"plans cannot be kept: {failure}"
                raise StateUnavailable(detail, remedy="try again later") from error
            if self._failure:
                _log.info("%s can be used again", self._path)
                self._failure = ""
            return done

    def _try(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if not self._is_there():
            self._connection.close()
            self._open()
        # Opening shows most damage, but does not read every page: the second error is of a file to replace.
        for replaces in (False, True):
            try:
                return work(self._connection)
            except sqlite3.DatabaseError as error:
                if not _wrong_with(error):
                    raise
                self._connection.close()
                self._open(error if replaces else None)
        return work(self._connection)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), self._opened)
        except FileNotFoundError:
            return False

    def _open(self, damage: sqlite3.Error | None = None) -> None:
        """Open the file; if it is damaged or a newer release's, rename it, and make another.

        damage: the error that showed it in the file that is open.

        A person may look at the one, and rename the other back when the newer release serves again.
        """
        path = self._path
        if not self.read_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        # Processes open it one after another: only the first finds it damaged, without tables or without a
        # write-ahead log, for whose lock SQLite does not wait.
        with nullcontext() if self.read_only else locked_folder(path.parent):
            try:
                if damage is not None and self._is_there():
                    raise damage  # else another process has replaced it
                self._connection = _connected(path, read_only=self.read_only)
            except sqlite3.DatabaseError as error:
                if self.read_only or not (what := _wrong_with(error)):
                    raise
                aside = path.with_name(f"{path.name}.{what}-{time.time_ns()}")
                for suffix in ("-wal", "-shm"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                path.rename(aside)
                outlook = "the server goes on without its plans, and clients post them again"
                _log.warning(
                    "%s is %s (%s) and was renamed to %s; %s", path, what, error, aside.name, outlook
                )
                self._connection = _connected(path)
        self._opened = path.stat()


def _connected(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open the database, and make its tables where there are none."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
        uri=True,
        timeout=_BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    # What is no UTF-8 is damaged: the ids of documents show it, and an error would be one of the file.
    connection.text_factory = lambda text: text.decode(errors="replace")
    try:
        if not read_only:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > _SCHEMA_VERSION:
                raise sqlite3.NotSupportedError(f"version {version}, this release reads {_SCHEMA_VERSION}")
            if version != _SCHEMA_VERSION:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            connection.executescript(_LATER)
        # Touches every table, so that most damage shows here and not in a request.
        connection.execute("SELECT * FROM totals, plans ORDER BY seen DESC, id LIMIT 1").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _wrong_with(error: sqlite3.Error) -> str:
    """Say what is wrong with the database if it holds something else than it should; "" of other errors."""
    if isinstance(error, sqlite3.NotSupportedError):
        return "newer"
    code = getattr(error, "sqlite_errorcode", 0)  # its upper bits hold details
    # A write-ahead log that was cut off is read too short for ever: other processes hold its index.
    is_cut = code == sqlite3.SQLITE_IOERR_SHORT_READ
    return "damaged" if is_cut or code & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) else ""
