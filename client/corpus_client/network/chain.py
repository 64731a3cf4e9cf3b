"""The decisions of a run that was extended, as a client keeps and posts them; no I/O.

A decision is a stage that was added to a plan. It is a line of JSON: where only the weights of sources that
the plan has change, the plan step from which it holds and the units of each source, of 65,536:

    [1200,45875,19661]
    [1300,40000,20000,5536]        a third source, which an earlier line has named

Any other decision is a stage as a plan's document has it, with the fingerprints of sources that it adds. A
server takes decisions in parts: a few hundred together, behind the id of the plan that they continue.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

DECISIONS = "decisions"
"""Field of a whole plan, beside those of the document that was extended."""

MAX_DECISIONS = 256
MAX_WEIGHTS = 12_000
"""Of a part, with all other numbers: a server takes two parts that become one, and a line beyond."""

Shape = tuple[int, int]
"""Rows of a step over all ranks, inputs of a row."""


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring decisions.

    parent: id of the plan that they continue.
    shape: of the steps before the first one.
    """

    parent: str
    shape: Shape
    lines: tuple[str, ...]

    @property
    def is_full(self) -> bool:
        """Return whether the next decision begins another part."""
        return len(self.lines) >= MAX_DECISIONS or _num_weights(self.lines) >= MAX_WEIGHTS


Chain = tuple[Part, ...]


def appended(chain: Chain, part: Part) -> Chain:
    """Return a chain with more decisions."""
    if chain and not chain[-1].is_full:
        return (*chain[:-1], replace(chain[-1], lines=chain[-1].lines + part.lines))
    return (*chain, part)


def split(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the document of a plan without its decisions, and these line by line."""
    lines = document.get(DECISIONS, "")
    if not isinstance(lines, str):
        raise ValueError(f"{DECISIONS} must be lines of JSON in one text, got a {type(lines).__name__}")
    return {name: value for name, value in document.items() if name != DECISIONS}, lines.splitlines()


def parts_of(lines: Sequence[str]) -> Iterator[list[str]]:
    """Yield lines as they are posted together."""
    part: list[str] = []
    for line in lines:
        part.append(line)
        if len(part) >= MAX_DECISIONS or _num_weights(part) >= MAX_WEIGHTS:
            yield part
            part = []
    if part:
        yield part


def posted(part: Part, sources: Sequence[str], seq_len: int) -> dict[str, Any]:
    """Return the document that a server takes.

    Args:
        sources: of the plan, as lines number them; those that the lines add may be missing.
        seq_len: of the plan.
    """
    names, (size, row_inputs), stages = list(sources), part.shape, []
    more: dict[str, dict[str, str]] = {"fingerprints": {}, "lengths": {}}
    for line in part.lines:
        found = json.loads(line)
        if isinstance(found, list):
            from_step, *units = found
            stage = {"from_step": from_step, "global_batch_size": size}
            stage |= {} if row_inputs == seq_len else {"seq_len": row_inputs}
            stage["mixture"] = {name: each for name, each in zip(names, units, strict=False) if each}
        else:
            for field, given in more.items():
                given |= found.pop(field, {})
            stage = found
            size, row_inputs = stage["global_batch_size"], stage.get("seq_len") or seq_len
            names += [name for name in sorted(stage["mixture"]) if name not in names]
        stages.append(stage)
    return {"parent": part.parent, "stages": stages, **{field: its for field, its in more.items() if its}}


def line_of(
    stage: Mapping[str, Any],
    units: Mapping[str, int],
    shape: Shape,
    before: Shape,
    sources: Sequence[str],
    more: Mapping[str, Mapping[str, str]],
) -> str:
    """Return the line of a decision.

    Args:
        stage: as it was posted.
        units: of its sources, as the server says.
        shape, before: of its steps, and of those before it.
        sources: of the plan before it.
        more: fingerprints, and digests of documents, of sources that it adds.
    """
    excluded = {name: its for name, its in (stage.get("exclude") or {}).items() if its}
    exclude = {"exclude": excluded} if excluded else {}
    if shape == before and not exclude and set(units) <= set(sources):
        last = max(number for number, name in enumerate(sources) if name in units)
        return _text([stage["from_step"], *(units.get(name, 0) for name in sources[: last + 1])])
    size, seq_len = shape
    whole = {"from_step": stage["from_step"], "global_batch_size": size, "seq_len": seq_len}
    return _text({**whole, "mixture": units, **exclude, **{name: its for name, its in more.items() if its}})


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _num_weights(lines: Iterable[str]) -> int:
    return sum(line.count(",") for line in lines)
