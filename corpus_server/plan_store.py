"""Plans that a server has seen: one SQLite file in the state folder, which its worker processes share.

A plan is content-addressed and every client carries its own plan, so losing the file loses no training run: a
replica answers an unknown id with 404, and the client posts the plan again. This is why the number of plans
may be bounded. A file that is damaged, or of a newer release, is renamed, and one that was deleted is made
again, also while the server runs. What cannot be read or written now, on a full disk for example, is
`StateUnavailable`; the next call tries again.

Plans that continue others are *links* of the plan that they all go back to, their root. They do not count as
plans, and go when their root goes. With each link is kept where the sources stand when its stage begins,
which takes up to 0.4 ms to compute: so a worker that begins in mid-run reads 100,000 links within seconds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.corpus.files import Closing
from corpus_server.errors import InvalidParameter, StateUnavailable, UnknownPlan
from corpus_server.plan.chain import Continued, KeptLink
from corpus_server.plan.document import Plan
from corpus_server.user_files import locked_folder

T = TypeVar("T")
Row = tuple[Any, ...]

MAX_PLANS = 100_000
MAX_BYTES = 2**30
"""Of the plans' documents."""

_BEGINNING = '{"fingerprints":'
_MAX_NAMED = 5
MAX_RUNS = 32
"""Names of runs that are kept of a plan, those seen last."""

_MAX_DEPTH = 4096
"""Links that are read at a time."""
_SEEN_SECONDS = 60.0
"""A plan that is seen again within a minute is not written again."""

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

# Not in the schema, whose change would lose the plans: a release that does not know it goes on without.
_RUNS = """
    CREATE TABLE IF NOT EXISTS runs (
        plan TEXT NOT NULL, run TEXT NOT NULL, seen REAL NOT NULL, PRIMARY KEY (plan, run)
    ) WITHOUT ROWID;
    CREATE TRIGGER IF NOT EXISTS runs_removed AFTER DELETE ON plans BEGIN
        DELETE FROM runs WHERE plan = old.id;
    END;
"""
_LINKS = """
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
"""Tables of chains, in the same version: a release that does not know them leaves them alone."""

_ADD_LINK = """
    INSERT INTO links (id, parent, root, number, placed, document) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO NOTHING
"""

_CHAIN = """
    WITH RECURSIVE chain (id, parent, placed, document, depth) AS (
        SELECT id, parent, placed, document, 1 FROM links WHERE id = ?
        UNION ALL
        SELECT links.id, links.parent, links.placed, links.document, depth + 1
        FROM chain JOIN links ON links.id = chain.parent WHERE depth < ?
    ) SELECT id, parent, placed, document FROM chain
"""

_EVICT = """
    DELETE FROM plans WHERE id = (
        SELECT CASE WHEN num_plans > ? OR num_bytes > ? THEN
            (SELECT id FROM plans WHERE id != ? AND NOT kept ORDER BY seen, id DESC LIMIT 1)
        END FROM totals
    )
"""
"""Removes the plan not seen for the longest time if there are too many; never the newest, nor a kept one."""

_RUNS_OF_PLAN = """
    (SELECT group_concat(run, ' ')
        FROM (SELECT its.run FROM runs AS its WHERE its.plan = plans.id ORDER BY its.seen DESC))
"""

_EVICT_OF_OWNER = """
    DELETE FROM plans WHERE id IN (
        SELECT id FROM plans WHERE owner = ? AND NOT kept ORDER BY seen DESC, id LIMIT -1 OFFSET ?
    )
"""
"""Removes all plans of an owner but some, those seen last."""

_log = logging.getLogger(__name__)


class StoredPlan(NamedTuple):
    """A plan as it is stored: nothing was parsed, which takes a second for the largest.

    Attributes:
        document: canonical JSON.
        seen: when, in Unix seconds.
        runs: names of those that posted it, last seen first.
    """

    id: str
    document: str
    seen: float
    runs: tuple[str, ...] = ()

    @property
    def sources(self) -> list[str]:
        """Names of its corpora: those of its fingerprints, with which the sorted document begins."""
        fingerprints, _ = json.JSONDecoder().raw_decode(self.document, len(_BEGINNING))
        return list(fingerprints)


class PlacedLink(NamedTuple):
    """A link, and where the sources of its plan stand when its stage begins."""

    kept: KeptLink
    parent: str
    blob: bytes

    def placed(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64] | None] | None:
        """Return positions and, if they differ, rows of the sources; None if they are damaged."""
        digest, numbers = self.blob[:8], self.blob[8:]
        if digest != _digest(self.kept.id, numbers):
            return None
        size, *_ = found = np.frombuffer(numbers, dtype="<u8")
        return found[1 : 1 + int(size)], found[1 + int(size) :] if found.size > 1 + size else None


class PlanStore(Closing):
    """Plans by id in `STATE_DIR/plans.sqlite`; safe to use from several threads and processes.

    Every method raises StateUnavailable while the database cannot be read or written.

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
        self._path, self._read_only = state_dir / "plans.sqlite", read_only
        self._opened: os.stat_result
        self._max_plans, self._max_bytes = max_plans, max_bytes
        self._lock = threading.Lock()  # of all below
        self._failure = ""  # that was logged
        try:
            self._open()
        except (OSError, sqlite3.Error) as error:
            detail = f"state_dir {state_dir} cannot be written: {error}; give another with --state-dir"
            if read_only:
                why = f": {error}" if self._path.exists() else ""
                detail = (
                    f"state_dir {state_dir} holds no plans that can be read{why}; give the URL of a server, "
                    "or the folder that it was given with --state-dir"
                )
            raise InvalidParameter(detail, parameter="state_dir", received=str(state_dir)) from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            self._connection.close()

    def add(self, plan: Plan, *, owner: str = "anyone", most: int | None = None, run: str = "") -> None:
        """Keep a bound plan, or note that it was seen again.

        Args:
            owner: who posts it.
            most: plans of this owner that are kept; those not seen for the longest time make room.
            run: the name of the run that posts it; "" for none.
        """
        now, document = time.time(), plan.canonical_json
        known = self._rows("SELECT seen FROM plans WHERE id = ?", plan.id)
        try:
            if run:
                self._add_run(plan.id, run, now)
            if known and 0 <= now - known[0][0] < _SEEN_SECONDS:
                return
            self._rows(
                "INSERT INTO plans (id, seen, num_bytes, owner, document) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET seen = excluded.seen",
                *(plan.id, now, len(document), owner, document),
            )
            if most is not None:
                self._rows(_EVICT_OF_OWNER, owner, most)
            # One at a time: other threads and processes may write in between.
            while not known and self._rows(_EVICT, self._max_plans, self._max_bytes, plan.id):
                pass
        except StateUnavailable:
            if not known:
                raise

    def _add_run(self, plan_id: str, run: str, now: float) -> None:
        known = self._rows("SELECT seen FROM runs WHERE plan = ? AND run = ?", plan_id, run)
        if known and 0 <= now - known[0][0] < _SEEN_SECONDS:
            return
        self._rows("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", plan_id, run, now)
        self._rows(
            "DELETE FROM runs WHERE plan = ? AND run IN "
            "(SELECT run FROM runs WHERE plan = ? ORDER BY seen DESC LIMIT -1 OFFSET ?)",
            *(plan_id, plan_id, MAX_RUNS),
        )

    def document(self, plan_id: str) -> str | None:
        """Return the canonical JSON of the plan of that id, or None.

        SQLite does not see that a digit in it changed: another plan would be served under this id.
        """
        for (document,) in self._rows("SELECT document FROM plans WHERE id = ?", plan_id):
            if _is_whole(plan_id, document):
                return str(document)
            _log.error("the document of plan %s is damaged; clients post it again", plan_id)
            if not self._read_only:
                self._rows("DELETE FROM plans WHERE id = ?", plan_id)
        return None

    def add_links(self, plan: Continued) -> None:
        """Keep the links of a plan, whose stages are placed and whose root was added before."""
        root, log, num_sources = plan.root.id, plan.log, len(plan.sources)

        def write(connection: sqlite3.Connection) -> None:
            with connection:  # ends the transaction, well or not
                connection.execute("BEGIN IMMEDIATE")
                # Else another process has just removed it; the client will post all of the chain again.
                if connection.execute("SELECT 1 FROM plans WHERE id = ?", (root,)).fetchone():
                    connection.executemany(_ADD_LINK, rows)

        if self.has_link(plan.id):
            return
        rows, parent = [], plan.parent_id
        for number, link in enumerate(plan.links, plan.num_before):
            placed = [log.positions[number, :num_sources]]
            placed += [] if log.rows is log.positions else [log.rows[number, :num_sources]]
            numbers = (
                np.concatenate([np.array([num_sources], dtype=np.uint64), *placed]).astype("<u8").tobytes()
            )
            rows.append((link.id, parent, root, number, _digest(link.id, numbers) + numbers, link.document))
            parent = link.id
        self._run(write)
        while self._rows(_EVICT, self._max_plans, self._max_bytes, root):
            pass

    def has_link(self, plan_id: str) -> bool:
        """Return whether a link is kept."""
        return bool(self._rows("SELECT 1 FROM links WHERE id = ?", plan_id))

    def chain(self, plan_id: str, is_known: Callable[[str], bool]) -> list[PlacedLink]:
        """Return the links, oldest first, from a known plan or a root to this one; none of a root.

        Links that go round in a circle are damaged, and removed.
        """
        found = dict[str, PlacedLink]()
        depth, at = 4, plan_id
        while rows := self._rows(_CHAIN, at, depth):
            for link_id, parent, placed, document in rows:
                if link_id in found:
                    if not self._read_only:
                        self.remove_links(found.values())
                    return []
                found[link_id] = PlacedLink(KeptLink(link_id, document), parent, placed)
                if is_known(at := parent):
                    return [*found.values()][::-1]
            depth = min(4 * depth, _MAX_DEPTH)
        return [*found.values()][::-1]

    def remove_links(self, links: Iterable[PlacedLink]) -> None:
        """Remove links that are damaged."""
        for link in links:
            self._rows("DELETE FROM links WHERE id = ?", link.kept.id)

    def newest_link(self, root: str) -> tuple[str, int] | None:
        """Return id and stages of the longest plan that continues a plan, if there is one."""
        rows = self._rows(
            "SELECT id, number + 1 FROM links WHERE root = ? ORDER BY number DESC LIMIT 1", root
        )
        return rows[0] if rows else None

    def find(self, prefix: str) -> Plan:
        """Return the one plan whose id begins with `prefix`; errors as in `find_by_prefix`."""
        bounds = (prefix, prefix + "g", _MAX_NAMED + 1)  # "g" sorts behind every digit
        found = dict[str, str | None](
            self._rows("SELECT id, document FROM plans WHERE id >= ? AND id < ? ORDER BY id LIMIT ?", *bounds)
        )
        if self._has_links():
            found |= dict.fromkeys(
                each
                for (each,) in self._rows("SELECT id FROM links WHERE id >= ? AND id < ? LIMIT ?", *bounds)
            )
        plan_id, document = find_by_prefix(prefix, {each: (each, its) for each, its in found.items()})
        if document is None:
            return self._continued(plan_id)
        if not _is_whole(plan_id, document):
            raise UnknownPlan(f"plan {plan_id} is damaged here", parameter="id", received=plan_id)
        return Plan.parse(document)

    def _continued(self, plan_id: str) -> Plan:
        links = self.chain(plan_id, lambda _: False)
        document = self.document(links[0].parent) if links else None
        plan = document and Continued.restored(Plan.parse(document), [link.kept for link in links])
        if not plan:
            raise UnknownPlan(
                f"plan {plan_id} is damaged or incomplete here", parameter="id", received=plan_id
            )
        return plan

    def _has_links(self) -> bool:
        """Return whether there is a table of links: a folder that is only read may be of an older release."""
        return bool(self._rows("SELECT 1 FROM sqlite_master WHERE name = 'links'"))

    def keep(self, plan_id: str, *, kept: bool = True) -> None:
        """Say that a plan is never removed to make room, or may be again."""
        self._rows("UPDATE plans SET kept = ? WHERE id = ?", kept, plan_id)

    def listed(
        self,
        limit: int,
        *,
        run: str | None = None,
        max_bytes: int | None = None,
        may_read: Callable[[str], bool] | None = None,
    ) -> list[StoredPlan]:
        """Return at most `limit` plans, those seen last.

        Args:
            run: only plans that a run of this name has posted, by when it did so.
            max_bytes: of the documents that are looked at; the first one is in any case.
            may_read: leaves out plans with a corpus for which it is false.
        """

        def read(connection: sqlite3.Connection) -> list[Row]:
            found: list[Row] = []
            num_bytes = 0
            # A folder that is only read may be of a server that knew no runs.
            has_runs = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'runs'").fetchone()
            if run is not None and not has_runs:
                return []
            names = _RUNS_OF_PLAN if has_runs else "''"
            source = "plans" if run is None else "plans JOIN runs ON plan = id AND run = ?"
            seen = "plans.seen" if run is None else "runs.seen"
            for row in connection.execute(
                f"SELECT id, document, {seen}, {names} FROM {source} ORDER BY {seen} DESC, id LIMIT ?",
                (*(() if run is None else (run,)), limit if may_read is None else -1),
            ):
                if not _is_whole(row[0], row[1]):
                    continue
                num_bytes += len(row[1])
                if found and max_bytes is not None and num_bytes > max_bytes:
                    break
                found.append(row)
            return found

        plans = (
            StoredPlan(plan_id, document, seen, tuple((runs or "").split()))
            for plan_id, document, seen, runs in self._run(read)
        )
        allowed = (each for each in plans if may_read is None or all(map(may_read, each.sources)))
        return list(islice(allowed, limit))

    def newest(self, limit: int, run: str | None = None) -> list[tuple[Plan, float, tuple[str, ...]]]:
        """Return the plans seen last, or those of a run, each with its Unix time and its runs."""
        return [(Plan.parse(each.document), each.seen, each.runs) for each in self.listed(limit, run=run)]

    def count(self) -> int:
        """Return how many plans there are."""
        return int(self._rows("SELECT num_plans FROM totals")[0][0])

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

        self._run(write)

    def _rows(self, statement: str, *values: object) -> list[Row]:
        """Run one statement; return its rows, or one with their number if it changed some."""

        def execute(connection: sqlite3.Connection) -> list[Row]:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() or ([(cursor.rowcount,)] if cursor.rowcount > 0 else [])

        return self._run(execute)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
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
                    try:
                        done = work(self._connection)
                    except sqlite3.DatabaseError as again:
                        if not _is_damage(again):
                            raise
                        self._reopen(again)  # opening does not read every page
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

    def _reopen(self, damage: sqlite3.Error | None = None) -> None:
        self._connection.close()
        self._open(damage)

    def _open(self, damage: sqlite3.Error | None = None) -> None:
        if self._read_only:
            self._connection = _open(self._path, read_only=True)
        else:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            found = None if damage is None else (self._opened, damage)
            self._connection = _open_or_replace(self._path, found)
        self._opened = self._path.stat()


def _is_whole(plan_id: str, document: object) -> bool:
    """Tell whether a document is that of its id."""
    return isinstance(document, str) and hashlib.sha256(document.encode()).hexdigest() == plan_id


def _digest(link_id: str, numbers: bytes) -> bytes:
    return xxhash.xxh3_64_digest(link_id.encode() + numbers)


def find_by_prefix(prefix: str, found: Mapping[str, T]) -> T:
    """Return the one value whose id begins with `prefix`.

    Raises:
        UnknownPlan: there is none.
        InvalidParameter: there are several, or `prefix` is no part of an id.
    """
    if not re.fullmatch(r"[0-9a-f]{1,64}", prefix):
        raise InvalidParameter.expected("id", "up to 64 of the digits 0-9 and a-f", prefix)
    ids = sorted(each for each in found if each.startswith(prefix))
    if not ids:
        raise UnknownPlan(
            f"no plan here begins with {prefix!r}",
            parameter="id",
            received=prefix,
            remedy="`corpus-server plans list` shows those that are known",
        )
    if len(ids) > 1:
        named = ", ".join(each[: len(prefix) + 8] for each in ids[:_MAX_NAMED])
        raise InvalidParameter(
            f"several plans begin with {prefix!r}: {named}{', ...' if len(ids) > _MAX_NAMED else ''}",
            parameter="id",
            received=prefix,
            remedy="give more digits",
        )
    return found[ids[0]]


def _open(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
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
            connection.executescript(_RUNS)
            connection.executescript(_LINKS)
        # Touches every table, so that most damage shows here and not in a request.
        connection.execute("SELECT * FROM totals, plans ORDER BY seen DESC, id LIMIT 1").fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _open_or_replace(
    path: Path, found: tuple[os.stat_result, sqlite3.Error] | None = None
) -> sqlite3.Connection:
    """Open the database; if it is damaged or a newer release's, rename it, and make another.

    found: a file in which damage showed later, and the error.

    A person may look at the one, and rename the other back when the newer release serves again.
    """
    # Processes open it one after another: only the first finds it damaged, without tables or without a
    # write-ahead log, for whose lock SQLite does not wait.
    with locked_folder(path.parent):
        try:
            if found is not None and path.exists() and os.path.samestat(path.stat(), found[0]):
                raise found[1]  # else another process has replaced it
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


def _is_damage(error: sqlite3.Error) -> bool:
    """Tell whether the database holds something else than it should; an error of the disk is no damage."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the upper bits hold details
    return code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
