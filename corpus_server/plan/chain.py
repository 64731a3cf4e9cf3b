"""Plans that continue other plans: a chain of stages, each of which has an id of its own.

    {"parent": "<id of a plan>", "stages": [{"from_step": 1200, "global_batch_size": 512, "mixture": {...}}]}

A run whose mixture follows its losses decides again and again. Each decision is a *link*: one stage, and the
id of the plan before it. The link's id is the SHA-256 of its canonical JSON, and stands for all that comes
before it too, so that appending changes nothing before. A document with several stages is as many links: how
decisions were put together when they were posted does not show in any id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self

import orjson

from corpus_server.errors import InvalidPlan
from corpus_server.plan.canonical import canonical, id_of, parse_json
from corpus_server.plan.declared import Declared, checked, declared, shorten, texts
from corpus_server.plan.document import (
    MAX_STAGES,
    STAGES,
    VERSION,
    Plan,
    check_ranges,
)
from corpus_server.plan.draft import Draft
from corpus_server.plan.family import check_family
from corpus_server.plan.ranges import ranges_from_json
from corpus_server.plan.stage import Stage
from corpus_server.plan.stage_log import Made

MAX_CHAIN_STAGES: Final = 100_000
MAX_CHAIN_WEIGHTS: Final = 6_400_000
"""Stages times sources, which have 12 bytes each in memory."""

_ID: Final = checked(
    {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    "the id of a plan, 64 hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
)
_TEXTS: Final = texts("an object that maps corpus names to strings")


class KeptLink(NamedTuple):
    """A link whose document was checked before."""

    id: str
    document: str  # canonical JSON


class Link(Declared):
    """What continues a plan: later stages.

    Raises:
        InvalidPlan: a field is outside its range.
    """

    prefix = ""

    version: int | None = declared(VERSION, "Of the arithmetic: its parent's, as by default.", default=None)
    parent: str = declared(_ID, "Id of the plan that goes on; the server must know it.")
    stages: Sequence[Stage] = declared(STAGES, "Later ones, each of which becomes a plan of its own.")
    fingerprints: Mapping[str, str] = declared(
        _TEXTS, "Of corpora that the parent does not use; the server fills them in.", default_factory=dict
    )
    lengths: Mapping[str, str] = declared(
        _TEXTS,
        "Digests of the documents' lengths of such corpora, with rows documents; the server fills them in.",
        omit=True,
        default_factory=dict,
    )

    def settled(self) -> dict[str, Any]:
        """See `Declared.settled`."""
        starts = [stage.from_step for stage in self.stages]
        if not starts or any(a >= b for a, b in pairwise(starts)):
            raise InvalidPlan.expected("stages", "a list of stages with rising from_step", starts[:20])
        return {}


class Continued(Plan):
    """A plan that continues another one.

    Args:
        parent: bound.
        stages: that are added; nothing is checked.
        fingerprints, lengths: of corpora that the parent does not use.
        is_kept: see `of`.

    Attributes:
        parent_id: of the plan before the added stages.
        num_before, num_sources_before: stages and sources of that plan.
    """

    parent_id: str
    num_before: int
    num_sources_before: int

    def __init__(
        self,
        parent: Plan,
        stages: Sequence[Stage],
        fingerprints: Mapping[str, str],
        lengths: Mapping[str, str],
        *,
        is_kept: bool = True,
    ) -> None:
        alike = (
            "version",
            "seq_len",
            "stride",
            "seed",
            "order",
            "rows",
            "skip_steps",
            "family",
            "tokenizers",
        )
        fields = {name: getattr(parent, name) for name in alike}
        if lengths:
            fields |= parent._with_digests({**parent.digests, **lengths})
        before, known = parent.sources, set(parent.sources)
        new = dict.fromkeys(name for stage in stages for name in stage.mixture if name not in known)
        log = parent.log.continued(len(parent.stages), len(before), stages, is_shared=is_kept)
        self.__dict__.update(
            fields,
            parent_id=parent.id,
            num_before=len(parent.stages),
            num_sources_before=len(before),
            sources=(*before, *new) if new else before,
            row_lengths=parent.lengths_with(parent.row_lengths, stages),
            fingerprints={**parent.fingerprints, **fingerprints} if new else parent.fingerprints,
            stages=Made(len(parent.stages) + len(stages), log.stage),
            log=log,
            _root=parent.root,
            _added=tuple(stages),
        )

    @classmethod
    def of(cls, parent: Plan, link: Link, *, is_kept: bool = True) -> Continued:
        """Return the plan of a link.

        Args:
            is_kept: else nothing that other plans share keeps the stages that it adds.

        Raises:
            InvalidPlan: the link contradicts its parent, or the plan would be too long.
        """
        if link.version not in (None, parent.version):
            accepted = f"the version of its parent, {parent.version}"
            raise InvalidPlan.expected("version", accepted, link.version)
        last, first = int(parent.log.from_steps[len(parent.stages) - 1]), link.stages[0].from_step
        if first <= last:
            accepted = f"above {last}, the plan step at which the last stage of its parent begins"
            raise InvalidPlan.expected("stages[0].from_step", accepted, first)
        stages = parent.checked_parts(link.stages)
        known = set(parent.sources)
        for number, stage in enumerate(link.stages):
            known.update(stage.mixture)
            if strangers := sorted(set(stage.exclude) - known):
                accepted = "sources of the plan up to this stage"
                raise InvalidPlan.expected(f"stages[{number}].exclude", accepted, shorten(strangers))
        new = known - set(parent.sources)
        if parent.family is not None:
            check_family(parent.order, parent.rows, stages)
            if new:
                accepted = "sources of its parent, which is a member of a family"
                raise InvalidPlan.expected("stages[].mixture", accepted, shorten(sorted(new)))
        for field in ("fingerprints", "lengths"):
            if strangers := sorted(set(getattr(link, field)) - new):
                accepted = "corpora that the link uses and its parent does not"
                raise InvalidPlan.expected(field, accepted, shorten(strangers))
        if link.lengths and (parent.tabled is None or not parent.tabled.digests_field):
            raise InvalidPlan("lengths must be left out where rows are windows", parameter="lengths")
        num_stages, num_sources = len(parent.stages) + len(stages), len(parent.sources) + len(new)
        for what, number, limit in (
            ("stages", num_stages, MAX_CHAIN_STAGES),
            ("stages times the sources that any of them uses", num_stages * num_sources, MAX_CHAIN_WEIGHTS),
        ):
            if number > limit:
                raise InvalidPlan(
                    f"a plan that continues others may have at most {limit} {what}, got {number}",
                    parameter="stages",
                    received=number,
                    accepted=f"at most {limit}",
                    remedy="decide less often, or begin a new plan",
                )
        if any(stage.exclude for stage in stages):
            known_exclude = tuple(parent.log.exclude.items())  # others may append meanwhile
            its = sorted((each for each in known_exclude if each[0] < len(parent.stages)), key=itemgetter(0))
            excludes = [*(each for _, each in its), *(stage.exclude for stage in stages if stage.exclude)]
            if len(excludes) > MAX_STAGES:
                accepted = f"in at most {MAX_STAGES} stages of a plan"
                raise InvalidPlan.expected("stages[].exclude", accepted, len(excludes))
            check_ranges(excludes)
        parent.rows.check(seq_len=parent.seq_len, stride=parent.stride, stages=stages)
        parent.lengths_with(parent.row_lengths, stages)
        parent.order.settle(seq_len=parent.seq_len, stride=parent.stride, seed=parent.seed, stages=stages)
        return cls(parent, stages, link.fingerprints, link.lengths, is_kept=is_kept)

    @classmethod
    def restored(cls, parent: Plan, links: Sequence[KeptLink]) -> Continued | None:
        """Return the plan of links that were checked when they were posted; None if one is damaged."""
        stages, names = [], dict[str, dict[str, str]](fingerprints={}, lengths={})
        before = parent.id
        for each in links:
            if id_of(each.document) != each.id:
                return None
            document = orjson.loads(each.document)
            if document["parent"] != before:
                return None
            before = each.id
            (stage,) = document["stages"]
            exclude = {name: ranges_from_json(name, its) for name, its in stage.pop("exclude", {}).items()}
            stages.append(Stage.kept(**{"seq_len": None, **stage}, exclude=exclude))
            for field, its in names.items():
                its.update(document.get(field, {}))
        plan = cls(parent, stages, names["fingerprints"], names["lengths"])
        plan.__dict__.update(links=(*links[-1:],), _added=())
        return plan

    @property
    def root(self) -> Plan:
        """See `Plan.root`."""
        root: Plan = self.__dict__["_root"]
        return root

    @cached_property
    def links(self) -> tuple[KeptLink, ...]:
        """The links of the added stages; the plan's own is the last."""
        self.require_fingerprints()
        parent, known, found = self.parent_id, set(self.sources[: self.num_sources_before]), []
        digests = self.digests
        for stage in self.__dict__["_added"]:
            new = [name for name in stage.mixture if name not in known]
            known.update(new)
            document: dict[str, Any] = {
                "parent": parent,
                "stages": [stage.to_json(spell=lambda ranges: ranges)],
                "version": self.version,
            }
            if new:
                document["fingerprints"] = {name: self.fingerprints[name] for name in new}
                document |= {"lengths": {name: digests[name] for name in new}} if digests else {}
            text = canonical(document)
            parent = id_of(text)
            found.append(KeptLink(parent, text))
        return tuple(found)

    def forget_links(self) -> None:
        """Drop the documents of all links but the last: a plan that is kept needs no other."""
        self.__dict__.update(links=self.links[-1:], _added=())

    @cached_property
    def id(self) -> str:
        """SHA-256 of the canonical JSON of the last link."""
        return self.links[-1].id

    @cached_property
    def canonical_json(self) -> str:
        """The JSON text of the last link."""
        return self.links[-1].document

    def changed(self, **changes: Any) -> Self:
        """See `Plan.changed`."""
        plan = object.__new__(type(self))
        kept = {name: value for name, value in self.__dict__.items() if name not in _CACHED}
        plan.__dict__.update(kept | changes)
        return plan

    def to_json(self, spell: Any = None) -> Any:
        """Return the last link."""
        return orjson.loads(self.canonical_json)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Continued) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


_CACHED: Final = ("links", "id", "canonical_json")


def parse_document(text: str | bytes | bytearray) -> Plan | Link | Draft:
    """Read a posted document: a plan, what continues one, or a plan whose stages say epochs or tokens.

    Raises:
        InvalidPlan: see `Plan.parse`.
    """
    return parse_json(text, _document_of)


def _document_of(parsed: Any) -> Plan | Link | Draft:
    if not isinstance(parsed, Mapping):
        return Plan.from_json(parsed)
    is_draft = Draft.is_one(parsed)
    if "parent" in parsed and is_draft:
        raise InvalidPlan(
            "a plan that continues another one says mixture and from_step, and no epochs, tokens, until, "
            "max_epochs or num_steps",
            parameter="stages",
            remedy="give weights; or post a whole plan whose later stages say epochs or tokens",
        )
    if "parent" in parsed:
        return Link.from_json(parsed)
    # The plan in a loader's state has the decisions of the run beside it, "" where there are none.
    if decisions := parsed.get("decisions"):
        raise InvalidPlan(
            "the plan is that of a run that was extended, and its decisions are no field of a plan",
            parameter="decisions",
            received=str(decisions)[:100],
            remedy="build the loader with CorpusLoader(url, plan=state['plan']), which posts them; or post "
            'the stages that continue the plan as {"parent": ID, "stages": [...]}',
        )
    document = {name: value for name, value in parsed.items() if name != "decisions"}
    return Draft.from_json(document) if is_draft else Plan.from_json(document)
