"""What the rows of a plan may consist of. Code outside a layout's file never names the layout."""

from __future__ import annotations

from typing import Final

from corpus_server.plan.layouts.documents import DocumentRows
from corpus_server.plan.layouts.layout import Layout
from corpus_server.plan.layouts.windows import WindowRows
from corpus_server.plan.named import Registry

__all__ = ["LAYOUTS", "DocumentRows", "Layout", "WindowRows"]

LAYOUTS: Final = Registry[Layout]("rows", WindowRows, DocumentRows)
