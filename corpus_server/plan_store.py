"""Plans that a server has seen, in an embedded database that its worker processes share.

A plan is content-addressed and every client carries its own plan, so losing the database loses no training
run: a replica answers an unknown id with 404, and the client posts the plan again. This is why the number of
plans may be bounded.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from corpus_server.errors import InvalidParameter, StateUnavailable, UnknownPlan
from corpus_server.plan.document import Plan
from corpus_server.plan_database import Database, Row

T = TypeVar("T")

MAX_PLANS = 100_000
MAX_BYTES = 2**30
"""Of the plans' documents."""

_BEGINNING = '{"fingerprints":'
_MAX_NAMED = 5
_SEEN_SECONDS = 60.0
"""A plan that is seen again within a minute is not written again."""

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


class StoredPlan(NamedTuple):
    """A plan as it is stored: nothing was parsed, which takes a second for the largest.

    Attributes:
        document: canonical JSON.
        seen: when, in Unix seconds.
    """

    id: str
    document: str
    seen: float

    @property
    def sources(self) -> list[str]:
        """Names of its corpora: those of its fingerprints, with which the sorted document begins."""
        fingerprints, _ = json.JSONDecoder().raw_decode(self.document, len(_BEGINNING))
        return list(fingerprints)


class PlanStore(Database):
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
        self._max_plans, self._max_bytes = max_plans, max_bytes
        try:
            super().__init__(state_dir / "plans.sqlite", read_only=read_only)
        except (OSError, sqlite3.Error) as error:
            wrong, remedy = "cannot be written", "give another with --state-dir"
            if read_only:
                wrong = "holds no plans that can be read"
                remedy = "name the folder that the server was given with --state-dir"
            detail = f"state_dir {state_dir} {wrong}: {error}; {remedy}"
            raise InvalidParameter(detail, parameter="state_dir", received=str(state_dir)) from error

    def add(self, plan: Plan, *, owner: str = "anyone", most: int | None = None) -> None:
        """Keep a bound plan, or note that it was seen again.

        Args:
            owner: who posts it.
            most: plans of this owner that are kept; those not seen for the longest time make room.
        """
        now, document = time.time(), plan.canonical_json
        known = self.rows("SELECT seen FROM plans WHERE id = ?", plan.id)
        if known and 0 <= now - known[0][0] < _SEEN_SECONDS:
            return
        try:
            self.rows(
                "INSERT INTO plans (id, seen, num_bytes, owner, document) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET seen = excluded.seen",
                *(plan.id, now, len(document), owner, document),
            )
            if most is not None:
                self.rows(_EVICT_OF_OWNER, owner, most)
            # One at a time: other threads and processes may write in between.
            while not known and self.rows(_EVICT, self._max_plans, self._max_bytes, plan.id):
                pass
        except StateUnavailable:
            if not known:
                raise

    def document(self, plan_id: str) -> str | None:
        """Return the canonical JSON of the plan of that id, or None."""
        rows = self.rows("SELECT document FROM plans WHERE id = ?", plan_id)
        return rows[0][0] if rows else None

    def find(self, prefix: str) -> Plan:
        """Return the one plan whose id begins with `prefix`; errors as in `find_by_prefix`."""
        rows = self.rows(
            "SELECT id, document FROM plans WHERE id >= ? AND id < ? ORDER BY id LIMIT ?",
            *(prefix, prefix + "g", _MAX_NAMED + 1),  # "g" sorts behind every digit
        )
        return Plan.parse(find_by_prefix(prefix, dict(rows)))

    def keep(self, plan_id: str, *, kept: bool = True) -> None:
        """Say that a plan is never removed to make room, or may be again."""
        self.rows("UPDATE plans SET kept = ? WHERE id = ?", kept, plan_id)

    def listed(
        self, limit: int, *, max_bytes: int | None = None, may_read: Callable[[str], bool] | None = None
    ) -> list[StoredPlan]:
        """Return at most `limit` plans, those seen last.

        Args:
            max_bytes: of the documents that are looked at; the first one is in any case.
            may_read: leaves out plans with a corpus for which it is false.
        """

        def read(connection: sqlite3.Connection) -> list[Row]:
            found: list[Row] = []
            num_bytes = 0
            for row in connection.execute(
                "SELECT id, document, seen FROM plans ORDER BY seen DESC, id LIMIT ?",
                (limit if may_read is None else -1,),
            ):
                num_bytes += len(row[1])
                if found and max_bytes is not None and num_bytes > max_bytes:
                    break
                found.append(row)
            return found

        plans = map(StoredPlan._make, self.run(read))
        allowed = (each for each in plans if may_read is None or all(map(may_read, each.sources)))
        return list(islice(allowed, limit))

    def newest(self, limit: int) -> list[tuple[Plan, float]]:
        """Return the plans seen last, each with its Unix time."""
        return [(Plan.parse(each.document), each.seen) for each in self.listed(limit)]

    def count(self) -> int:
        """Return how many plans there are."""
        return int(self.rows("SELECT num_plans FROM totals")[0][0])


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
        raise UnknownPlan(f"no plan here begins with {prefix!r}", parameter="id", received=prefix)
    if len(ids) > 1:
        named = ", ".join(each[: len(prefix) + 8] for each in ids[:_MAX_NAMED])
        raise InvalidParameter(
            f"several plans begin with {prefix!r}: {named}{', ...' if len(ids) > _MAX_NAMED else ''}",
            parameter="id",
            received=prefix,
            remedy="give more digits",
        )
    return found[ids[0]]
