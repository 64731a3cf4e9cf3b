"""JSON in parts is the JSON of the whole, bounded while it is made, and gives the turn away."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest
from orjson import Fragment

from corpus_server.errors import ResponseTooLarge
from corpus_server.responses.json_parts import PART_BYTES, json_parts
from corpus_server.responses.response import json_response
from corpus_server.work import Budget, ClientLeft
from tests.server.http.making import body


@dataclass(frozen=True, slots=True)
class Point:
    """A row of a response."""

    number: int
    name: str | None


POINTS = [Point(number, f"row {number}") for number in range(20_000)]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"rows": [], "none": None, "nested": {"a": [1], "b": {}}},
        [1, 2.5, None, True, "text", "\u00e9\n"],
        ([0] * 65, tuple(range(64)), [[]] * 100),
        {str(number): [number] * 70 for number in range(200)},
        [{"long": "x" * PART_BYTES}] * 70,
        {1: "a number as a name"},
        "text",
        None,
    ],
)
def test_parts_join_to_the_json_of_the_whole(value: Any) -> None:
    assert json.loads(b"".join(json_parts(value))) == json.loads(json.dumps(value))


def test_dataclasses_and_arrays_are_objects_and_lists() -> None:
    arrays = [np.arange(1000, dtype="uint16").reshape(shape) for shape in ((1000,), (10, 100), (100, 2, 5))]
    value = {"points": POINTS, "arrays": arrays, "none": np.empty((0, 3)), "one": np.int64(7)}
    expected = {
        "points": [asdict(each) for each in POINTS],
        "arrays": [each.tolist() for each in arrays],
        "none": [],
        "one": 7,
    }
    assert json.loads(b"".join(json_parts(value))) == expected


def test_names_that_are_no_unicode_and_text_that_is_json_already() -> None:
    value = {"file": "shard\udcff.bin", "plan": Fragment('{"seed":3}'), "files": ["\udcff"] * 100}
    expected = {"file": "shard\udcff.bin", "plan": {"seed": 3}, "files": ["\udcff"] * 100}
    assert json.loads(b"".join(json_parts(value))) == expected


def test_no_part_of_a_long_list_is_large() -> None:
    parts = list(json_parts({"points": POINTS, "numbers": list(range(10**6))}))
    assert max(map(len, parts)) < 2 * PART_BYTES
    assert len(parts) < 400


def test_a_response_that_becomes_too_large_is_refused_while_it_is_made() -> None:
    made = list[int]()

    class Counted(list[Point]):
        def __getitem__(self, which: Any) -> Any:
            found = super().__getitem__(which)
            made.append(len(found))
            return found

    whole = len(body(json_response(POINTS, {}, Budget())))
    assert len(body(json_response(POINTS, {}, Budget(max_response_bytes=whole)))) == whole
    with pytest.raises(ResponseTooLarge, match=f"at most {whole - 1} bytes"):
        json_response(POINTS, {}, Budget(max_response_bytes=whole - 1))
    with pytest.raises(ResponseTooLarge, match="at most 1000 bytes"):
        json_response(Counted(POINTS), {}, Budget(max_response_bytes=1000))
    assert sum(made) < len(POINTS) // 4


def test_the_end_of_the_budget_ends_a_response_that_is_being_made() -> None:
    asked = list[bool]()
    budget = Budget(has_left=lambda: len(asked) > 3 or asked.append(False) is not None)
    with pytest.raises(ClientLeft):
        json_response(POINTS, {}, budget)
    assert len(asked) == 4


def test_a_response_of_thousands_of_parts_is_sent_in_few() -> None:
    """One call of the system takes 1,024 buffers at most."""
    value = {str(number): [1, 2, 3] for number in range(20_000)}
    groups = list(json_response(value, {}, Budget()).body)
    assert max(map(len, groups)) == 1
    assert len(groups) == 2
    assert json.loads(b"".join(part for group in groups for part in group)) == value
