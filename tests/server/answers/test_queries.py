"""Query parameters: what is accepted, the defaults, and what is said of anything else."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import ValidationError

from corpus_server.answers.tokens import (
    Integer,
    QueryParameters,
    StepsQuery,
    TokensQuery,
    parameters,
)
from corpus_server.errors import InvalidParameter
from corpus_server.plan.stage import MAX_STEP


class Query(QueryParameters):
    """One number."""

    number: Annotated[int, Integer(2, 12)] = 7
    """Any of a few."""


@pytest.mark.parametrize(("given", "number"), [("2", 2), ("12", 12), ("007", 7)])
def test_a_number_is_digits_within_its_range(given: str, number: int) -> None:
    assert Query.model_validate({"number": given}).number == number


@pytest.mark.parametrize(
    "given", ["1", "13", "-3", "+3", "3.0", "1e1", "", " 3", "3 ", "\u0663", "0" * 20 + "3", 3, True, None]
)
def test_everything_else_is_no_number(given: object) -> None:
    with pytest.raises(ValidationError) as refused:
        Query.model_validate({"number": given})
    (error,) = refused.value.errors()
    assert (error["type"], error["msg"]) == ("integer", "must be an integer in [2, 12]")
    assert (error["loc"], error["input"]) == (("number",), given)
    assert error["ctx"] == {"accepted": "an integer in [2, 12]"}


LIMITS = {
    "step": (StepsQuery, 0, MAX_STEP),
    "count": (StepsQuery, 1, 4096),
    "rank": (StepsQuery, 0, 2**20 - 1),
    "world_size": (StepsQuery, 1, 2**20),
    "start": (TokensQuery, 0, 2**63 - 1),
}


@pytest.mark.parametrize("name", LIMITS)
def test_parameters_have_limits(name: str) -> None:
    query, low, high = LIMITS[name]
    needed = {"step": "3"} if query is StepsQuery else {}
    for value in (low, high):
        assert getattr(query.model_validate({**needed, name: str(value)}), name) == value
    for value in (low - 1, high + 1):
        with pytest.raises(ValidationError) as refused:
            query.model_validate({**needed, name: str(value)})
        assert refused.value.errors()[0]["msg"] == f"must be an integer in [{low}, {high}]"


@pytest.mark.parametrize(
    ("query_string", "found"),
    [
        (b"", {}),
        (b"a=1&b=2", {"a": "1", "b": "2"}),
        (b"a=&b", {"a": "", "b": ""}),
        (b"a=%31+2&%62=%C3%A9", {"a": "1 2", "b": "\xe9"}),
        (b"a=1&&b=2&", {"a": "1", "b": "2"}),
    ],
)
def test_a_query_string_is_parameters(query_string: bytes, found: dict[str, str]) -> None:
    assert parameters(query_string) == found


@pytest.mark.parametrize("query_string", [b"b=1&a=1&a=1", b"a=1&b=1&%61=2", b"b=1&a=1&a=2&a=3&c=1"])
def test_a_parameter_that_is_given_twice_is_refused(query_string: bytes) -> None:
    with pytest.raises(InvalidParameter) as refused:
        parameters(query_string)
    assert (refused.value.detail, refused.value.parameter) == ("a is given twice", "a")
