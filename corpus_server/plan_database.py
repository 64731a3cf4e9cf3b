"""One SQLite file in the state folder that outlives damage, deletion and a full disk.

A database that is damaged, or of a newer release, is renamed, and one that was deleted is made again, also
while the server runs. What cannot be read or written now is `StateUnavailable`; the next call tries again.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

from corpus_server.errors import StateUnavailable

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

T = TypeVar("T")
Row = tuple[Any, ...]

_log = logging.getLogger(__name__)


class Database:
    """The tables of `_SCHEMA`; safe to use from several threads and processes.

    Raises:
        OSError, sqlite3.Error: the file cannot be opened or made.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path = path
        self._read_only = read_only
        self._lock = threading.Lock()  # of all below
        self._failure = ""  # that was logged
        self._open()

    def close(self) -> None:
        """Close the file; idempotent."""
        with self._lock:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def rows(self, statement: str, *values: object) -> list[Row]:
        """Run one statement; return its rows, or one with their number if it changed some."""

        def execute(connection: sqlite3.Connection) -> list[Row]:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() or ([(cursor.rowcount,)] if cursor.rowcount > 0 else [])

        return self.run(execute)

    def check_writable(self) -> None:
        """Raise StateUnavailable where nothing could be written.

        A transaction alone would not show it: SQLite writes into space that its log has already.
        """

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            probe = self._path.with_name(f"probe-{os.getpid()}")
            try:
                probe.write_bytes(bytes(_PROBE_BYTES))
            finally:
                probe.unlink(missing_ok=True)

        self.run(write)

    def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what `work` does; where the file was deleted or is damaged, with a new one."""
        with self._lock:
            try:
                if not self._is_there():
                    self._reopen()
                try:
                    done = work(self._connection)
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise
                    self._reopen()
                    done = work(self._connection)
            except (OSError, sqlite3.Error) as error:
                failure = getattr(error, "strerror", None) or str(error)
                if failure != self._failure:
                    _log.error("%s cannot be used: %s", self._path, failure)
                    self._failure = failure
                detail = f"plans cannot be kept: {failure}"
                raise StateUnavailable(detail, remedy="try again later") from error
            if self._failure:
                _log.info("%s can be used again", self._path)
                self._failure = ""
            return done

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), self._opened)
        except FileNotFoundError:
            return False

    def _reopen(self) -> None:
        self._connection.close()
        self._open()

    def _open(self) -> None:
        if self._read_only:
            self._connection = _open(self._path, read_only=True)
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = _open_or_replace(self._path)
        self._opened = self._path.stat()


def _open(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open the database, and make its tables where there are none."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
        uri=True,
        timeout=_BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        if not read_only:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > _SCHEMA_VERSION:
                raise sqlite3.NotSupportedError(f"version {version}, this release reads {_SCHEMA_VERSION}")
            if version != _SCHEMA_VERSION:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
        # Touches every table, so that most damage shows here and not in a request.
        connection.execute("SELECT * FROM totals, plans ORDER BY seen DESC, id LIMIT 1").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _open_or_replace(path: Path) -> sqlite3.Connection:
    """Open the database; if it is damaged or a newer release's, rename it, and make another.

    A person may look at the one, and rename the other back when the newer release serves again.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        # Processes open it one after another: only the first finds it damaged, without tables or without a
        # write-ahead log, for whose lock SQLite does not wait. A process that ends releases this lock.
        fcntl.flock(folder, fcntl.LOCK_EX)
        try:
            return _open(path)
        except sqlite3.DatabaseError as error:
            is_newer = isinstance(error, sqlite3.NotSupportedError)
            if not is_newer and not _is_damage(error):
                raise
            what = "newer" if is_newer else "damaged"
            aside = path.with_name(f"{path.name}.{what}-{time.time_ns()}")
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            path.rename(aside)
            outlook = "the server goes on without its plans, and clients post them again"
            _log.warning("%s is %s (%s) and was renamed to %s; %s", path, what, error, aside.name, outlook)
            return _open(path)
    finally:
        os.close(folder)


def _is_damage(error: sqlite3.Error) -> bool:
    """Tell whether the database holds something else than it should; an error of the disk is no damage."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the upper bits hold details
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
