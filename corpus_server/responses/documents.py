"""Where documents came from: rows of their metadata, as JSON shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from corpus_server.corpus.corpus import Corpus
from corpus_server.errors import CorpusServerError, UnreadableCorpus
from corpus_server.work import Budget

MAX_CHARACTERS: Final = 2000
"""Of a value; what is longer is cut."""

NAMING: Final = {"id": ("id",), "source": ("source", "url", "file_path")}
"""What names a document -> the columns that may hold it; the first one that there is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """Rows of metadata.

    Attributes:
        rows: by number of the document, column -> value.
        problem: why there are none, although the corpus has metadata. Tokens are shown without.
        tag: tells the metadata apart from other metadata of the corpus, and from none.
    """

    rows: dict[int, dict[str, Any]]
    problem: str | None = None
    tag: str = "none"


def find_metadata(
    corpus: Corpus, documents: Iterable[int], budget: Budget, columns: Collection[str] | None = None
) -> Metadata:
    """Read the metadata of documents, numbered as in the corpus's files, as JSON shows it.

    Args:
        columns: those to read; None for all.
    """
    try:
        if (table := corpus.metadata()) is None:
            return Metadata(rows={})
        rows = table.rows(documents, budget, columns)
    except CorpusServerError as error:
        error = error.for_clients() if isinstance(error, UnreadableCorpus) else error
        return Metadata(rows={}, problem=error.detail)
    return Metadata(
        rows={number: {name: shown(value) for name, value in row.items()} for number, row in rows.items()},
        tag=table.tag,
    )


def named(row: dict[str, Any], what: str) -> Any:
    """Return the value of the first column that may hold what names a document."""
    return next((row[name] for name in NAMING[what] if row.get(name) is not None), None)


def naming_columns() -> list[str]:
    """Return the columns that may name a document."""
    return [name for names in NAMING.values() for name in names]


def shown(value: Any) -> Any:
    """Return a value of a column as JSON has it: dates as text, bytes as hex, what is long cut."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple | dict):
        text = json.dumps(value, ensure_ascii=False, default=_text)
        return _cut(text) if len(text) > MAX_CHARACTERS else json.loads(text)
    return _cut(_text(value))


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _cut(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}... ({len(text):,} characters)"
