"""Who may keep how much: room for a new document, made in the transaction that adds it.

Every document counts for the token that posted it: a plan, and each that continues one. Where a token has
more than it may, or all together have more than the server keeps, the documents that were not seen for the
longest time make room: plans, with what continues them, and continuations that nothing continues. They are
those of the token that posts; if it holds less than an equal share of all tokens, those of the token that
holds most. So a token that keeps to its share loses no plan to another one. The new document, and what it
continues, stay; if they leave no room, the new document is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Any

from corpus_server.errors import Forbidden, StateUnavailable
from corpus_server.plan_store.database import Database, Row, totals

_USAGE = """
    SELECT owner, sum(num_bytes), sum(num_plans) FROM (
        SELECT owner, num_bytes, 1 AS num_plans FROM plans
        UNION ALL SELECT owner, num_bytes, 0 FROM links
    ) GROUP BY owner
"""

_NUMBER = """
    SELECT (SELECT count(*) FROM plans WHERE owner = :owner)
         + (SELECT count(*) FROM links WHERE owner = :owner)
"""

_OLDEST = """
    SELECT id, is_link FROM (
        SELECT id, seen, 0 AS is_link FROM plans
            WHERE owner = :owner AND NOT kept AND id != :root
            AND NOT EXISTS (SELECT 1 FROM links WHERE root = plans.id AND links.owner NOT IN (:owner, ''))
        UNION ALL
        SELECT id, seen, 1 FROM links
            WHERE owner = :owner AND id != :newest
            AND NOT EXISTS (SELECT 1 FROM links AS next WHERE next.parent = links.id)
    ) ORDER BY seen, id DESC LIMIT 1
"""
"""The document of a token that makes room first; none that another token's continues."""


def add_documents(
    database: Database,
    statement: str,
    rows: Iterable[Row],
    *,
    owner: str,
    max_owned: int | None,
    root: str,
    newest: str,
) -> None:
    """Add documents; in the same transaction remove others until all are within their bounds.

    Args:
        statement: adds one of the rows.
        owner: token that posts them.
        max_owned: documents that it may keep.
        root: plan that was posted, or that the newest goes back to: without it nothing is added.
        newest: id of what was posted.

    Raises:
        Forbidden: the token would have more than it may.
        StateUnavailable: all would have more than the server keeps.
    """
    values = {"owner": owner, "root": root, "newest": newest}

    def write(connection: sqlite3.Connection) -> None:
        with connection:  # ends the transaction, well or not
            connection.execute("BEGIN IMMEDIATE")
            # Else another process has just removed it; the client will post all of the chain again.
            if root == newest or connection.execute("SELECT 1 FROM plans WHERE id = ?", (root,)).fetchone():
                connection.executemany(statement, rows)
                _make_room(connection, database, values, max_owned)

    database.run(write)


def _make_room(
    connection: sqlite3.Connection, database: Database, values: dict[str, Any], max_owned: int | None
) -> None:
    owner = values["owner"]

    def remove(of: str) -> bool:
        row = connection.execute(_OLDEST, {**values, "owner": of}).fetchone()
        if row is not None:
            connection.execute(f"DELETE FROM {'links' if row[1] else 'plans'} WHERE id = ?", row[:1])
        return row is not None

    while max_owned is not None and _first(connection, _NUMBER, values) > max_owned:
        if not remove(owner):
            raise Forbidden(
                f"token {owner!r} may keep {max_owned} plans, and each that continues another one is a plan",
                remedy="begin a new plan, or give the token a larger max_plans",
            )
    while True:
        num_plans, num_bytes = totals(connection)
        if num_plans <= database.max_plans and num_bytes <= database.max_bytes:
            return
        if num_plans == 1 and values["root"] == values["newest"]:
            return  # a single one that is too large is kept alone
        which = 1 if num_bytes > database.max_bytes else 2
        usage = {row[0]: row[which] for row in connection.execute(_USAGE)}
        share = sum(usage.values()) / len(usage)
        largest = max(usage, key=lambda name: usage[name])
        if not remove(owner if usage[owner] >= share else largest):
            raise StateUnavailable(
                f"plans cannot be kept: there is room for {database.max_plans:,} plans and "
                f"{database.max_bytes:,} bytes",
                remedy="begin a new plan, or post it with keep=false",
            )


def _first(connection: sqlite3.Connection, statement: str, values: dict[str, Any]) -> int:
    return int(connection.execute(statement, values).fetchone()[0])
