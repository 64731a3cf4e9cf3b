"""Plans as JSON text: how it is read, and the one spelling of which a plan's id is the SHA-256."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

from corpus_server.errors import InvalidPlan
from corpus_server.plan.ranges import Ranges
from corpus_server.user_files import once_each

T = TypeVar("T")


def parse_json(text: str | bytes | bytearray, make: Callable[[Any], T]) -> T:
    """Return what is made of the JSON of a document.

    Raises:
        InvalidPlan: the text is not JSON, or an object has a field twice; and what `make` raises.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # it would visit each of a million small lists many times
    try:
        return make(json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=once_each))
    except (ValueError, RecursionError) as error:
        raise InvalidPlan(f"the text must be a plan document in JSON: {error}") from error
    finally:
        if was_enabled:
            gc.enable()


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def canonical(value: object) -> str:
    """Spell a value with sorted keys and no spaces; no list is made of ranges, which may be millions."""
    if isinstance(value, Ranges):
        return value.to_json_text()
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, dict) and any(isinstance(each, Ranges | dict | list) for each in value.values()):
        members = (f"{json.dumps(name)}:{canonical(value[name])}" for name in sorted(value))
        return f"{{{','.join(members)}}}"
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def id_of(document: str) -> str:
    """Return the id of a document in canonical JSON: 64 hex digits."""
    return hashlib.sha256(document.encode()).hexdigest()
