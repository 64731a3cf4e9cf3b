"""Checks of the fields of a plan document; each raises InvalidPlan and names the field."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from corpus_server.errors import InvalidPlan


def require_fields(what: str, kind: type[Any], document: object, *, required: set[str]) -> dict[str, Any]:
    """Return a JSON object whose keys are fields of a dataclass, the required ones among them."""
    if not isinstance(document, Mapping):
        raise InvalidPlan(f"{what} must be a JSON object, got {type(document).__name__}", parameter=what)
    names = {each.name for each in fields(kind)}
    for name in document:
        if name not in names:
            close = difflib.get_close_matches(str(name)[:40], names, n=1)
            raise InvalidPlan(
                f"{what} has an unknown field {shorten(name)}"
                + (f"; did you mean {close[0]!r}?" if close else ""),
                parameter=str(name)[:200],
                accepted=", ".join(sorted(names)),
            )
    if missing := required - set(document):
        raise InvalidPlan(f"{what} lacks {', '.join(sorted(missing))}", parameter=min(missing))
    return dict(document)


def require_int(name: str, value: object, low: int, high: int) -> None:
    """Refuse what is no integer in [low, high]; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidPlan.expected(name, f"an integer in [{low}, {high}]", value)


def shorten(value: object) -> str:
    """Return at most 200 characters of a value, for a message."""
    return f"{value!r:.200}"
