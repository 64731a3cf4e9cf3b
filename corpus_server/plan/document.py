"""The plan document: an immutable JSON value, checked when it is made.

A plan's id is the SHA-256 of its canonical JSON, which includes the fingerprints of its corpora and the
version of the arithmetic. Two plans with the same id hold the same tokens in every row of every step.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, Final

from corpus_server.errors import InvalidPlan
from corpus_server.plan.checking import require_fields, require_int, shorten
from corpus_server.plan.mixture import BLOCK_ROWS, quantise
from corpus_server.plan.orders import (
    ORDERS,
    ORDERS_ACCEPTED,
    BoundedShuffle,
    MegatronOrder,
    Order,
    order_from_json,
)
from corpus_server.plan.ranges import Ranges, ranges_from_json

VERSIONS: Final = (1,)
"""Versions of the arithmetic (permutation, draws, quantisation, substitutes) that this release serves.

A table of golden rows in the tests freezes version 1. Whoever improves the arithmetic adds version 2 and
keeps version 1: a change within a version would change the rows of running trainings.
"""

MAX_SEQ_LEN: Final = 2**20
MAX_STRIDE: Final = 2**40
MAX_GLOBAL_BATCH_SIZE: Final = 2**20
MAX_STEP: Final = 2**40
"""With MAX_GLOBAL_BATCH_SIZE it keeps every position below 2^61, inside uint64 arithmetic."""
MAX_SEED: Final = 2**64 - 1
MAX_SOURCES: Final = 1024
MAX_STAGES: Final = 512
"""A stage with a mixture takes up to 0.4 ms to bind, and a plan may take 0.25 s."""
MAX_STAGE_SOURCES: Final = 2**15
"""Stages times sources: each stage keeps a position for each source of the plan."""
MAX_RANGES_IN_FORCE: Final = 3 * 2**20
"""Excluded ranges in force, summed over the stages that add some: each such stage merges and keeps them
all, at 50 ns and 32 bytes a range."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A part of a plan with its own batch size, mixture and exclusions.

    The weights of the mixture may be any positive numbers. The stage keeps them as exact multiples of 1/65536
    that sum to 1, sorted by corpus name.
    """

    from_step: int = 0  # a plan step
    global_batch_size: int  # rows of a step over all ranks
    mixture: Mapping[str, float]
    seq_len: int | None = None  # inputs per row; None: the plan's, of which it is a divisor
    exclude: Mapping[str, Ranges] = field(default_factory=dict)  # corpus-wide tokens, in later stages, too

    def __post_init__(self) -> None:
        require_int("stages[].from_step", self.from_step, 0, MAX_STEP)
        require_int("stages[].global_batch_size", self.global_batch_size, 1, MAX_GLOBAL_BATCH_SIZE)
        if self.seq_len is not None:
            require_int("stages[].seq_len", self.seq_len, 1, MAX_SEQ_LEN)
        if not isinstance(self.mixture, Mapping) or not 1 <= len(self.mixture) <= MAX_SOURCES:
            accepted = f'an object of 1 to {MAX_SOURCES} corpus names and weights, like {{"web": 0.7}}'
            raise InvalidPlan.expected("stages[].mixture", accepted, self.mixture)
        for name, weight in self.mixture.items():
            if not isinstance(weight, int | float) or weight is True or not 0 < weight < inf:
                remedy = "leave a source out instead of giving it 0"
                raise InvalidPlan.expected(
                    f"stages[].mixture.{name}", "a positive number", weight, remedy=remedy
                )
        # Copies, because the caller may still change the mappings and the plan's id must not change.
        # Multiples of 1/65536 are exact floats, so quantising them again changes nothing.
        units = quantise(self.mixture)
        object.__setattr__(self, "mixture", {name: share / BLOCK_ROWS for name, share in units.items()})
        exclude = {name: ranges for name, ranges in sorted(self.exclude.items()) if ranges}
        object.__setattr__(self, "exclude", exclude)

    @property
    def units(self) -> dict[str, int]:
        """Units of 1/65536 by name, sorted by name."""
        return {name: round(weight * BLOCK_ROWS) for name, weight in self.mixture.items()}

    def to_json(self, spell: Callable[[Ranges], Any] = Ranges.to_json) -> dict[str, Any]:
        """Return the stage's canonical JSON object, its ranges as `spell` makes them."""
        document: dict[str, Any] = {
            "from_step": self.from_step,
            "global_batch_size": self.global_batch_size,
            "mixture": dict(self.mixture),
        }
        if self.seq_len is not None:
            document["seq_len"] = self.seq_len
        if self.exclude:
            document["exclude"] = {name: spell(ranges) for name, ranges in self.exclude.items()}
        return document


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole plan: which windows every row of every step holds.

    Raises:
        InvalidPlan: a field is outside its range or contradicts another.
    """

    version: int = VERSIONS[-1]  # of the arithmetic
    seq_len: int  # inputs per row; a window is one token longer
    stride: int | None = None  # tokens between neighbouring windows; default `seq_len`, always 1 if random
    seed: int = 0  # in [0, 2^64)
    order: Order | BoundedShuffle | MegatronOrder = "shuffle"
    stages: tuple[Stage, ...]  # by `from_step`, the first from step 0
    skip_steps: Ranges = field(default_factory=Ranges)  # never seen by training; later steps move up
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # by corpus; empty until the plan is bound

    def __post_init__(self) -> None:
        # 1.0 == True == 1, but they have other canonical JSON and so another id.
        if type(self.version) is not int or self.version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            raise InvalidPlan(
                f"version must be a version of the plan arithmetic that this server knows ({known}), "
                f"got {self.version!r:.200}",
                parameter="version",
                received=self.version,
                accepted=known,
                remedy="serve the plan with a release that knows its version",
            )
        require_int("seq_len", self.seq_len, 1, MAX_SEQ_LEN)
        require_int("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.order, BoundedShuffle | MegatronOrder) and self.order not in ORDERS:
            raise InvalidPlan.expected("order", ORDERS_ACCEPTED, self.order)
        if self.stride is None:
            object.__setattr__(self, "stride", 1 if self.order == "random" else self.seq_len)
        require_int("stride", self.stride, 1, MAX_STRIDE)
        if self.order == "random" and self.stride != 1:
            raise InvalidPlan.expected("stride", "1 or left out with order 'random'", self.stride)
        starts = [stage.from_step for stage in self.stages]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            accepted = "a list of stages with from_step 0 first, and then larger ones"
            raise InvalidPlan.expected("stages", accepted, starts[:20])
        object.__setattr__(self, "stages", tuple(map(self._checked_parts, self.stages)))
        _require_bindable(len(self.stages), len(self.stages) * len(self.sources))
        in_force = total = 0
        for number, stage in enumerate(self.stages):
            self._require_sources(f"stages[{number}].exclude", stage.exclude)
            if stage.exclude:
                in_force += sum(len(ranges.starts) for ranges in stage.exclude.values())
                total += in_force
        if total > MAX_RANGES_IN_FORCE:
            # A stage that excludes something repeats what was excluded before.
            accepted = f"at most {MAX_RANGES_IN_FORCE} ranges summed over the stages that add some"
            remedy = "exclude the ranges in fewer stages, or join neighbouring ranges"
            raise InvalidPlan.expected("stages[].exclude", accepted, total, remedy=remedy)
        self._require_sources("fingerprints", self.fingerprints)
        if isinstance(self.order, MegatronOrder):
            object.__setattr__(self, "order", self._checked_blend(self.order))

    def _checked_blend(self, order: MegatronOrder) -> MegatronOrder:
        """Check what Megatron's order cannot carry, and that mixtures say what its blend says."""
        require_int("seed", self.seed, 0, 2**32 - 1)  # NumPy's RandomState takes no other
        if self.stride != self.seq_len:
            accepted = f"left out or seq_len ({self.seq_len}) with order megatron"
            raise InvalidPlan.expected("stride", accepted, self.stride)
        if not order.blend and len(self.sources) > 1:
            accepted = "the corpora in the order of Megatron's blend, which decides the rows"
            raise InvalidPlan.expected("order.megatron.blend", accepted, [])
        order = replace(order, blend=order.blend or self.sources)
        shares = quantise(dict(zip(order.blend, order.weights or (1.0,), strict=True)))
        for number, stage in enumerate(self.stages):
            if stage.units != shares:
                accepted = f"the weights of order.megatron, which hold for the whole run: {shares} of 65536"
                raise InvalidPlan.expected(f"stages[{number}].mixture", accepted, stage.units)
            for name, value in (("seq_len", stage.seq_len), ("exclude", stage.exclude)):
                if value:
                    raise InvalidPlan(
                        f"stages[{number}].{name} cannot be carried by order megatron: Megatron's samples "
                        "have one length, and none has a substitute; leave it out, or use order shuffle",
                        parameter=f"stages[{number}].{name}",
                    )
        return order

    def _checked_parts(self, stage: Stage) -> Stage:
        """Check that windows fall into rows of a stage's length and that a step holds whole windows."""
        if stage.seq_len is None or stage.seq_len == self.seq_len:
            return replace(stage, seq_len=None)  # one spelling, so that equal plans have one id
        num_parts, rest = divmod(self.seq_len, stage.seq_len)
        if rest:
            accepted = f"a divisor of the plan's seq_len {self.seq_len}"
            raise InvalidPlan.expected("stages[].seq_len", accepted, stage.seq_len)
        if stage.global_batch_size % num_parts:
            raise InvalidPlan.expected(
                "stages[].global_batch_size",
                f"a multiple of {num_parts}, the rows of {stage.seq_len} tokens that make one window of "
                f"{self.seq_len}",
                stage.global_batch_size,
            )
        return stage

    def _require_sources(self, what: str, named: Mapping[str, object]) -> None:
        if strangers := sorted(set(named) - set(self.sources)):
            raise InvalidPlan(
                f"{what} names {shorten(strangers)}, which no mixture of the plan uses",
                parameter=what,
                received=strangers,
                accepted=", ".join(self.sources),
            )

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Corpus names in order of first use. Their shards, in this order, are the plan's shard list."""
        return tuple(dict.fromkeys(name for stage in self.stages for name in stage.mixture))

    @property
    def arithmetic(self) -> dict[str, Any]:
        """What decides the rows of all stages alike: fields by name."""
        fields_alike = {name: getattr(self, name) for name in ("version", "seq_len", "stride", "seed")}
        order = self.order if isinstance(self.order, str) else self.order.to_json()
        return {**fields_alike, "order": order}

    @cached_property
    def id(self) -> str:
        """SHA-256 of the canonical JSON: 64 hex digits. Only a bound plan has one."""
        if set(self.fingerprints) != set(self.sources):
            raise InvalidPlan("only a plan bound to its corpora's fingerprints has an id")
        return hashlib.sha256(self.canonical_json.encode()).hexdigest()

    def bind(self, fingerprints: Mapping[str, str]) -> Plan:
        """Return the same plan with the fingerprints of its corpora."""
        return replace(self, fingerprints=dict(fingerprints))

    def to_json(self, spell: Callable[[Ranges], Any] = Ranges.to_json) -> dict[str, Any]:
        """Return the plan as a JSON object, from which `from_json` makes an equal plan."""
        return {
            **self.arithmetic,
            "stages": [stage.to_json(spell) for stage in self.stages],
            "skip_steps": spell(self.skip_steps),
            "fingerprints": dict(self.fingerprints),
        }

    @cached_property
    def canonical_json(self) -> str:
        """The JSON text that is hashed for the id: sorted keys, no spaces, ASCII."""
        return _canonical(self.to_json(spell=lambda ranges: ranges))

    @classmethod
    def parse(cls, text: str | bytes | bytearray) -> Plan:
        """Read a plan document as JSON text.

        Raises:
            InvalidPlan: the text is not JSON, an object has a field twice, or it is not a plan.
        """
        was_enabled = gc.isenabled()
        gc.disable()  # it would visit each of a million small lists many times
        try:
            document = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_once_each)
            return cls.from_json(document)
        except (ValueError, RecursionError) as error:
            raise InvalidPlan(f"the body must be a plan document in JSON: {error}") from error
        finally:
            if was_enabled:
                gc.enable()

    @classmethod
    def from_json(cls, document: object) -> Plan:
        """Make a plan from a parsed JSON document.

        Raises:
            InvalidPlan: the document is not a plan; names the field.
        """
        checked = require_fields("plan", cls, document, required={"seq_len", "stages"})
        if isinstance(checked.get("order"), Mapping):
            checked["order"] = order_from_json(checked["order"])
        stages = checked.pop("stages")
        if not isinstance(stages, Sequence) or isinstance(stages, str):
            raise InvalidPlan.expected("stages", "a list of objects", stages)
        mixtures = [stage.get("mixture") for stage in stages if isinstance(stage, Mapping)]
        # Before any stage is made: quantising the mixtures of a 30 MB document takes seconds.
        _require_bindable(len(stages), sum(len(each) for each in mixtures if isinstance(each, Mapping)))
        fingerprints = checked.pop("fingerprints", None) or {}
        if not isinstance(fingerprints, Mapping) or any(type(v) is not str for v in fingerprints.values()):
            raise InvalidPlan("fingerprints must map corpus names to strings", parameter="fingerprints")
        return cls(
            stages=tuple(_stage_from_json(number, stage) for number, stage in enumerate(stages)),
            skip_steps=ranges_from_json("skip_steps", checked.pop("skip_steps", []), limit=MAX_STEP),
            fingerprints=dict(fingerprints),
            **checked,
        )


def _canonical(value: object) -> str:
    """Spell a value with sorted keys and no spaces; no list is made of ranges, which may be millions."""
    if isinstance(value, Ranges):
        return value.to_json_text()
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    if isinstance(value, dict) and any(isinstance(each, Ranges | dict | list) for each in value.values()):
        members = (f"{json.dumps(name)}:{_canonical(value[name])}" for name in sorted(value))
        return f"{{{','.join(members)}}}"
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shorten(name)} is given twice")
    return fields


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _stage_from_json(number: int, document: object) -> Stage:
    what = f"stages[{number}]"
    checked = require_fields(what, Stage, document, required={"global_batch_size", "mixture"})
    exclude = checked.pop("exclude", None) or {}
    if not isinstance(exclude, Mapping):
        raise InvalidPlan(f"{what}.exclude must map corpus names to ranges", parameter=f"{what}.exclude")
    ranges = {name: ranges_from_json(f"{what}.exclude.{name}", value) for name, value in exclude.items()}
    return Stage(**checked, exclude=ranges)


def _require_bindable(num_stages: int, num_named: int) -> None:
    """Refuse a plan that would take long to bind; `num_named` are stages times sources, or less."""
    for what, number, limit in (
        ("stages", num_stages, MAX_STAGES),
        ("stages times sources", num_named, MAX_STAGE_SOURCES),
    ):
        if number > limit:
            raise InvalidPlan(
                f"a plan may have at most {limit} {what}, got {number}",
                parameter="stages",
                received=number,
                accepted=f"at most {limit}",
                remedy="join neighbouring stages; exclusions of several stages may stand in one",
            )
