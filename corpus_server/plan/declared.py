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
from sys import float_info
from typing import Any, ClassVar, NamedTuple, Self, dataclass_transform

from corpus_server.errors import InvalidPlan
from corpus_server.plan.ranges import MAX_VALUE, Ranges, ranges_from_json

Schema = dict[str, Any]


class Kind(NamedTuple):
    """What a field may hold: a JSON schema, and from a name and a value of JSON or Python to what is kept."""

    schema: Schema
    take: Callable[[str, Any], Any]


def checked(
    schema: Schema,
    accepted: str,
    is_one: Callable[[Any], bool],
    keep: Callable[[Any], Any] = lambda value: value,
) -> Kind:
    """Return the kind of values for which `is_one` holds; the error for others names what is accepted."""

    def take(what: str, value: Any) -> Any:
        if not is_one(value):
            raise InvalidPlan.expected(what, accepted, value)
        return keep(value)

    return Kind(schema, take)


def declared(kind: Kind, about: str = "", *, omit: bool = False, **default: Any) -> Any:
    """Declare a field of a `Declared` dataclass.

    Args:
        about: a sentence for the schema.
        omit: whether the JSON lacks the field where it has its default.
        default: `default=` or `default_factory=`; with the default None, null means the default, too.
    """
    description = {"description": about} if about else {}
    nullable = (
        {"anyOf": [kind.schema, {"type": "null"}]} if default.get("default", "") is None else kind.schema
    )
    schemas = {"plain": kind.schema | description, "schema": nullable | description}
    return field(metadata={"take": kind.take, "omit": omit, **schemas}, **default)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(declared, field))
@dataclass(frozen=True, kw_only=True, init=False)
class Declared:
    """Base of classes with declared fields, which are frozen dataclasses.

    Raises:
        InvalidPlan: a field is outside its range, or contradicts another.
    """

    prefix: ClassVar[str]  # in messages, before the names of its fields
    elsewhere: ClassVar[Mapping[str, str]] = {}  # by names that people give it: where these belong

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True, init=False)(cls)

    def __init__(self, **given: Any) -> None:
        """Check every field, and keep each value as its kind spells it."""
        for each in fields(self):
            value = given.pop(each.name) if each.name in given else _default(each)
            if "take" in each.metadata and not (value is None is each.default):
                value = each.metadata["take"](self.prefix + each.name, value)
            self.__dict__[each.name] = value
        if given:
            raise TypeError(f"{type(self).__name__} has no {', '.join(given)}")
        self.__dict__.update(self.settled())

    def settled(self) -> dict[str, Any]:
        """Check fields against each other; return those that follow from others, by name."""
        return {}

    @classmethod
    def kept(cls, **values: Any) -> Self:
        """Return the object of the values of one that was checked."""
        made = object.__new__(cls)
        made.__dict__.update(values)
        return made

    @classmethod
    def from_json(cls, document: object, *, what: str | None = None) -> Self:
        """Make the object of parsed JSON.

        Raises:
            InvalidPlan: it is no object, lacks a field, or has an unknown or a wrong one.
        """
        what = what or cls.prefix.removesuffix(".") or "plan"
        if not isinstance(document, Mapping):
            raise InvalidPlan(f"{what} must be a JSON object, got {type(document).__name__}", parameter=what)
        names = {each.name for each in declared_fields(cls)}
        for name in document:
            if name not in names:
                close = difflib.get_close_matches(str(name)[:40], names, n=1)
                hint = cls.elsewhere.get(name) or (f"did you mean {close[0]!r}?" if close else None)
                raise InvalidPlan(
                    f"{what} has an unknown field {shorten(name)}" + (f"; {hint}" if hint else ""),
                    parameter=str(name)[:200],
                    accepted=", ".join(sorted(names)),
                )
        if missing := set(_required(cls)) - set(document):
            raise InvalidPlan(f"{what} lacks {', '.join(sorted(missing))}", parameter=min(missing))
        return cls(**document)

    def to_json(self, spell: Callable[[Ranges], Any] = Ranges.to_json) -> Any:
        """Return the JSON object, from which `from_json` makes an equal one; ranges as `spell` makes them."""
        found = [(each, getattr(self, each.name)) for each in declared_fields(type(self))]
        return {
            each.name: _json(value, spell)
            for each, value in found
            if not (each.metadata["omit"] and value == _default(each))
        }

    @classmethod
    def properties(cls) -> dict[str, Schema]:
        """Return the JSON schemas of the fields, without null."""
        return {each.name: each.metadata["plain"] for each in declared_fields(cls)}

    @classmethod
    def schema(cls) -> Schema:
        """Return the JSON schema of the object."""
        return json_object(
            _required(cls), {each.name: each.metadata["schema"] for each in declared_fields(cls)}
        )


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
    schema = {"type": "integer", "minimum": low, "maximum": high}
    accepted = f"an integer in [{low}, {high}]"
    return checked(schema, accepted, lambda value: type(value) is int and low <= value <= high)


def integers(most: int, above: int) -> Kind:
    """Return the kind of lists of 1 to so many integers in [0, above); kept as a tuple."""
    schema = {"type": "array", "minItems": 1, "maxItems": most, "items": integer(0, above - 1).schema}

    def is_one(value: Any) -> bool:
        is_list = isinstance(value, list | tuple) and 1 <= len(value) <= most
        return is_list and all(type(each) is int and 0 <= each < above for each in value)

    return checked(schema, f"a list of 1 to {most} integers in [0, {above})", is_one, tuple)


def true_or_false() -> Kind:
    """Return the kind of booleans; 1 is none."""
    return checked({"type": "boolean"}, "true or false", lambda value: type(value) is bool)


def choice(*values: str) -> Kind:
    """Return the kind of one of some texts."""
    return checked({"enum": list(values)}, f"one of {', '.join(values)}", lambda value: value in values)


def names(most: int) -> Kind:
    """Return the kind of lists of corpus names, each once; kept as a tuple."""
    schema = {"type": "array", "maxItems": most, "uniqueItems": True, "items": {"type": "string"}}

    def is_one(value: Any) -> bool:
        is_list = isinstance(value, list | tuple) and len(value) <= most
        return is_list and all(type(each) is str for each in value) and len(set(value)) == len(value)

    return checked(schema, f"a list of at most {most} corpus names, each once", is_one, tuple)


def shares(most: int, accepted: str, *, zeros: bool) -> Kind:
    """Return the kind of lists of finite numbers with a sum above 0, some of them 0 only if `zeros`."""

    def is_one(value: Any) -> bool:
        is_list = isinstance(value, list | tuple) and 1 <= len(value) <= most
        return (
            is_list
            and all(type(each) in (int, float) and 0 <= each <= float_info.max for each in value)
            and (zeros or 0 not in value)
            and 0 < sum(map(float, value)) < inf
        )

    number = {"type": "number", "minimum" if zeros else "exclusiveMinimum": 0}
    schema = {"type": "array", "minItems": 1, "maxItems": most, "items": number}
    # Floats: one spelling of equal numbers, so that equal plans have one id.
    return checked(schema, f"a list of {accepted}", is_one, lambda value: tuple(map(float, value)))


def texts(accepted: str) -> Kind:
    """Return the kind of objects whose values are texts; null is an empty one."""
    return checked(
        {"type": "object", "additionalProperties": {"type": "string"}},
        accepted,
        lambda value: (
            value is None
            or (isinstance(value, Mapping) and all(type(text) is str for text in value.values()))
        ),
        lambda value: dict(value or {}),
    )


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


def _default(each: Field[Any]) -> Any:
    if each.default is MISSING is each.default_factory:
        raise TypeError(f"{each.name} is missing")
    return each.default if each.default_factory is MISSING else each.default_factory()


def declared_fields(owner: type[Declared]) -> tuple[Field[Any], ...]:
    """Return the declared fields of a class, not others that its objects have besides."""
    return tuple(each for each in fields(owner) if "take" in each.metadata)


def _required(owner: type[Declared]) -> list[str]:
    return [each.name for each in declared_fields(owner) if each.default is MISSING is each.default_factory]
