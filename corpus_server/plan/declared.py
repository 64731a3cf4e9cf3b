"""Declared fields: one declaration gives the checks, the JSON both ways and the schema of a document.

seed: int = declared(integer(0, 7), default=0)

Thing(seed=9)                    InvalidPlan: thing.seed must be an integer in [0, 7], got 9
Thing.from_json({"sed": 1})      InvalidPlan: thing has an unknown field 'sed'; did you mean 'seed'?
Thing(seed=3).to_json()          {"seed": 3}
Thing.schema()                   {"type": "object", "properties": {"seed": {"type": "integer", ...
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from math import inf
from typing import Any, ClassVar, NamedTuple, Self

from corpus_server.errors import InvalidPlan
from corpus_server.plan.ranges import MAX_VALUE, Ranges, ranges_from_json

Schema = dict[str, Any]


class Kind(NamedTuple):
    """What a field may hold.

    Attributes:
        schema: JSON schema.
        take: from the field's name and a value, of JSON or of Python, to the value that is kept.
    """

    schema: Schema
    take: Callable[[str, Any], Any]


def declared(kind: Kind, about: str = "", *, omit: bool = False, **default: Any) -> Any:
    """Declare a field of a `Declared` dataclass.

    Args:
        about: a sentence for the schema.
        omit: whether the JSON lacks the field where it is empty.
        default: `default=` or `default_factory=`; with the default None, null means the default, too.
    """
    return field(metadata={"kind": kind, "about": about, "omit": omit}, **default)


@dataclass(frozen=True)
class Declared:
    """Base of dataclasses with declared fields. A class that has a `__post_init__` calls `_check` in it."""

    __slots__ = ()
    what: ClassVar[str]  # the document's name in messages
    prefix: ClassVar[str]  # before the names of its fields

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        """Check every field, and keep each value as its kind spells it."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.default is not None:
                taken = _kind(each).take(self.prefix + each.name, value)
                object.__setattr__(self, each.name, taken)

    @classmethod
    def from_json(cls, document: object, *, what: str | None = None) -> Self:
        """Make the object of parsed JSON.

        Raises:
            InvalidPlan: it is no object, lacks a field, or has an unknown or a wrong one.
        """
        what = what or cls.what
        if not isinstance(document, Mapping):
            raise InvalidPlan(f"{what} must be a JSON object, got {type(document).__name__}", parameter=what)
        names = {each.name for each in fields(cls)}
        for name in document:
            if name not in names:
                close = difflib.get_close_matches(str(name)[:40], names, n=1)
                raise InvalidPlan(
                    f"{what} has an unknown field {shorten(name)}"
                    + (f"; did you mean {close[0]!r}?" if close else ""),
                    parameter=str(name)[:200],
                    accepted=", ".join(sorted(names)),
                )
        if missing := set(_required(cls)) - set(document):
            raise InvalidPlan(f"{what} lacks {', '.join(sorted(missing))}", parameter=min(missing))
        return cls(**document)

    def to_json(self, spell: Callable[[Ranges], Any] = Ranges.to_json) -> Any:
        """Return the JSON object, from which `from_json` makes an equal one; ranges as `spell` makes them."""
        found = {each: getattr(self, each.name) for each in fields(self)}
        return {
            each.name: _json(value, spell)
            for each, value in found.items()
            if value or not each.metadata["omit"]
        }

    @classmethod
    def schema(cls) -> Schema:
        """Return the JSON schema of the object."""
        properties = {}
        for each in fields(cls):
            schema = _kind(each).schema
            described = {"anyOf": [schema, {"type": "null"}]} if each.default is None else dict(schema)
            properties[each.name] = described | _about(each)
        return json_object(_required(cls), properties)


def kind_of(owner: type[Declared], name: str) -> Kind:
    """Return the kind of a declared field."""
    return next(_kind(each) for each in fields(owner) if each.name == name)


def about_of(owner: type[Declared], name: str) -> str:
    """Return the sentence about a declared field."""
    return next(str(each.metadata["about"]) for each in fields(owner) if each.name == name)


def json_object(required: Sequence[str], properties: Mapping[str, Schema]) -> Schema:
    """Return the schema of an object that has no other fields."""
    return {
        "type": "object",
        "required": list(required),
        "properties": dict(properties),
        "additionalProperties": False,
    }


def integer(low: int, high: int) -> Kind:
    """Return the kind of integers in [low, high]; a bool is none, and 1.0 neither."""

    def take(what: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InvalidPlan.expected(what, f"an integer in [{low}, {high}]", value)
        return value

    return Kind({"type": "integer", "minimum": low, "maximum": high}, take)


def choice(*values: str) -> Kind:
    """Return the kind of one of some texts."""

    def take(what: str, value: object) -> str:
        if not isinstance(value, str) or value not in values:
            raise InvalidPlan.expected(what, f"one of {', '.join(values)}", value)
        return value

    return Kind({"enum": list(values)}, take)


def names(most: int) -> Kind:
    """Return the kind of lists of corpus names, each once; kept as a tuple."""

    def take(what: str, value: object) -> tuple[str, ...]:
        is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) <= most
        found: tuple[Any, ...] = tuple(value) if is_list else ()  # type: ignore[arg-type]
        if not is_list or any(type(each) is not str for each in found) or len(set(found)) != len(found):
            raise InvalidPlan.expected(what, f"a list of at most {most} corpus names, each once", value)
        return found

    return Kind({"type": "array", "maxItems": most, "uniqueItems": True, "items": {"type": "string"}}, take)


def shares(sizes: range, accepted: str, *, zeros: bool) -> Kind:
    """Return the kind of lists of finite numbers with a sum above 0, some of them 0 only if `zeros`."""

    def take(what: str, value: Any) -> tuple[float, ...]:
        found = isinstance(value, Sequence) and len(value) in sizes
        found = found and all(isinstance(each, int | float) and each is not True for each in value)
        found = found and min(value) >= 0 and (zeros or 0 not in value)
        if not found or not 0 < sum(value) < inf:
            raise InvalidPlan.expected(what, f"a list of {accepted}", value)
        return tuple(map(float, value))  # one spelling of equal numbers, so that equal plans have one id

    number = {"type": "number", "minimum" if zeros else "exclusiveMinimum": 0}
    return Kind({"type": "array", "minItems": 1, "maxItems": sizes[-1], "items": number}, take)


def texts(accepted: str) -> Kind:
    """Return the kind of objects whose values are texts; null is an empty one."""

    def take(what: str, value: object) -> dict[str, str]:
        found = {} if value is None else value
        if not isinstance(found, Mapping) or any(type(text) is not str for text in found.values()):
            raise InvalidPlan.expected(what, accepted, value)
        return dict(found)

    return Kind({"type": "object", "additionalProperties": {"type": "string"}}, take)


def ranges(limit: int = MAX_VALUE) -> Kind:
    """Return the kind of half-open ranges, kept as arrays: a million have 16 MB."""
    pair = {"type": "array", "items": integer(0, limit).schema, "minItems": 2, "maxItems": 2}
    return Kind(
        {"type": "array", "items": pair, "description": "Half-open ranges, ascending."},
        lambda what, value: (
            value if isinstance(value, Ranges) else ranges_from_json(what, value, limit=limit)
        ),
    )


def shorten(value: object) -> str:
    """Return at most 200 characters of a value, for a message."""
    return f"{value!r:.200}"


def _json(value: Any, spell: Callable[[Ranges], Any]) -> Any:
    if isinstance(value, Ranges):
        return spell(value)
    if isinstance(value, Declared):
        return value.to_json(spell)
    if isinstance(value, tuple):
        return [_json(each, spell) for each in value]
    if isinstance(value, Mapping):
        return {name: _json(each, spell) for name, each in value.items()}
    return value


def _required(owner: type[Declared]) -> list[str]:
    return [each.name for each in fields(owner) if each.default is MISSING is each.default_factory]


def _kind(each: Field[Any]) -> Kind:
    kind: Kind = each.metadata["kind"]
    return kind


def _about(each: Field[Any]) -> Schema:
    return {"description": each.metadata["about"]} if each.metadata["about"] else {}
