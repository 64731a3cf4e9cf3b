"""What the rows of a plan may consist of. Code outside a file of this folder never names its rows."""

from __future__ import annotations

from typing import Final

from corpus_server.plan.named import Registry
from corpus_server.plan.rows.documents import DocumentRows
from corpus_server.plan.rows.rows import Rows
from corpus_server.plan.rows.windows import WindowRows

__all__ = ["ROWS", "DocumentRows", "WindowRows"]

ROWS: Final = Registry[Rows](WindowRows, DocumentRows)
