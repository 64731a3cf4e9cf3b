"""Plans that continue others, kept as *links* of the plan that they all go back to, their root.

They count for the token that posted them (`room.py`), and go when their root goes. With each link is kept
where the sources stand when its stage begins, which takes up to 0.4 ms to compute: so a worker that begins in
mid-run reads 100,000 links within seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from corpus_server.plan.chain import Continued, KeptLink
from corpus_server.plan_store.database import Database
from corpus_server.plan_store.room import add_documents

_MAX_DEPTH = 4096
"""Links that are read at a time."""

_ADD = """
    INSERT INTO links (id, parent, root, number, placed, document, owner, seen, num_bytes)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
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
        size, *_ = placed = np.frombuffer(numbers, dtype="<u8")
        return placed[1 : 1 + int(size)], placed[1 + int(size) :] if placed.size > 1 + size else None


def add_links(
    database: Database, plan: Continued, *, owner: str = "anyone", max_owned: int | None = None
) -> None:
    """Keep the links of a plan, whose stages are placed and whose root was added before.

    Args:
        owner: who posts it.
        max_owned: documents of this owner that are kept, see `room.py`.
    """
    if has_link(database, plan.id):
        return
    root, log, num_sources = plan.root.id, plan.log, len(plan.sources)
    rows, parent, now = [], plan.parent_id, time.time()
    for number, link in enumerate(plan.links, plan.num_before):
        placed = [log.positions[number, :num_sources]]
        placed += [] if log.rows is log.positions else [log.rows[number, :num_sources]]
        size = np.array([num_sources], dtype=np.uint64)
        numbers = np.concatenate([size, *placed]).astype("<u8").tobytes()
        placed_bytes = _digest(link.id, numbers) + numbers
        num_bytes = len(placed_bytes) + len(link.document)
        rows.append((link.id, parent, root, number, placed_bytes, link.document, owner, now, num_bytes))
        parent = link.id
    add_documents(database, _ADD, rows, owner=owner, max_owned=max_owned, root=root, newest=plan.id)


def has_link(database: Database, plan_id: str) -> bool:
    """Return whether a link is kept."""
    return bool(database.rows("SELECT 1 FROM links WHERE id = ?", plan_id))


def chain(database: Database, plan_id: str, is_known: Callable[[str], bool]) -> list[PlacedLink]:
    """Return the links, oldest first, from a known plan or a root to this one; none of a root.

    Links that go round in a circle are damaged, and removed.
    """
    links = dict[str, PlacedLink]()
    depth, at = 4, plan_id
    while rows := database.rows(_CHAIN, at, depth):
        for link_id, parent, placed, document in rows:
            if link_id in links:
                remove_links(database, links.values())
                return []
            links[link_id] = PlacedLink(KeptLink(link_id, document), parent, placed)
            if is_known(at := parent):
                return [*links.values()][::-1]
        depth = min(4 * depth, _MAX_DEPTH)
    return [*links.values()][::-1]


def remove_links(database: Database, links: Iterable[PlacedLink]) -> None:
    """Remove links that are damaged, unless the file is only read."""
    for link in () if database.read_only else links:
        database.rows("DELETE FROM links WHERE id = ?", link.kept.id)


def newest_link(database: Database, root: str) -> tuple[str, int] | None:
    """Return id and stages of the longest plan that continues a plan, if there is one."""
    rows = database.rows("SELECT id, number + 1 FROM links WHERE root = ? ORDER BY number DESC LIMIT 1", root)
    return rows[0] if rows else None


def _digest(link_id: str, numbers: bytes) -> bytes:
    return xxhash.xxh3_64_digest(link_id.encode() + numbers)
