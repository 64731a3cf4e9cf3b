"""JSON that a person wrote or changed: plans, bills, proofs."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any


def parse_json(text: str) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it is none, or an object of it gives a name twice: which value is meant is not known.
    """
    return json.loads(text, object_pairs_hook=_once_each)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r:.80} is given twice")
    return fields
