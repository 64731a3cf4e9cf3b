"""The plan document: a small immutable JSON value, checked when it is made.

A plan's id is the SHA-256 of its canonical JSON, the fingerprints of its corpora included: two
plans with the same id hold the same tokens in every row of every step.
"""

from __future__ import annotations

import difflib
import gc
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, get_args

from corpus_server.errors import InvalidPlan
from corpus_server.plan.mixture import BLOCK_ROWS, quantise
from corpus_server.plan.ranges import Ranges, ranges_from_json

Order = Literal["shuffle", "sequential", "random"]
ORDERS: tuple[Order, ...] = get_args(Order)

MAX_SEQ_LEN = 2**20
MAX_STRIDE = 2**40
MAX_GLOBAL_BATCH_SIZE = 2**20
MAX_STEP = 2**40
"""With MAX_GLOBAL_BATCH_SIZE it keeps every position below 2^61, inside uint64 arithmetic."""
MAX_SEED = 2**64 - 1
MAX_SOURCES = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What holds from a plan step on.

    Args:
        from_step: first plan step of the stage.
        global_batch_size: rows of a step over all ranks.
        mixture: weight of each source (corpus name), any positive numbers; kept as exact multiples of
            1/65536 that sum to 1, in sorted order of the names.
        exclude: tokens, corpus-wide, that no row may hold from this stage on.
    """

    from_step: int = 0
    global_batch_size: int
    mixture: Mapping[str, float]
    exclude: Mapping[str, Ranges] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_int("stages[].from_step", self.from_step, 0, MAX_STEP)
        _require_int("stages[].global_batch_size", self.global_batch_size, 1, MAX_GLOBAL_BATCH_SIZE)
        if not isinstance(self.mixture, Mapping) or not 1 <= len(self.mixture) <= MAX_SOURCES:
            raise InvalidPlan(
                f"stages[].mixture must map 1 to {MAX_SOURCES} corpus names to weights, "
                f'like {{"web": 0.7, "code": 0.3}}, got {self.mixture!r:.200}',
                parameter="stages[].mixture",
                received=self.mixture,
                accepted="an object of corpus names and weights",
            )
        for name, weight in self.mixture.items():
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not 0 < weight < float("inf")
            ):
                raise InvalidPlan(
                    f"stages[].mixture.{name} must be a positive number, got {weight!r}",
                    parameter=f"stages[].mixture.{name}",
                    received=weight,
                    accepted="a finite number above 0; leave a source out instead of giving it 0",
                )
        # Copies: whoever passed the mappings may still change them, and the plan's id must not. Units
        # are exact in binary, so that quantising them again changes nothing.
        units = quantise(self.mixture)
        object.__setattr__(self, "mixture", {name: share / BLOCK_ROWS for name, share in units.items()})
        object.__setattr__(
            self, "exclude", {k: self.exclude[k] for k in sorted(self.exclude) if self.exclude[k]}
        )

    @property
    def units(self) -> dict[str, int]:
        """Units of 1/65536 by name, sorted by name."""
        return {name: round(weight * BLOCK_ROWS) for name, weight in self.mixture.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the stage's canonical JSON object."""
        document: dict[str, Any] = {
            "from_step": self.from_step,
            "global_batch_size": self.global_batch_size,
            "mixture": dict(self.mixture),
        }
        if self.exclude:
            document["exclude"] = {name: ranges.to_json() for name, ranges in self.exclude.items()}
        return document

    def canonical_json(self) -> str:
        """Return `to_json` in the one spelling that a plan's id is made of."""
        rest = _dump(
            {
                "from_step": self.from_step,
                "global_batch_size": self.global_batch_size,
                "mixture": dict(self.mixture),
            }
        )
        if not self.exclude:
            return rest
        exclude = ",".join(f"{_dump(name)}:{ranges.to_json_text()}" for name, ranges in self.exclude.items())
        return f'{{"exclude":{{{exclude}}},{rest[1:]}'


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole plan; see the module.

    Args:
        seq_len: inputs per row; a window is one token longer.
        stride: tokens between neighbouring windows; default `seq_len`, for order `random` always 1.
        seed: in [0, 2^64).
        order: `shuffle`, `sequential` or `random`.
        stages: ordered by `from_step`, the first from step 0.
        skip_steps: plan steps that training never sees; later steps move up.
        fingerprints: content identity by corpus name; empty until the plan is bound.

    Raises:
        InvalidPlan: a field is outside its range or contradicts another.
    """

    seq_len: int
    stride: int | None = None
    seed: int = 0
    order: Order = "shuffle"
    stages: tuple[Stage, ...]
    skip_steps: Ranges = field(default_factory=Ranges)
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_int("seq_len", self.seq_len, 1, MAX_SEQ_LEN)
        _require_int("seed", self.seed, 0, MAX_SEED)
        if self.order not in ORDERS:
            raise InvalidPlan(
                f"order must be one of {', '.join(ORDERS)}, got {self.order!r}",
                parameter="order",
                received=self.order,
                accepted=", ".join(ORDERS),
            )
        if self.stride is None:
            object.__setattr__(self, "stride", 1 if self.order == "random" else self.seq_len)
        _require_int("stride", self.stride, 1, MAX_STRIDE)
        if self.order == "random" and self.stride != 1:
            raise InvalidPlan(
                f"stride must be 1 or left out with order 'random', got {self.stride}",
                parameter="stride",
                received=self.stride,
                accepted="1",
            )
        starts = [stage.from_step for stage in self.stages]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise InvalidPlan(
                f"stages must begin with from_step 0 and go on with larger ones, got {starts[:20]}",
                parameter="stages",
                received=starts[:20],
                accepted="from_step 0, then strictly increasing",
            )
        for number, stage in enumerate(self.stages):
            if strangers := sorted(set(stage.exclude) - set(self.sources)):
                raise InvalidPlan(
                    f"stages[{number}].exclude names {strangers}, which no mixture of the plan uses",
                    parameter=f"stages[{number}].exclude",
                    received=strangers,
                    accepted=", ".join(self.sources),
                )
        unknown = set(self.fingerprints) - set(self.sources)
        if unknown:
            raise InvalidPlan(
                f"fingerprints names {sorted(unknown)}, which no mixture of the plan uses",
                parameter="fingerprints",
                received=sorted(unknown),
                accepted=", ".join(self.sources),
            )

    @property
    def sources(self) -> tuple[str, ...]:
        """Corpus names in order of first use; their shards, in this order, are the plan's shard list."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.mixture))

    @cached_property
    def id(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits; only a bound plan has one."""
        if set(self.fingerprints) != set(self.sources):
            raise InvalidPlan("only a plan bound to its corpora's fingerprints has an id")
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()

    def bind(self, fingerprints: Mapping[str, str]) -> Plan:
        """Return the plan bound to the content it was made for."""
        return replace(self, fingerprints=dict(fingerprints))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; `from_json` makes an equal plan of it."""
        return {
            "seq_len": self.seq_len,
            "stride": self.stride,
            "seed": self.seed,
            "order": self.order,
            "stages": [stage.to_json() for stage in self.stages],
            "skip_steps": self.skip_steps.to_json(),
            "fingerprints": dict(self.fingerprints),
        }

    def canonical_json(self) -> str:
        """Return the one spelling that the id is made of: sorted keys, no spaces, ASCII."""
        return self._canonical_json

    @cached_property
    def _canonical_json(self) -> str:
        # As json.dumps(self.to_json(), sort_keys=True, separators=(",", ":")) spells it, but for the
        # ranges, which may be millions, no list is made.
        head = _dump(
            {
                "fingerprints": dict(self.fingerprints),
                "order": self.order,
                "seed": self.seed,
                "seq_len": self.seq_len,
            }
        )
        stages = ",".join(stage.canonical_json() for stage in self.stages)
        skips = self.skip_steps.to_json_text()
        return f'{head[:-1]},"skip_steps":{skips},"stages":[{stages}],"stride":{self.stride}}}'

    @classmethod
    def parse(cls, text: str | bytes | bytearray) -> Plan:
        """Read a plan document as JSON text.

        Raises:
            InvalidPlan: it is no JSON, a field stands in it twice, or the document is none of a plan.
        """
        with _without_collector():
            try:
                document = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_once_each)
            except (ValueError, RecursionError) as error:
                raise InvalidPlan(f"the body must be a plan document in JSON: {error}") from error
            return cls.from_json(document)

    @classmethod
    def from_json(cls, document: object) -> Plan:
        """Check a parsed JSON document and make a plan of it.

        Raises:
            InvalidPlan: naming the field, the value and what is accepted.
        """
        names = {f.name for f in fields(cls)}
        checked = _require_object("plan", document, names, required={"seq_len", "stages"})
        stages = checked.pop("stages")
        if not isinstance(stages, Sequence) or isinstance(stages, str):
            raise InvalidPlan(f"stages must be a list of objects, got {stages!r}", parameter="stages")
        fingerprints = checked.pop("fingerprints", None) or {}
        if not isinstance(fingerprints, Mapping) or not all(
            isinstance(v, str) for v in fingerprints.values()
        ):
            raise InvalidPlan("fingerprints must map corpus names to strings", parameter="fingerprints")
        return cls(
            stages=tuple(_stage_from_json(number, stage) for number, stage in enumerate(stages)),
            skip_steps=ranges_from_json("skip_steps", checked.pop("skip_steps", []), limit=MAX_STEP),
            fingerprints=dict(fingerprints),
            **checked,
        )


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the garbage collector: a million small lists would make it look at all of them many times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is given twice")
    return fields


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _stage_from_json(number: int, document: object) -> Stage:
    what = f"stages[{number}]"
    names = {f.name for f in fields(Stage)}
    checked = _require_object(what, document, names, required={"global_batch_size", "mixture"})
    exclude = checked.pop("exclude", None) or {}
    if not isinstance(exclude, Mapping):
        raise InvalidPlan(f"{what}.exclude must map corpus names to ranges", parameter=f"{what}.exclude")
    ranges = {name: ranges_from_json(f"{what}.exclude.{name}", value) for name, value in exclude.items()}
    return Stage(**checked, exclude=ranges)


def _require_object(what: str, document: object, names: set[str], *, required: set[str]) -> dict[str, Any]:
    if not isinstance(document, Mapping):
        raise InvalidPlan(f"{what} must be a JSON object, got {type(document).__name__}", parameter=what)
    for name in document:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, n=1)
            raise InvalidPlan(
                f"{what} has an unknown field {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""),
                parameter=str(name),
                accepted=", ".join(sorted(names)),
            )
    if missing := required - set(document):
        raise InvalidPlan(f"{what} lacks {', '.join(sorted(missing))}", parameter=min(missing))
    return dict(document)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidPlan(
            f"{name} must be an integer in [{low}, {high}], got {value!r}",
            parameter=name,
            received=value,
            accepted=f"integer in [{low}, {high}]",
        )
