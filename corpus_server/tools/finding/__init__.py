"""Find what evaluation items, or other texts, have in common with corpora; see docs/contamination.md."""

from corpus_server.tools.finding.finding import DEFAULT_N, Found, Wanted, default_n, describe, find, opened
from corpus_server.tools.finding.items import Items, read_items
from corpus_server.tools.finding.report import as_html, as_markdown, sentences, summary
from corpus_server.tools.finding.spans import document_ranges
from corpus_server.tools.finding.steps import add_steps

__all__ = [
    "DEFAULT_N",
    "Found",
    "Items",
    "Wanted",
    "add_steps",
    "as_html",
    "as_markdown",
    "default_n",
    "describe",
    "document_ranges",
    "find",
    "opened",
    "read_items",
    "sentences",
    "summary",
]
