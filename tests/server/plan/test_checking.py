"""Checks of a document's fields: what they refuse, and what they say of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import pytest

from corpus_server.errors import InvalidPlan
from corpus_server.plan.checking import require_fields, require_int, shorten


@dataclass
class Fields:
    global_batch_size: int
    mixture: str
    seed: int = 0


REQUIRED = {"global_batch_size", "mixture"}
ACCEPTED = "global_batch_size, mixture, seed"


@pytest.mark.parametrize(
    ("document", "message", "parameter", "accepted"),
    [
        (None, "stage must be a JSON object, got NoneType", "stage", None),
        ([1], "stage must be a JSON object, got list", "stage", None),
        ({"sed": 1}, "stage has an unknown field 'sed'; did you mean 'seed'?", "sed", ACCEPTED),
        (
            {"mixture": "", "batch_size": 1},
            "stage has an unknown field 'batch_size'; did you mean 'global_batch_size'?",
            "batch_size",
            ACCEPTED,
        ),
        ({"zzz": 1}, "stage has an unknown field 'zzz'", "zzz", ACCEPTED),
        ({1: 1}, "stage has an unknown field 1", "1", ACCEPTED),
        (
            {"global_batch_size" + "x" * 300: 1},
            "stage has an unknown field 'global_batch_size" + "x" * 182,
            "global_batch_size" + "x" * 183,
            ACCEPTED,
        ),
        ({}, "stage lacks global_batch_size, mixture", "global_batch_size", None),
        ({"seed": 1, "global_batch_size": 1}, "stage lacks mixture", "mixture", None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_document_has_the_fields_of_its_kind(
    document: object, message: str, parameter: str, accepted: str | None
) -> None:
    with pytest.raises(InvalidPlan) as caught:
        require_fields("stage", Fields, document, required=REQUIRED)
    assert (caught.value.detail, caught.value.parameter) == (message, parameter)
    assert caught.value.accepted == accepted


@pytest.mark.parametrize("mapping", [dict, MappingProxyType], ids=["dict", "other-mapping"])
@pytest.mark.parametrize("more", [{}, {"seed": 3}], ids=["required", "all"])
def test_the_fields_are_returned_in_a_dict_of_their_own(
    mapping: type[Mapping[str, object]], more: dict[str, object]
) -> None:
    fields: dict[str, object] = {"mixture": "a", "global_batch_size": 4, **more}
    found = require_fields("stage", Fields, mapping(fields), required=REQUIRED)
    assert found == fields
    found.clear()
    assert fields


@pytest.mark.parametrize("wrong", [1, 5, 2.0, "3", None, math.nan], ids=repr)
def test_an_integer_lies_between_its_bounds(wrong: object) -> None:
    for value in (2, 3, 4):
        require_int("seed", value, 2, 4)
    with pytest.raises(InvalidPlan) as caught:
        require_int("seed", wrong, 2, 4)
    assert caught.value.detail == f"seed must be an integer in [2, 4], got {wrong!r}"
    assert (caught.value.parameter, caught.value.received) == ("seed", wrong)


@pytest.mark.parametrize("wrong", [True, False])
def test_a_boolean_is_no_integer(wrong: bool) -> None:
    with pytest.raises(InvalidPlan, match=rf"seed must be an integer in \[0, 1\], got {wrong}"):
        require_int("seed", wrong, 0, 1)


def test_a_value_is_shortened_to_200_characters() -> None:
    assert shorten("x" * 198) == repr("x" * 198)
    assert shorten("x" * 199) == "'" + "x" * 199
    assert shorten(["a", 1]) == "['a', 1]"
