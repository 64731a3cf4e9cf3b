"""Numbers by corpus, as people give them: weights, epochs, tokens; a group of corpora may share one number.

{"web": {"share": 0.7, "of": {"cc": 2, "wiki": 1}}, "code": 0.3}

cc 0.7 * 2/3, wiki 0.7 * 1/3, code 0.3      "web" names the group alone, and groups may hold groups
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import inf
from typing import Any, Final

from corpus_server.errors import InvalidPlan
from corpus_server.plan.declared import Kind, Schema

MAX_SOURCES: Final = 1024
_MAX_DEPTH: Final = 8
"""Groups within groups."""
MAX_AMOUNT: Final = 2**63

_GROUP: Final = ("share", "of")
_POSITIVE: Final[Schema] = {"type": "number", "exclusiveMinimum": 0}


def numbers_by_corpus(what: str, value: object, *, has_groups: bool = True) -> dict[str, Any]:
    """Return the positive numbers of corpora; those in groups as exact fractions.

    Raises:
        InvalidPlan: it is no such object, names a corpus twice, or has too many corpora or levels.
    """
    found: dict[str, Any] = {}
    _collect(found, what, value, Fraction(1), has_groups=has_groups, depth=0)
    return found


def count_corpora(value: object) -> int:
    """Return how many corpora an object of numbers names, checking nothing."""
    if not isinstance(value, Mapping):
        return 0
    count, left = 0, [value]
    while left:
        for each in left.pop().values():
            if isinstance(each, Mapping) and isinstance(each.get("of"), Mapping):
                left.append(each["of"])
            else:
                count += 1
    return count


def schema_of_numbers(*, has_groups: bool = True) -> Schema:
    """Return the JSON schema of such an object; that of a group says nothing of groups within it."""
    group = {
        "type": "object",
        "required": list(_GROUP),
        "properties": {"share": _POSITIVE, "of": {"type": "object", "minProperties": 1}},
        "additionalProperties": False,
        "description": "Corpora that share a number: `of` has their weights within it.",
    }
    each = {"anyOf": [_POSITIVE, group]} if has_groups else _POSITIVE
    return {"type": "object", "minProperties": 1, "maxProperties": MAX_SOURCES, "additionalProperties": each}


def amounts(*, has_groups: bool) -> Kind:
    """Return the kind of amounts by corpus, kept as exact fractions of the decimals that were written."""

    def take(what: str, value: Any) -> dict[str, Fraction]:
        return {
            name: each if type(each) is Fraction else exact(f"{what}.{name}", each)
            for name, each in numbers_by_corpus(what, value, has_groups=has_groups).items()
        }

    return Kind(schema_of_numbers(has_groups=has_groups), take)


def exact(what: str, value: object) -> Fraction:
    """Return a positive number as it was written: 0.1 is a tenth, which no float is."""
    if type(value) not in (int, float) or not 0 < value <= MAX_AMOUNT:  # type: ignore[operator]
        raise InvalidPlan.expected(what, f"a positive number of at most {MAX_AMOUNT}", value)
    return Fraction(str(value))


def _collect(
    found: dict[str, Any], what: str, value: object, factor: Fraction, *, has_groups: bool, depth: int
) -> None:
    if not isinstance(value, Mapping) or not 1 <= len(value) <= MAX_SOURCES:
        accepted = f'an object of 1 to {MAX_SOURCES} corpus names and numbers, like {{"web": 0.7}}'
        raise InvalidPlan.expected(what, accepted, value)
    for name, each in value.items():
        where = f"{what}.{name}"
        if not isinstance(each, Mapping):
            if not isinstance(each, int | float) or each is True or not 0 < each < inf:
                remedy = "leave a source out instead of giving it 0"
                raise InvalidPlan.expected(where, "a positive number", each, remedy=remedy)
            if name in found:
                raise InvalidPlan(
                    f"{where}: corpus {name!r} is named twice; give it one number, in one group",
                    parameter=where,
                )
            if len(found) >= MAX_SOURCES:
                raise InvalidPlan.expected(what, f"an object of at most {MAX_SOURCES} corpora", "more")
            found[name] = factor * exact(where, each) if depth else each
            continue
        if not has_groups:
            remedy = "name its corpora, or give tokens for the group"
            accepted = "a positive number, because an epoch is one of a corpus"
            raise InvalidPlan.expected(where, accepted, "a group", remedy=remedy)
        if set(each) != set(_GROUP):
            accepted = 'a number, or a group as {"share": 0.7, "of": {"cc": 2, "wiki": 1}}'
            raise InvalidPlan.expected(where, accepted, each)
        if depth >= _MAX_DEPTH:
            raise InvalidPlan(f"{where}: groups are nested more than {_MAX_DEPTH} deep", parameter=where)
        share = factor * exact(f"{where}.share", each["share"])
        total = _total(f"{where}.of", each["of"])
        _collect(found, f"{where}.of", each["of"], share / total, has_groups=True, depth=depth + 1)


def _total(what: str, value: object) -> Fraction:
    """Return the sum of a group's numbers; a group within it counts by its share."""
    if not isinstance(value, Mapping) or not 1 <= len(value) <= MAX_SOURCES:
        raise InvalidPlan.expected(what, "an object of corpus names and weights", value)
    shares = {name: each.get("share") if isinstance(each, Mapping) else each for name, each in value.items()}
    return sum((exact(f"{what}.{name}", share) for name, share in shares.items()), Fraction(0))
