"""The plan document: an immutable JSON value, checked when it is made.

A plan's id is the SHA-256 of its canonical JSON, which includes the fingerprints of its corpora and the
version of the arithmetic. Two plans with the same id hold the same tokens in every row of every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import accumulate, pairwise, starmap
from typing import Any, Final, Self, TypeVar

from corpus_server.errors import InvalidParameter, InvalidPlan
from corpus_server.plan.amounts import count_corpora
from corpus_server.plan.canonical import canonical, id_of, parse_json
from corpus_server.plan.declared import (
    Declared,
    Kind,
    Schema,
    choice,
    declared,
    integer,
    ranges,
    shorten,
    texts,
)
from corpus_server.plan.family import FAMILY, Family, check_family
from corpus_server.plan.named import Named
from corpus_server.plan.orders import ORDERS, Order
from corpus_server.plan.ranges import Ranges
from corpus_server.plan.rows import ROWS
from corpus_server.plan.rows.rows import Rows
from corpus_server.plan.stage import MAX_SEQ_LEN, MAX_STEP, Stage
from corpus_server.plan.stage_log import StageLog
from corpus_server.plan.stratified import MIXTURES

S = TypeVar("S", bound=Declared)

VERSIONS: Final = tuple(MIXTURES)
"""Versions of the arithmetic (permutation, draws, quantisation, substitutes) that this release serves.

Tables of golden rows in the tests freeze them. Whoever improves the arithmetic adds a version and keeps the
others: a change within a version would change the rows of running trainings.
"""

SAME: Final = "same"
DIFFER: Final = "differ"

MAX_STRIDE: Final = 2**40
MAX_SEED: Final = 2**64 - 1
MAX_STAGES: Final = 512
"""Of a document. A stage with a mixture takes up to 0.4 ms to bind, and a document may take 0.25 s."""
MAX_STAGE_SOURCES: Final = 2**15
"""Of a document, stages times sources: each stage keeps a position for each source of the plan."""
MAX_ROW_LENGTHS: Final = 16
"""Of a plan with rows that are packed for each: a table for each source takes seconds to build."""
MAX_RANGES_IN_FORCE: Final = 3 * 2**20
"""Excluded ranges in force, summed over the stages that add some: each such stage merges and keeps them
all, at 50 ns and 32 bytes a range."""


def _version(what: str, value: object) -> int:
    # 1.0 == True == 1, but they have other canonical JSON and so another id.
    if type(value) is not int or value not in VERSIONS:
        known = ", ".join(map(str, VERSIONS))
        raise InvalidPlan(
            f"{what} must be a version of the plan arithmetic that this server knows ({known}), "
            f"got {value!r:.200}",
            parameter=what,
            received=value,
            accepted=known,
            remedy="serve the plan with a release that knows its version",
        )
    return value


def stages_of(kind: type[S], what: str, value: object) -> tuple[S, ...]:
    """Return the stages of a document; errors name them by their numbers.

    Raises:
        InvalidPlan: it is no list, or of too many stages or sources, or one of them is wrong.
    """
    if not isinstance(value, list | tuple):
        raise InvalidPlan.expected(what, "a list of objects", value)
    mixtures = (stage.get("mixture") for stage in value if isinstance(stage, Mapping))
    # Before any stage is made: quantising the mixtures of a 30 MB document takes seconds.
    _require_bindable(len(value), sum(map(count_corpora, mixtures)))
    found = []
    for number, each in enumerate(value):
        try:
            found.append(each if isinstance(each, kind) else kind.from_json(each, what=f"{what}[{number}]"))
        except InvalidPlan as error:
            raise error.renamed(f"{what}[]", f"{what}[{number}]") from None
    return tuple(found)


VERSION: Final = Kind({"enum": list(VERSIONS)}, _version)
STAGES: Final = Kind(
    {"type": "array", "minItems": 1, "maxItems": MAX_STAGES, "items": Stage.schema()},
    partial(stages_of, Stage),
)


_STRIDES = "".join(f", with order {each.name} {each.stride}" for each in ORDERS if each.stride is not None)


_OF_STAGES: Final = {
    **dict.fromkeys((*Stage.properties(), "epochs", "tokens", "until"), "it belongs into each of `stages`"),
    "batch_size": "`global_batch_size` of each of `stages` says it",
    "corpus": "`mixture` of each of `stages` says it",
}


class Plan(Declared):
    """A whole plan: which rows every step holds.

    Raises:
        InvalidPlan: a field is outside its range or contradicts another.
    """

    prefix = ""
    elsewhere = _OF_STAGES

    version: int | None = declared(
        VERSION,
        f"Version of the arithmetic; default {VERSIONS[-1]} where a stage mixes sources, else 1: versions "
        "differ in mixtures alone.",
        default=None,
    )
    seq_len: int = declared(integer(1, MAX_SEQ_LEN), "Inputs per row.")
    stride: int | None = declared(
        integer(1, MAX_STRIDE),
        f"Tokens between neighbouring windows; default seq_len{_STRIDES}.",
        default=None,
    )
    seed: int = declared(integer(0, MAX_SEED), "Default 0.", default=0)
    order: Order = declared(ORDERS.kind, f"Default {ORDERS.default}.", default=ORDERS.default)
    rows: Rows = declared(ROWS.kind, f"Default {ROWS.default}.", omit=True, default=ROWS.default)
    stages: Sequence[Stage] = declared(STAGES, "By `from_step`, the first from step 0.")
    skip_steps: Ranges = declared(
        ranges(MAX_STEP), "Plan steps that training never sees; later steps move up.", default_factory=Ranges
    )
    fingerprints: Mapping[str, str] = declared(
        texts("an object that maps corpus names to strings"),
        "By corpus; the server fills in those that are left out.",
        default_factory=dict,
    )
    # Left out where they have their defaults: plans that were made before have the ids that they had.
    family: Family | None = declared(
        FAMILY, "Documents that the plan leaves out, as one of many.", omit=True, default=None
    )
    tokenizers: str = declared(
        choice(SAME, DIFFER),
        f"`{DIFFER}`: the corpora may have different tokenizers. Default {SAME}.",
        omit=True,
        default=SAME,
    )

    def settled(self) -> dict[str, Any]:
        """See `Declared.settled`."""
        starts = [stage.from_step for stage in self.stages]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            accepted = "a list of stages with from_step 0 first, and then larger ones"
            raise InvalidPlan.expected("stages", accepted, starts[:20])
        checked = self.checked_parts(self.stages)
        _require_bindable(len(self.stages), len(self.stages) * len(self.sources))
        for number, stage in enumerate(self.stages):
            self.require_sources(f"stages[{number}].exclude", stage.exclude)
        check_ranges([stage.exclude for stage in checked if stage.exclude])
        self.require_sources("fingerprints", self.fingerprints)
        if self.rows.is_permuted and not permutes(self.order):
            permuting = ", ".join({each.name: 0 for each in ORDERS if permutes(each)})
            accepted = f"an order that permutes rows ({permuting}) with rows {self.rows.name}"
            raise InvalidPlan.expected("order", accepted, self.order.name)
        if self.family is not None:
            check_family(self.order, self.rows, checked)
        self.rows.check(seq_len=self.seq_len, stride=self.stride, stages=self.stages)
        self.lengths_with((), checked)
        order, stride = self.order.settle(
            seq_len=self.seq_len, stride=self.stride, seed=self.seed, stages=self.stages
        )
        # Plans of one source keep the ids that they had before version 2.
        newest = VERSIONS[-1] if any(len(stage.mixture) > 1 for stage in checked) else VERSIONS[0]
        return {"version": self.version or newest, "stages": checked, "order": order, "stride": stride}

    def checked_parts(self, stages: Sequence[Stage]) -> tuple[Stage, ...]:
        """Return stages whose windows fall into rows of their length and whose steps hold whole windows."""
        return tuple(starmap(self._checked_parts, enumerate(stages)))

    def _checked_parts(self, number: int, stage: Stage) -> Stage:
        # One spelling, so that equal plans have one id.
        stage = replace(stage, exclude={name: its for name, its in stage.exclude.items() if its})
        if stage.seq_len is None or stage.seq_len == self.seq_len:
            return replace(stage, seq_len=None)
        num_parts, rest = divmod(self.seq_len, stage.seq_len)
        if rest:
            accepted = f"a divisor of the plan's seq_len {self.seq_len}"
            raise InvalidPlan.expected(f"stages[{number}].seq_len", accepted, stage.seq_len)
        if stage.global_batch_size % num_parts:
            raise InvalidPlan.expected(
                f"stages[{number}].global_batch_size",
                f"a multiple of {num_parts}, the rows of {stage.seq_len} tokens that make one window of "
                f"{self.seq_len}",
                stage.global_batch_size,
            )
        return stage

    def require_sources(self, what: str, named: Mapping[str, object]) -> None:
        """Refuse names of which none is a source of the plan."""
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

    @cached_property
    def row_lengths(self) -> tuple[int, ...]:
        """The `seq_len` of the plan, then those of stages that have rows of their own for it, descending."""
        return self.lengths_with((), self.stages)

    def lengths_with(self, known: Sequence[int], stages: Sequence[Stage]) -> tuple[int, ...]:
        """Return `row_lengths` of a plan that has some already, with those of stages.

        Raises:
            InvalidPlan: there are too many, since each has tables of its own.
        """
        found = {each.seq_len or self.seq_len for each in stages} if self.rows.own_lengths else set()
        lengths = (self.seq_len, *sorted(found.union(known) - {self.seq_len}, reverse=True))
        if len(lengths) > MAX_ROW_LENGTHS:
            accepted = f"of at most {MAX_ROW_LENGTHS} values with the plan's, with rows {self.rows.name}"
            raise InvalidPlan.expected("stages[].seq_len", accepted, lengths)
        return lengths

    @cached_property
    def log(self) -> StageLog:
        """The stages as arrays; plans that continue this one share it."""
        return StageLog(self.stages, seq_len=self.seq_len)

    @property
    def root(self) -> Plan:
        """The plan that this one continues, over any number of plans between the two; or itself."""
        return self

    @property
    def arithmetic(self) -> dict[str, Any]:
        """What decides the rows of all stages alike: fields by name."""
        fields_alike = {name: getattr(self, name) for name in ("version", "seq_len", "stride", "seed")}
        family = {} if self.family is None else {"family": self.family.to_json()}
        return {**fields_alike, "order": self.order.to_json(), "rows": self.rows.to_json(), **family}

    @property
    def tabled(self) -> Named | None:
        """What follows from tables: the rows or the order, if one does."""
        return next((each for each in (self.rows, self.order) if each.has_table), None)

    @property
    def digests(self) -> Mapping[str, str]:
        """Digests of the documents' lengths by corpus, of a plan whose rows follow from tables."""
        return {} if self.tabled is None else self.tabled.digests

    def with_digests(self, digests: Mapping[str, str]) -> Self:
        """Return the plan with digests of its documents' lengths."""
        return self.changed(**self._with_digests(digests))

    def _with_digests(self, digests: Mapping[str, str]) -> dict[str, Named]:
        named = (("rows", self.rows), ("order", self.order))
        return {name: each.with_digests(digests) for name, each in named if each is self.tabled}

    @cached_property
    def id(self) -> str:
        """SHA-256 of the canonical JSON: 64 hex digits. Only a bound plan has one."""
        self.require_fingerprints()
        return id_of(self.canonical_json)

    def require_fingerprints(self) -> None:
        """Refuse a plan that is not bound to the fingerprints of all its corpora."""
        if set(self.fingerprints) != set(self.sources):
            raise InvalidPlan("only a plan bound to its corpora's fingerprints has an id")

    def bind(self, fingerprints: Mapping[str, str]) -> Self:
        """Return the same plan with the fingerprints of its corpora."""
        if fingerprints == self.fingerprints:
            return self
        plan = self.changed(fingerprints=dict(fingerprints))
        plan.__dict__["filled_in"] = frozenset(fingerprints) - frozenset(self.fingerprints)
        return plan

    @cached_property
    def filled_in(self) -> frozenset[str]:
        """The sources whose fingerprints its document did not say; none of a plan that was made before."""
        return frozenset()

    def changed(self, **changes: Any) -> Self:
        """Return the plan with other fields."""
        return replace(self, **changes)

    @cached_property
    def canonical_json(self) -> str:
        """The JSON text that is hashed for the id: sorted keys, no spaces, ASCII."""
        return canonical(self.to_json(spell=lambda ranges: ranges))

    @classmethod
    def parse(cls, text: str | bytes | bytearray) -> Plan:
        """Read a plan document as JSON text.

        Raises:
            InvalidPlan: the text is not JSON, an object has a field twice, or it is not a plan.
        """
        return parse_json(text, cls.from_json)

    @classmethod
    def spelled(cls, spelling: Mapping[str, Any]) -> Plan:
        """Make the plan of one source that parameters spell; each is one of `INLINE_PLAN`.

        Raises:
            InvalidParameter: a parameter without a default is missing, or parameters contradict each other.
            InvalidPlan: a value is outside its range.
        """
        if missing := [name for name in ("corpus", "seq_len", "batch_size") if name not in spelling]:
            raise InvalidParameter(
                f"{', '.join(missing)} missing",
                parameter=missing[0],
                remedy="name a plan with plan=ID, or spell one with corpus, seq_len and batch_size",
            )
        named = {name: spelling[name] for name in ("seq_len", "stride", "seed") if name in spelling}
        given, laid = (
            {name: spelling[name] for name in fields if name in spelling}
            for fields in (ORDERS.inline_fields, ROWS.inline_fields)
        )
        stage = Stage(global_batch_size=spelling["batch_size"], mixture={spelling["corpus"]: 1.0})
        order = ORDERS.spelled(spelling.get("order"), given)
        rows = ROWS.spelled(spelling.get("rows"), laid)
        return cls(order=order, rows=rows, stages=(stage,), **named)


_PLAN: Final = Plan.properties()

INLINE_PLAN: Final[Mapping[str, Schema]] = {
    "corpus": {"type": "string", "maxLength": 128, "description": "Corpus name."},
    "seq_len": _PLAN["seq_len"],
    "batch_size": Stage.properties()["global_batch_size"],
    "seed": _PLAN["seed"],
    "order": {"enum": list(ORDERS.inline), "description": _PLAN["order"]["description"]},
    **ORDERS.inline_fields,
    "stride": _PLAN["stride"],
    "rows": {"enum": list(ROWS.inline), "description": _PLAN["rows"]["description"]},
    **ROWS.inline_fields,
}
"""Schemas of the parameters that spell a plan of one source in a query."""


def permutes(order: Order | type[Order]) -> bool:
    """Tell whether an order permutes rows by their numbers alone, each once in an epoch."""
    return order.has_epochs and not order.has_table


def check_ranges(excludes: Sequence[Mapping[str, Ranges]]) -> None:
    """Refuse more ranges, of the stages that exclude some, than can be kept.

    Raises:
        InvalidPlan: a stage that excludes something repeats what was excluded before.
    """
    counts = [sum(len(its.starts) for its in exclude.values()) for exclude in excludes]
    if (total := sum(accumulate(counts))) > MAX_RANGES_IN_FORCE:
        accepted = f"at most {MAX_RANGES_IN_FORCE} ranges summed over the stages that add some"
        remedy = "exclude the ranges in fewer stages, or join neighbouring ranges"
        raise InvalidPlan.expected("stages[].exclude", accepted, total, remedy=remedy)


def _require_bindable(num_stages: int, num_named: int) -> None:
    """Refuse a plan that would take long to bind; `num_named` are stages times sources, or less."""
    for what, number, limit in (
        ("stages", num_stages, MAX_STAGES),
        ("stages times the sources that any of them uses", num_named, MAX_STAGE_SOURCES),
    ):
        if number > limit:
            raise InvalidPlan(
                f"a plan may have at most {limit} {what}, got {number}",
                parameter="stages",
                received=number,
                accepted=f"at most {limit}",
                remedy="join neighbouring stages; exclusions of several stages may stand in one",
            )
