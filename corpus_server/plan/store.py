"""The plans a server has seen, in an embedded database shared by its worker processes.

A plan is content-addressed and every client carries its own, so losing the database loses nothing:
a replica that meets an unknown id says so and the client posts the plan again.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from pathlib import Path
from types import TracebackType

from corpus_server.errors import InvalidParameter
from corpus_server.plan.document import Plan

_BUSY_SECONDS = 10.0


class PlanStore:
    """Plans by id in `STATE_DIR/plans.sqlite`; safe to use from several threads and processes.

    Raises:
        InvalidParameter: the folder cannot be written.
    """

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / "plans.sqlite"
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
        except (OSError, sqlite3.Error) as error:
            raise InvalidParameter(
                f"state_dir {state_dir} cannot be written: {error}; give another with --state-dir",
                parameter="state_dir",
                received=str(state_dir),
            ) from error

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

    def newest(self, limit: int) -> list[tuple[Plan, float]]:
        """Return up to `limit` plans, last seen first, each with its Unix time."""
        with self._lock:
            rows = self._connection.execute(
                "SELECT document, seen FROM plans ORDER BY seen DESC, id LIMIT ?", (limit,)
            ).fetchall()
        return [(Plan.parse(document), seen) for document, seen in rows]

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
