"""What the rows of a plan may consist of. Code outside a file of this folder never names its rows."""

from __future__ import annotations

from typing import Final

from corpus_server.plan.layouts.documents import DocumentRows
from corpus_server.plan.layouts.windows import WindowRows
from corpus_server.plan.named import Registry
from corpus_server.plan.rows import Rows

__all__ = ["LAYOUTS", "DocumentRows", "WindowRows"]

LAYOUTS: Final = Registry[Rows]("rows", WindowRows, DocumentRows)
