"""The SQLite file that holds plans: its tables, their bounds, and going on where it is damaged or gone.

One rule for all that may be wrong with the file, at opening and after every error of the database: a file
that holds something else than it should is renamed, the log says so, and a new one is made. That is damage, a
missing table or column, a version that no release had and, at opening, that of a newer release. A newer
release that takes the file over while this one runs keeps it: this one stops using it and is not ready,
because two releases would rename each other's files in turn. What cannot be read or written now, on a full
disk for example, is `StateUnavailable`; the next call tries again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import cache
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
    DROP TABLE IF EXISTS totals;
    DROP TABLE IF EXISTS runs;
    DROP TABLE IF EXISTS links;
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
    CREATE INDEX IF NOT EXISTS plans_usage ON plans (owner, num_bytes);
    CREATE TABLE IF NOT EXISTS runs (
        plan TEXT NOT NULL, run TEXT NOT NULL, seen REAL NOT NULL, PRIMARY KEY (plan, run)
    ) WITHOUT ROWID;
    CREATE TRIGGER IF NOT EXISTS runs_removed AFTER DELETE ON plans BEGIN
        DELETE FROM runs WHERE plan = old.id;
    END;

    CREATE TABLE IF NOT EXISTS links (
        id TEXT PRIMARY KEY, parent TEXT NOT NULL, root TEXT NOT NULL, number INTEGER NOT NULL,
        placed BLOB NOT NULL, document TEXT NOT NULL,
        owner TEXT NOT NULL DEFAULT '', seen REAL NOT NULL DEFAULT 0, num_bytes INTEGER NOT NULL DEFAULT 0
    ) WITHOUT ROWID;
    CREATE INDEX IF NOT EXISTS links_of_root ON links (root, number);
    CREATE INDEX IF NOT EXISTS links_of_parent ON links (parent);
    CREATE INDEX IF NOT EXISTS links_of_owner ON links (owner, seen, id);
    CREATE INDEX IF NOT EXISTS links_usage ON links (owner, num_bytes);
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

_ADDED_COLUMNS = {
    "links": (
        "owner TEXT NOT NULL DEFAULT ''",
        "seen REAL NOT NULL DEFAULT 0",
        "num_bytes INTEGER NOT NULL DEFAULT 0",
    )
}
"""Of tables that an earlier release made without them."""

_log = logging.getLogger(__name__)


class Database(Closing):
    """The file `STATE_DIR/plans.sqlite`; safe to use from several threads and processes.

    Every method raises StateUnavailable while it cannot be read or written.

    Args:
        state_dir: made if it does not exist.
        read_only: create nothing; the server may be running or not.
        max_plans, max_bytes: of all documents; see `plan_store/room.py`.

    Raises:
        InvalidParameter: the folder cannot be written, or no server has kept plans there.
    """

    def __init__(
        self, state_dir: Path, *, read_only: bool = False, max_plans: int = 100_000, max_bytes: int = 2**30
    ) -> None:
        self._path, self.read_only = state_dir / "plans.sqlite", read_only
        self._opened: os.stat_result
        self.max_plans, self.max_bytes = max_plans, max_bytes
        self._lock = threading.Lock()  # of all below
        self._failure = ""  # that was logged
        self._was_open = False
        self._connection: sqlite3.Connection | None = None  # None: it is opened by the next call
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            what, remedy = f"cannot be written: {reason_of(error)}", "give another with --state-dir"
            if read_only:
                what = (
                    f"holds no plans that can be read{f': {reason_of(error)}' if self._path.exists() else ''}"
                )
                remedy = "give the URL of a server, or the folder that it was given with --state-dir"
            detail = f"state_dir {state_dir} {what}; {remedy}"
            raise InvalidParameter(detail, parameter="state_dir", received=str(state_dir)) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def rows(self, statement: str, *values: object) -> list[Row]:
        """Run one statement; return its rows, or one with their number if it changed some."""

        def execute(connection: sqlite3.Connection) -> list[Row]:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() or ([(cursor.rowcount,)] if cursor.rowcount > 0 else [])

        return self.run(execute)

    def has(self, table: str) -> bool:
        """Tell whether there is a table: a folder that is only read may be of an older release."""
        return bool(self.rows("SELECT 1 FROM sqlite_master WHERE name = ?", table))

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
        # Opening shows most damage, but does not read every page: a second error is of a file to replace.
        shown: sqlite3.Error | None = None
        for attempt in range(3):
            try:
                if self._connection is None or not self._is_there():
                    self._disconnect()
                    self._open(shown if attempt == 2 and shown and _wrong_with(shown) else None)
                assert self._connection is not None
                self._check_version(self._connection)
                return work(self._connection)
            except sqlite3.Error as error:
                is_newer = isinstance(error, sqlite3.NotSupportedError)
                if attempt == 2 or is_newer or not (_wrong_with(error) or _may_lack_a_table(error)):
                    raise
                shown = error
                self._disconnect()
        raise AssertionError

    def _check_version(self, connection: sqlite3.Connection) -> None:
        """Raise an error if a newer release has taken the file over."""
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > _SCHEMA_VERSION and not self.read_only:
            raise _newer(version)

    def _is_there(self) -> bool:
        """Tell whether the open file still has its name, and any content."""
        try:
            about = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(about, self._opened) and about.st_size > 0

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
                if not self.read_only and path.exists() and not path.stat().st_size:
                    raise _Unfit("it is empty")
                self._connection = _connected(path, read_only=self.read_only)
            except sqlite3.DatabaseError as error:
                is_taken_over = isinstance(error, sqlite3.NotSupportedError) and self._was_open
                if self.read_only or is_taken_over or not (what := _wrong_with(error)):
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
        self._opened, self._was_open = path.stat(), True


def _newer(version: int) -> sqlite3.NotSupportedError:
    return sqlite3.NotSupportedError(
        f"a newer release uses it: version {version}, this one {_SCHEMA_VERSION}"
    )


class _Unfit(sqlite3.DatabaseError):
    """The file is a database, and not what this release makes."""


def totals(connection: sqlite3.Connection) -> tuple[int, int]:
    """Return how many plans there are, and how many bytes their documents have."""
    row: tuple[int, int] | None = connection.execute("SELECT num_plans, num_bytes FROM totals").fetchone()
    if row is None:
        raise _Unfit("the table totals is empty")
    return row


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
                raise _newer(version)
            if version < 0:
                raise _Unfit(f"no release has version {version}")
            if version != _SCHEMA_VERSION:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            for table, columns in _ADDED_COLUMNS.items():
                if known := _columns(connection, table):
                    for column in columns:
                        if column.split()[0] not in known:
                            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
            for later in (False, True):
                if later:  # which names columns of the tables before
                    connection.executescript(_LATER)
                for table, made in _made_columns(later=later).items():
                    if missing := made - _columns(connection, table):
                        raise _Unfit(f"the table {table} lacks {', '.join(sorted(missing))}")
            totals(connection)
        # Touches every table, so that most damage shows here and not in a request.
        connection.execute("SELECT * FROM totals, plans ORDER BY seen DESC, id LIMIT 1").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}


@cache
def _made_columns(*, later: bool) -> dict[str, set[str]]:
    """Return the columns of each table as this release makes them."""
    with closing(sqlite3.connect(":memory:")) as made:
        made.executescript(_SCHEMA + (_LATER if later else ""))
        tables = made.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {name: _columns(made, name) for (name,) in tables}


def _may_lack_a_table(error: sqlite3.Error) -> bool:
    """Tell whether an error may be of a table or a column that is missing, which opening the file shows."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_SCHEMA)


def _wrong_with(error: sqlite3.Error) -> str:
    """Say what is wrong with the database if it holds something else than it should; "" of other errors."""
    if isinstance(error, sqlite3.NotSupportedError):
        return "newer"
    if isinstance(error, _Unfit):
        return "damaged"
    code = getattr(error, "sqlite_errorcode", 0)  # its upper bits hold details
    # A write-ahead log that was cut off is read too short for ever: other processes hold its index.
    is_cut = code == sqlite3.SQLITE_IOERR_SHORT_READ
    return "damaged" if is_cut or code & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) else ""
