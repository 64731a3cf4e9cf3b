"""Plans that a server has seen, in an embedded database that its worker processes share.

A plan is content-addressed and every client carries its own plan, so losing the database loses no training
run: a replica answers an unknown id with 404, and the client posts the plan again. This is why the number of
plans may be bounded, and why a damaged database is replaced by an empty one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sqlite3
import threading
import time
from pathlib import Path

from corpus_server.errors import InvalidParameter, UnknownPlan
from corpus_server.plan.document import Plan

MAX_PLANS = 100_000
MAX_BYTES = 2**30
"""Of the plans' documents."""

_BUSY_SECONDS = 10.0
_MAX_NAMED = 5
_SEEN_SECONDS = 60.0
"""A plan that is seen again within a minute is not written again."""

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

_log = logging.getLogger(__name__)


_EVICT = """
    DELETE FROM plans WHERE id = (
        SELECT CASE WHEN num_plans > ? OR num_bytes > ? THEN
            (SELECT id FROM plans WHERE id != ? AND NOT kept ORDER BY seen, id DESC LIMIT 1)
        END FROM totals
    )
"""
"""Removes the plan not seen for the longest time if there are too many; never the newest, nor a kept one."""

_EVICT_OF_OWNER = """
    DELETE FROM plans WHERE id IN (
        SELECT id FROM plans WHERE owner = ? AND NOT kept ORDER BY seen DESC, id LIMIT -1 OFFSET ?
    )
"""
"""Removes all plans of an owner but some, those seen last."""


class PlanStore:
    """Plans by id in `STATE_DIR/plans.sqlite`; safe to use from several threads and processes.

    Args:
        state_dir: made if it does not exist.
        read_only: create nothing; the server may be running or not.
        max_plans, max_bytes: what is kept; plans that were not seen for the longest time go first.

    Raises:
        InvalidParameter: the folder cannot be written, or no server has kept plans there.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        read_only: bool = False,
        max_plans: int = MAX_PLANS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.path = state_dir / "plans.sqlite"
        self._lock = threading.Lock()
        self._max_plans, self._max_bytes = max_plans, max_bytes
        try:
            if read_only:
                self._connection = _open(self.path, read_only=True)
            else:
                state_dir.mkdir(parents=True, exist_ok=True)
                self._connection = _open_or_replace(self.path)
        except (OSError, sqlite3.Error) as error:
            wrong, remedy = "cannot be written", "give another with --state-dir"
            if read_only:
                wrong = "holds no plans that can be read"
                remedy = "name the folder that the server was given with --state-dir"
            raise InvalidParameter(
                f"state_dir {state_dir} {wrong}: {error}; {remedy}",
                parameter="state_dir",
                received=str(state_dir),
            ) from error

    def __enter__(self) -> PlanStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database; idempotent."""
        with self._lock:
            self._connection.close()

    def add(self, plan: Plan, *, owner: str = "anyone", most: int | None = None) -> None:
        """Keep a bound plan, or note that it was seen again.

        Args:
            owner: who posts it.
            most: plans of this owner that are kept; those not seen for the longest time make room.
        """
        now, document = time.time(), plan.canonical_json
        with self._lock:
            known = self._connection.execute("SELECT seen FROM plans WHERE id = ?", (plan.id,)).fetchone()
            if known and 0 <= now - known[0] < _SEEN_SECONDS:
                return
            self._connection.execute(
                "INSERT INTO plans (id, seen, num_bytes, owner, document) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET seen = excluded.seen",
                (plan.id, now, len(document), owner, document),
            )
            if most is not None:
                self._connection.execute(_EVICT_OF_OWNER, (owner, most))
        bounds = (self._max_plans, self._max_bytes, plan.id)
        while not known:  # one at a time: other threads and processes may write in between
            with self._lock:
                if not self._connection.execute(_EVICT, bounds).rowcount:
                    return

    def document(self, plan_id: str) -> str | None:
        """Return the canonical JSON of the plan of that id, or None."""
        with self._lock:
            row = self._connection.execute("SELECT document FROM plans WHERE id = ?", (plan_id,)).fetchone()
        return row[0] if row else None

    def find(self, prefix: str) -> Plan:
        """Return the one plan whose id begins with `prefix`.

        Raises:
            UnknownPlan: there is none.
            InvalidParameter: there are several, or `prefix` is no part of an id.
        """
        if not re.fullmatch(r"[0-9a-f]{1,64}", prefix):
            raise InvalidParameter.expected("id", "up to 64 of the digits 0-9 and a-f", prefix)
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

    def keep(self, plan_id: str, *, kept: bool = True) -> None:
        """Say that a plan is never removed to make room, or may be again."""
        with self._lock:
            self._connection.execute("UPDATE plans SET kept = ? WHERE id = ?", (kept, plan_id))

    def newest(self, limit: int, *, max_bytes: int | None = None) -> list[tuple[Plan, float]]:
        """Return at most `limit` plans, those seen last, each with its Unix time.

        If their documents have more than `max_bytes`, fewer are returned, but at least one.
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
            return int(self._connection.execute("SELECT num_plans FROM totals").fetchone()[0])

    def check_writable(self) -> None:
        """Raise sqlite3.Error where a plan could not be kept."""
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute("ROLLBACK")


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
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the upper bits hold details
            is_newer = isinstance(error, sqlite3.NotSupportedError)
            if not is_newer and code not in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
                raise
            what = "newer" if is_newer else "damaged"
            aside = path.with_name(f"{path.name}.{what}-{time.time_ns()}")
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            path.rename(aside)
            _log.warning(
                "%s is %s (%s) and was renamed to %s; the server goes on without its plans, and clients "
                "post them again",
                path,
                what,
                error,
                aside.name,
            )
            return _open(path)
    finally:
        os.close(folder)
