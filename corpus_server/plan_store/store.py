"""Plans that a server has seen, which its worker processes share.

A plan is content-addressed and every client carries its own plan, so losing the file loses no training run: a
replica answers an unknown id with 404, and the client posts the plan again. This is why the number of plans
may be bounded.
"""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import time
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, NamedTuple

from corpus_server.errors import InvalidParameter, StateUnavailable, UnknownPlan
from corpus_server.plan.canonical import id_of
from corpus_server.plan.chain import Continued
from corpus_server.plan.document import Plan
from corpus_server.plan_store.database import Database, Row, totals
from corpus_server.plan_store.links import chain
from corpus_server.plan_store.room import add_documents

MAX_RUNS = 32
"""Names of runs that are kept of a plan, those seen last."""

ID_DIGITS: Final = 64
PLAN_ID_PATTERN: Final = "^[0-9a-f]{8,64}$"
"""An id of a plan, or how it begins."""
PLAN_ID_FORM: Final = "the 64 digits (0-9, a-f) of a plan's id, or the first 8 of them or more"
"""The same for people."""
"""Of an id of a plan."""

_MAX_NAMED = 5
_SEEN_SECONDS = 60.0
"""A plan that is seen again within a minute is not written again."""

_RUNS_OF_PLAN = """
    (SELECT group_concat(run, ' ')
        FROM (SELECT posted.run FROM runs AS posted WHERE posted.plan = plans.id ORDER BY posted.seen DESC))
"""

_ADD = """
    INSERT INTO plans (id, seen, num_bytes, owner, document) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET seen = excluded.seen
"""

_EVICT_RUNS = """
    DELETE FROM runs WHERE plan = ? AND run IN
        (SELECT run FROM runs WHERE plan = ? ORDER BY seen DESC LIMIT -1 OFFSET ?)
"""

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
    runs: tuple[str, ...]

    @property
    def sources(self) -> list[str]:
        """Names of its corpora: those of its fingerprints, one of the first fields of the sorted document."""
        decoder, at = json.JSONDecoder(), 0
        while True:
            name, at = decoder.raw_decode(self.document, at + 1)
            value, at = decoder.raw_decode(self.document, at + 1)
            if name == "fingerprints":
                return list(value)


class PlanStore(Database):
    """Plans by id; `links.py` has those that continue others."""

    def add(self, plan: Plan, *, owner: str = "anyone", max_owned: int | None = None, run: str = "") -> None:
        """Keep a bound plan, or note that it was seen again.

        Args:
            owner: who posts it.
            max_owned: documents of this owner that are kept, see `room.py`.
            run: the name of the run that posts it; "" for none.
        """
        now, document = time.time(), plan.canonical_json
        known = self.rows("SELECT seen FROM plans WHERE id = ?", plan.id)
        try:
            if run:
                self._add_run(plan.id, run, now)
            if _is_recent(known, now):
                return
            row = plan.id, now, len(document), owner, document
            add_documents(self, _ADD, [row], owner=owner, max_owned=max_owned, root=plan.id, newest=plan.id)
        except StateUnavailable:
            if not known:
                raise

    def _add_run(self, plan_id: str, run: str, now: float) -> None:
        known = self.rows("SELECT seen FROM runs WHERE plan = ? AND run = ?", plan_id, run)
        if not _is_recent(known, now):
            self.rows("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", plan_id, run, now)
            self.rows(_EVICT_RUNS, plan_id, plan_id, MAX_RUNS)

    def document(self, plan_id: str) -> str | None:
        """Return the canonical JSON of the plan of that id, or None.

        SQLite does not see that a digit in it changed: another plan would be served under this id.
        """
        for (document,) in self.rows("SELECT document FROM plans WHERE id = ?", plan_id):
            if _is_whole(plan_id, document):
                return str(document)
            _log.error("the document of plan %s is damaged; clients post it again", plan_id)
            if not self.read_only:
                self.rows("DELETE FROM plans WHERE id = ?", plan_id)
        return None

    def find(self, prefix: str) -> Plan:
        """Return the one plan whose id begins with `prefix`; errors as in `find_by_prefix`."""
        plan_id = find_by_prefix(prefix, self.ids(prefix))
        if (document := self.document(plan_id)) is not None:
            return Plan.parse(document)
        links = chain(self, plan_id, lambda _: False) if self.has("links") else []
        document = self.document(links[0].parent) if links else None
        plan = document and Continued.restored(Plan.parse(document), [link.kept for link in links])
        if not plan:
            detail = f"plan {plan_id} is damaged or incomplete here"
            raise UnknownPlan(detail, parameter="id", received=plan_id)
        return plan

    def ids(self, prefix: str) -> list[str]:
        """Return ids that begin with `prefix`, one more than are named where there are several."""
        bounds = (prefix, prefix + "g", _MAX_NAMED + 1)  # "g" sorts behind every digit
        tables = ("plans", "links") if self.has("links") else ("plans",)
        statement = "SELECT id FROM {} WHERE id >= ? AND id < ? ORDER BY id LIMIT ?"
        return [each for table in tables for (each,) in self.rows(statement.format(table), *bounds)]

    def keep(self, plan_id: str, *, kept: bool = True) -> None:
        """Say that a plan is never removed to make room, or may be again."""
        self.rows("UPDATE plans SET kept = ? WHERE id = ?", kept, plan_id)

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
        has_runs = self.has("runs")
        if run is not None and not has_runs:
            return []
        names = _RUNS_OF_PLAN if has_runs else "''"
        source = "plans" if run is None else "plans JOIN runs ON plan = id AND run = ?"
        seen = "plans.seen" if run is None else "runs.seen"
        values = (*(() if run is None else (run,)), limit if may_read is None else -1)

        def read(connection: sqlite3.Connection) -> list[Row]:
            rows: list[Row] = []
            num_bytes = 0
            for row in connection.execute(
                f"SELECT id, document, {seen}, {names} FROM {source} ORDER BY {seen} DESC, id LIMIT ?", values
            ):
                if not _is_whole(row[0], row[1]):
                    continue
                num_bytes += len(row[1])
                if rows and max_bytes is not None and num_bytes > max_bytes:
                    break
                rows.append(row)
            return rows

        plans = (
            StoredPlan(plan_id, document, seen, tuple((runs or "").split()))
            for plan_id, document, seen, runs in self.run(read)
        )
        allowed = (each for each in plans if may_read is None or all(map(may_read, each.sources)))
        return list(islice(allowed, limit))

    def newest(self, limit: int, run: str | None = None) -> list[tuple[Plan, float, tuple[str, ...]]]:
        """Return the plans seen last, or those of a run, each with its Unix time and its runs."""
        return [(Plan.parse(each.document), each.seen, each.runs) for each in self.listed(limit, run=run)]

    def count(self) -> int:
        """Return how many plans there are."""
        return self.run(totals)[0]


def _is_recent(known: list[Row], now: float) -> bool:
    """Tell whether a row was written within the last minute."""
    return bool(known) and 0 <= now - known[0][0] < _SEEN_SECONDS


def _is_whole(plan_id: str, document: object) -> bool:
    """Tell whether a document is that of its id."""
    return isinstance(document, str) and id_of(document) == plan_id


def find_by_prefix(prefix: str, ids: Iterable[str], *, parameter: str = "id") -> str:
    """Return the one id that begins with `prefix`.

    Raises:
        UnknownPlan: there is none.
        InvalidParameter: there are several, or `prefix` is no part of an id.
    """
    if not re.fullmatch(PLAN_ID_PATTERN, prefix):
        raise InvalidParameter.expected("id", PLAN_ID_FORM, prefix)
    matching = sorted(plan_id for plan_id in ids if plan_id.startswith(prefix))
    if not matching:
        raise UnknownPlan(
            f"no plan here begins with {prefix!r}",
            parameter=parameter,
            received=prefix,
            remedy="`corpus-server plans list` shows those that are known",
        )
    if len(matching) > 1:
        named = ", ".join(each[: len(prefix) + 8] for each in matching[:_MAX_NAMED])
        raise InvalidParameter(
            f"several plans begin with {prefix!r}: {named}{', ...' if len(matching) > _MAX_NAMED else ''}",
            parameter=parameter,
            received=prefix,
            remedy="give more digits",
        )
    return matching[0]
