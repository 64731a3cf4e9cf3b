"""The plans a server has seen, in an embedded database shared by its worker processes.

A plan is content-addressed and every client carries its own, so losing the database loses nothing:
a replica that meets an unknown id says so and the client posts the plan again.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from pathlib import Path
from types import TracebackType

from corpus_server.errors import InvalidParameter, UnknownPlan
from corpus_server.plan.document import Plan

_FILE = "plans.sqlite"
_BUSY_SECONDS = 10.0
_MAX_NAMED = 5


class PlanStore:
    """Plans by id in `STATE_DIR/plans.sqlite`; safe to use from several threads and processes.

    Raises:
        InvalidParameter: the folder cannot be written.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / _FILE
        self._lock = threading.Lock()
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            _use_write_ahead_log(self._connection)
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(
                "CREATE TABLE IF NOT EXISTS plans "
                "(id TEXT PRIMARY KEY, document TEXT NOT NULL, seen REAL NOT NULL) WITHOUT ROWID"
            )
            # For the list of the newest, which would otherwise read and sort every document there is.
            self._connection.execute("CREATE INDEX IF NOT EXISTS plans_seen ON plans (seen DESC, id)")
        except (OSError, sqlite3.Error) as error:
            raise InvalidParameter(
                f"state_dir {state_dir} cannot be written: {error}; give another with --state-dir",
                parameter="state_dir",
                received=str(state_dir),
            ) from error

    @classmethod
    def open_existing(cls, state_dir: Path) -> PlanStore:
        """Open the plans of a server, running or not, for reading; nothing is created.

        Raises:
            InvalidParameter: no server has kept plans there, or they cannot be read.
        """
        store = cls.__new__(cls)
        store.path = state_dir / _FILE
        store._lock = threading.Lock()
        connection: sqlite3.Connection | None = None
        try:
            connection = store._connection = sqlite3.connect(
                f"{store.path.absolute().as_uri()}?mode=ro",
                uri=True,
                timeout=_BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            connection.execute("SELECT id FROM plans LIMIT 1")
        except sqlite3.Error as error:
            if connection is not None:
                connection.close()
            raise InvalidParameter(
                f"state_dir {state_dir} holds no plans that can be read: {error}; name the folder that the "
                "server was given with --state-dir",
                parameter="state_dir",
                received=str(state_dir),
            ) from error
        return store

    def __enter__(self) -> PlanStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the database; idempotent."""
        with self._lock:
            self._connection.close()

    def add(self, plan: Plan) -> None:
        """Keep a bound plan; adding it again changes nothing."""
        with self._lock:
            self._connection.execute(
                "INSERT OR IGNORE INTO plans VALUES (?, ?, ?)", (plan.id, plan.canonical_json(), time.time())
            )

    def get(self, plan_id: str) -> Plan | None:
        """Return the plan of that id, or None."""
        with self._lock:
            row = self._connection.execute("SELECT document FROM plans WHERE id = ?", (plan_id,)).fetchone()
        return Plan.parse(row[0]) if row else None

    def find(self, prefix: str) -> Plan:
        """Return the one plan whose id begins with `prefix`.

        Raises:
            UnknownPlan: there is none.
            InvalidParameter: there are several, or `prefix` is no part of an id.
        """
        if not re.fullmatch(r"[0-9a-f]{1,64}", prefix):
            raise InvalidParameter(
                f"a plan's id is up to 64 of the digits 0-9 and a-f, got {prefix!r}",
                parameter="id",
                received=prefix,
            )
        with self._lock:
            rows = self._connection.execute(
                "SELECT id, document FROM plans WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
                (prefix, prefix + "g", _MAX_NAMED + 1),  # "g" sorts behind every digit
            ).fetchall()
        if not rows:
            raise UnknownPlan(f"no plan here begins with {prefix!r}", parameter="id", received=prefix)
        if len(rows) > 1:
            named = ", ".join(row[0][: len(prefix) + 8] for row in rows[:_MAX_NAMED])
            raise InvalidParameter(
                f"several plans begin with {prefix!r}: {named}{', ...' if len(rows) > _MAX_NAMED else ''}",
                parameter="id",
                received=prefix,
                remedy="give more digits",
            )
        return Plan.parse(rows[0][1])

    def newest(self, limit: int, *, max_bytes: int | None = None) -> list[tuple[Plan, float]]:
        """Return the plans seen last, each with its Unix time.

        Args:
            limit: so many at most.
            max_bytes: bound of their documents together; the first comes in any case.
        """
        found: list[tuple[Plan, float]] = []
        num_bytes = 0
        with self._lock:
            rows = self._connection.execute(
                "SELECT document, seen FROM plans ORDER BY seen DESC, id LIMIT ?", (limit,)
            )
            for document, seen in rows:
                num_bytes += len(document)
                if found and max_bytes is not None and num_bytes > max_bytes:
                    break
                found.append((Plan.parse(document), seen))
        return found

    def count(self) -> int:
        """Return how many plans there are."""
        with self._lock:
            (number,) = self._connection.execute("SELECT count(*) FROM plans").fetchone()
        return int(number)

    def check_writable(self) -> None:
        """Raise sqlite3.Error where a plan could not be kept."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("ROLLBACK")


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log; SQLite itself does not wait for the lock that this takes.

    Without waiting, of several workers that open a new folder at the same moment one would fail.
    """
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.005)
        else:
            return
