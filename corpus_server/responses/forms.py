"""Plans as JSON, arrays as JSON and as text, which people read; and an array in memory, read as files are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NotRequired

import numpy as np
from orjson import Fragment
from typing_extensions import TypedDict

from corpus_server.corpus.corpus import Corpus
from corpus_server.described import described_keys
from corpus_server.pieces import NO_SHARD
from corpus_server.plan.questions.usage import SourceUsage, count_usage
from corpus_server.read import text
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.description import BoundDescription, describe
from corpus_server.read.reading import Reading, WindowReading, read_arrays
from corpus_server.responses.response import Format, Response, json_response, text_response
from corpus_server.responses.service import Service
from corpus_server.work import Budget


@described_keys
class RootPlan(TypedDict):
    """The plan that others continue."""

    id: str
    plan: dict[str, Any]


@described_keys
class PlanDescription(BoundDescription):
    """A plan bound to the corpora here."""

    id: str
    plan: dict[str, Any]
    root: NotRequired[RootPlan]
    """Of a plan that continues others, the first of them."""
    planned: NotRequired[dict[str, SourceUsage]]
    """Of a posted document whose stages say where the run ends: what its `num_steps` steps use."""


class InMemory:
    """An array as a reading, so that one function sends all arrays."""

    unit_tokens = 1

    def __init__(self, array: np.ndarray) -> None:
        self._flat, self.num_units = array.reshape(-1), array.size
        self.shape, self.dtype = array.shape, array.dtype

    def read(self, first: int, num_units: int) -> np.ndarray:
        """Return numbers from `first` on."""
        return self._flat[first : first + num_units]


def share_of(number: int, total: int, what: str) -> str:
    """Return how much of a corpus was looked at, for people; 100 % is said of nothing less."""
    percent = 100 if number == total else 100 * number // total
    return f"{number:,} of {total:,} {what} ({percent or 'less than 1'} %)"


def num_items(*readings: Reading) -> int:
    """Return how many numbers some arrays hold."""
    return sum(reading.num_units * reading.unit_tokens for reading in readings)


def check_form(service: Service, chosen: Format, corpora: Iterable[Corpus], *readings: Reading) -> None:
    """Refuse more numbers than JSON or text may hold, and text of corpora without a tokenizer."""
    service.admission.check_text_size(num_items(*readings), "count")
    if chosen == "text":
        for corpus in corpora:
            text.check_available(corpus)


def json_arrays(
    fields: Mapping[str, object], headers: Mapping[str, str], readings: Mapping[str, Reading], budget: Budget
) -> Response:
    """Make a response that holds arrays as nested lists, by name."""
    arrays = {}
    for name, reading in readings.items():
        parts = [np.empty(0, dtype=reading.dtype)]  # so that an empty range has a type
        for part in read_arrays(reading):
            parts.append(part.reshape(-1))
            budget.spend(num_bytes=part.nbytes)
        arrays[name] = np.concatenate(parts).reshape(reading.shape)
    return json_response({**fields, **arrays}, headers, budget)


def plan_description(
    bound: BoundPlan, budget: Budget, parent: BoundPlan | None = None, *, num_steps: int | None = None
) -> Response:
    """Make the response that describes a plan, a `PlanDescription`.

    Args:
        parent: the plan that this one continues, if only what it adds is to be described.
        num_steps: of the run, if the posted document says it.
    """
    plan, root = bound.plan, bound.plan.root
    # The text of a plan exists already, because its id is made of it; a million ranges have 20 MB.
    shown: dict[str, object] = {"id": plan.id, "plan": Fragment(plan.canonical_json)}
    if root is not plan and parent is None:
        shown["root"] = {"id": root.id, "plan": Fragment(root.canonical_json)}
    shown |= describe(bound, parent)
    if num_steps is not None:
        planned = count_usage(bound.sampler, 0, num_steps, budget).sources
        shown |= {"num_steps": num_steps, "planned": planned}
    return json_response(shown, {}, budget)


def rows_as_text(
    bound: BoundPlan, reading: WindowReading, first_step: int, headers: Mapping[str, str], budget: Budget
) -> Response:
    """Make a response that shows every row as text, below a line that says where it lies."""
    _, rows, _ = reading.shape
    lines: list[str] = []
    number = 0
    for group, borders in reading.pieces():
        numbers = reading.row_numbers(number, len(borders) - 1).tolist()
        for row, (low, high) in zip(numbers, pairwise(borders.tolist()), strict=True):
            pieces = [piece for piece in group[low:high].tolist() if piece[0] != NO_SHARD]
            name, _ = bound.shards[pieces[0][0]]
            places = "; ".join(
                f"shard {bound.shards[shard][1].name}, tokens [{start}, {start + length})"
                for shard, start, length in pieces
            )
            step = first_step + number // rows
            lines.append(f"=== step {step} row {row}: corpus {name}, {places} ===")
            (tokens,) = reading.read(number, 1)
            lines.append(text.decode(bound.corpora[name], tokens.tolist()))
            number += 1
            budget.spend(num_bytes=tokens.nbytes)
    return text_response("\n".join(lines) + "\n", headers, budget)
