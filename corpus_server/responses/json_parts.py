"""JSON in parts, because the interpreter does nothing else while it makes JSON: 11 MB at once take 0.1 s."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson

PART_BYTES: Final = 64 * 1024
"""What is made at once, about, unless one item of a list is larger: less than a millisecond."""

_FEW: Final = 64  # items, of which each may be large: they are taken apart, too


def json_parts(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value in small parts: objects field by field, long lists and arrays by some items.

    NumPy arrays become lists, and bytes of names that are not UTF-8 `\\udcxx`.
    """
    if isinstance(value, Mapping):
        yield from _object(value.items())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _object((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        yield from _list(value)
    else:
        yield _dumped(value)


def _object(fields: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
    mark = b"{"
    for name, value in fields:
        yield b"%b%b:" % (mark, _dumped(str(name)))
        yield from json_parts(value)
        mark = b","
    yield b"{}" if mark == b"{" else b"}"


def _list(items: Sequence[Any] | np.ndarray) -> Iterator[bytes]:
    if len(items) <= _FEW:
        for number, item in enumerate(items):
            yield b"," if number else b"["
            yield from json_parts(item)
    else:
        at, count = 0, 1
        while at < len(items):
            yield b"," if at else b"["
            part = _dumped(items[at : at + count])[1:-1]
            yield part
            at, count = at + count, max(1, min(4 * count, count * PART_BYTES // len(part)))
    yield b"]" if len(items) else b"[]"


def _dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # orjson refuses such names
        return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else dataclasses.asdict(value)
