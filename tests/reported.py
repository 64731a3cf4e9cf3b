"""Reports of `find`, written without a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from corpus_server.reports import FILE, layout


def item(number: int = 0, corpus: str = "web", **fields: Any) -> dict[str, Any]:
    """Return an item of a report, with one place."""
    span = {"start": 5, "stop": 25, "num_tokens": 20, "item_start": 0, "item_stop": 20, "documents": [1]}
    return {
        "corpus": corpus,
        "item": number,
        "source": "questions.jsonl",
        "number": number,
        "num_tokens": 40,
        "num_covered": 20,
        "share": 0.5,
        "longest": 20,
        "is_complete": True,
        "parts": [{"text": "found ", "is_found": True}, {"text": "and not", "is_found": False}],
        "spans": [span],
        **fields,
    }


def report(items: Sequence[dict[str, Any]], *corpora: str, **fields: Any) -> dict[str, Any]:
    """Return a report on some corpora, `web` by default."""
    facts = {"num_tokens": 1000, "num_documents": 10, "num_items_too_short": 0, "num_items_found": len(items)}
    facts |= {"num_spans": len(items), "num_documents_found": 1}
    return {
        "n": 13,
        "by": "tokens",
        "min_share": 0.0,
        "num_places": 100,
        "num_items": len(items),
        "num_items_listed": len(items),
        "sources": ["questions.jsonl"],
        "corpora": [
            {"corpus": name, "fingerprint": "xxh3-0", "num_items_by_share": {"0.2": len(items)}, **facts}
            for name in corpora or ("web",)
        ],
        "exclude": {},
        "items": list(items),
        **fields,
    }


def write_report(folder: Path, *, num_items: int = 1, **fields: Any) -> Path:
    """Write a report of equal items; return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text("".join(layout(report([item(k) for k in range(num_items)], **fields))))
    return folder / FILE
